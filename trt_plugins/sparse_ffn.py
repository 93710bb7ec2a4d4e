"""SparseFfn: a feed-forward behind a gate, of which every row computes its own blocks of channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mimo_edge.kernels.launch import Buffer
from mimo_edge.kernels.sparse_ffn import variants
from mimo_edge.spec import GateSpec
from mimo_edge.trt_plugins.op import (
    SHORT,
    Op,
    Tensor,
    Work,
    check_activation,
    check_cuts,
    check_flags,
    check_product,
    cut_of,
    many_of,
    packed,
    quant,
)


@dataclass(frozen=True)
class SparseFfn(Op):
    """y float32 [rows, k] = x + down(keep * act(gate z) * up z), z = rmsnorm(x) * norm.

    Row by row, block b is kept iff (w2 relu(w1 z) + gate_bias)[b] > 0. `bias`: down_bias is added.
    """

    kind: ClassVar[str] = "SparseFfn"
    intermediate: int
    k: int
    bits: int
    group: int
    block: int
    rank: int
    activation: str
    bias: int
    eps: float
    cut_gate_up: tuple[int, ...]
    cut_down: tuple[int, ...]
    many: tuple[int, ...]

    def __post_init__(self) -> None:
        check_product(self.k, self.bits, self.group, intermediate=self.intermediate, rank=self.rank)
        if self.block not in (16, 32, 64) or self.intermediate % self.block:
            raise ValueError(f"block {self.block} (allowed: 16, 32, 64, a divisor of intermediate {self.intermediate})")
        check_activation(self.activation)
        check_flags(bias=self.bias)
        check_cuts(self.many, cut_gate_up=self.cut_gate_up, cut_down=self.cut_down)

    def inputs(self) -> tuple[Tensor, ...]:
        blocks = self.intermediate // self.block
        return (
            Tensor("x", "fp32", ("rows", self.k)),
            Tensor("norm", "fp32", (self.k,)),
            Tensor("w1", "fp32", (self.rank, self.k)),
            Tensor("w2", "fp32", (blocks, self.rank)),
            Tensor("gate_bias", "fp32", (blocks,)),
            *packed("gate_up", 2 * self.intermediate, self.k, self.bits, self.group, stacked=2),
            *packed("down", self.k, self.intermediate, self.bits, self.group),
            *((Tensor("down_bias", "fp32", (self.k,)),) if self.bias else ()),
        )

    def outputs(self) -> tuple[Tensor, ...]:
        return (Tensor("y", "fp32", ("rows", self.k)),)

    def scratch(self, rows: int) -> dict[str, Buffer]:
        shapes: dict[str, tuple] = {
            "normed": ("fp16", (rows, self.k)),
            "ranks": ("fp32", (rows, self.rank)),
            "keep": ("u8", (rows, self.intermediate // self.block)),
            "h": ("fp16", (rows, self.intermediate)),
            "listed": ("i32", (variants.listed_size(self.intermediate, self.block, cut_of(self.cut_down)),)),
        }
        return {name: Buffer(kind, shape, "scratch") for name, (kind, shape) in shapes.items()}

    def work(self, rows: int) -> Work:
        gate, q, up = GateSpec(self.block, self.rank), quant(self.bits, self.group), cut_of(self.cut_gate_up)
        same = ("x", "norm", "w1", "w2", "normed", "ranks", "keep", "gate_up", "down", "h", "y")
        names = {n: n for n in same} | {"bias": "gate_bias", "residual": "x"}
        options = {"eps": self.eps, "activation": self.activation, "down_bias": "down_bias" if self.bias else None}
        sizes = (rows, self.intermediate, self.k)
        if rows <= SHORT:
            cuts = {"listed": "listed", "tuned_gate_up": up, "tuned_down": cut_of(self.cut_down)}
            return variants.decode_sparse(*sizes, q, gate, **names, **options, **cuts)  # type: ignore[arg-type]
        many = many_of(self.many, rows)
        return variants.prefill_sparse(*sizes, q, gate, tuned=many, **names, **options)  # type: ignore[arg-type]
