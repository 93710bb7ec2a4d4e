"""Rotation: the angles of a step's positions, once for all layers of an attention kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mimo_edge.kernels.windowed_attention import variants
from mimo_edge.spec import AttentionSpec
from mimo_edge.trt_plugins.op import Op, Tensor, Work


def angles(rotary_dim: int) -> Tensor:
    """What the op writes: cosines, then sines."""
    return Tensor("rotation", "fp32", ("rows", 2, max(1, rotary_dim // 2)))


@dataclass(frozen=True)
class Rotation(Op):
    """rotation float32 [rows, 2, rotary_dim / 2] of positions i32 [rows] times frequencies float32."""

    kind: ClassVar[str] = "Rotation"
    rotary_dim: int

    def __post_init__(self) -> None:
        if self.rotary_dim < 0 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim {self.rotary_dim} (allowed: even, 0 and more)")

    def inputs(self) -> tuple[Tensor, ...]:
        half = max(1, self.rotary_dim // 2)
        return Tensor("positions", "i32", ("rows",)), Tensor("frequencies", "fp32", (half,))

    def outputs(self) -> tuple[Tensor, ...]:
        return (angles(self.rotary_dim),)

    def work(self, rows: int) -> Work:
        a = AttentionSpec(1, 1, max(1, self.rotary_dim), 1, self.rotary_dim, 1.0, 1.0)
        return (variants.rotation(rows, a, positions="positions", frequencies="frequencies", out="rotation"),)
