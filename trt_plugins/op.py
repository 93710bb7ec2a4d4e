"""What a `mimo` op is: typed fields, the tensors that it takes and gives, its scratch and its launches.

No TensorRT here: the ONNX schema (export/graph/schemas.py), the plugin (plugin.py) and the tests read one definition.
Launches are those of kernels/*/variants.py that the cuda backend makes, so that a bundle's kernels serve both.
Dimensions that differ from step to step are named: "rows" of the step, "logit_rows" of the head, "pages" and
"sequences" of the pools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from mimo_edge.kernels.int4_linear.variants import Tuned, TunedMany
from mimo_edge.kernels.launch import Buffer, Launch
from mimo_edge.spec import MAX_DRAFTS, TensorQuant

Dim = int | str
TensorType = Literal["fp16", "fp32", "i32", "i8"]
SHORT = MAX_DRAFTS + 1  # rows of a step that decode kernels evaluate; longer ones are pieces of a prompt
DOMAIN, VERSION = "mimo", "1"
_MANY = 5  # numbers of one cut for many rows


@dataclass(frozen=True)
class Tensor:
    """An input or output. Packed weights are "i8": the bytes of the device layout (int4_linear/layout.py)."""

    name: str
    type: TensorType
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class Copy:
    """A copy of a whole tensor within the device."""

    source: str
    to: str


Work = tuple[Launch | Copy, ...]


@dataclass(frozen=True)
class Op:
    """Fields are the node's attributes; subclasses raise ValueError from __post_init__ where one cannot be right."""

    kind: ClassVar[str]

    def inputs(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def outputs(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def scratch(self, rows: int) -> dict[str, Buffer]:
        """Memory that a step of `rows` rows needs beside inputs and outputs."""
        return {}

    def work(self, rows: int) -> Work:
        """What a step of `rows` rows queues; buffers are named as tensors and scratch are."""
        raise NotImplementedError

    def in_place(self) -> Mapping[str, str]:
        """Outputs that must be bound to the memory of an input: output -> input."""
        return {}


def packed(name: str, n: int, k: int, bits: int, group: int, stacked: int = 1) -> tuple[Tensor, ...]:
    """q, scales and zeros of an [n, k] matrix, as int4_linear.layout.shapes lays them out for the kernels."""
    tiles = stacked * -(-(n // stacked) // 32)
    return (
        Tensor(f"{name}.q", "i8", (tiles, k // 32, 128 * bits)),
        Tensor(f"{name}.scales", "fp16", (tiles, k // group, 32)),
        Tensor(f"{name}.zeros", "i8", (tiles, k // group, 32)),
    )


def quant(bits: int, group: int) -> TensorQuant:
    return TensorQuant(bits, group)


def check_product(k: int, bits: int, group: int, **sizes: int) -> None:
    """Raises ValueError naming the field of a product's sizes that no kernel has."""
    if bits not in (4, 8):
        raise ValueError(f"bits {bits} (allowed: 4, 8)")
    if group not in (32, 64, 128):
        raise ValueError(f"group {group} (allowed: 32, 64, 128)")
    if k <= 0 or k % group:
        raise ValueError(f"k {k} (allowed: multiples of the group, {group})")
    for name, value in sizes.items():
        if value <= 0:
            raise ValueError(f"{name} {value} (allowed: 1 and more)")


def check_flags(**flags: int) -> None:
    for name, value in flags.items():
        if value not in (0, 1):
            raise ValueError(f"{name} {value} (allowed: 0, 1)")


def check_activation(activation: str) -> None:
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"activation {activation!r} (allowed: 'silu', 'gelu_tanh')")


def check_cuts(many: tuple[int, ...], **cuts: tuple[int, ...]) -> None:
    for name, cut in cuts.items():
        if len(cut) != 5 or cut[0] < 1 or cut[1] < 1:
            raise ValueError(f"{name} {cut} (allowed: row_tiles, warps, stages, overlap, ahead)")
    if not many or len(many) % _MANY:
        raise ValueError(f"many {many} (allowed: rows, warps, tokens, chunks, stages, over and over)")


def cut_numbers(cut: Tuned) -> tuple[int, ...]:
    """A cut as the numbers of a field."""
    return cut.row_tiles, cut.warps, cut.stages, int(cut.overlap), cut.ahead


def cut_of(numbers: tuple[int, ...]) -> Tuned:
    row_tiles, warps, stages, overlap, ahead = numbers
    return Tuned(row_tiles, warps, stages, bool(overlap), ahead)


def many_numbers(cuts: Mapping[int, TunedMany]) -> tuple[int, ...]:
    """Cuts for many rows, by the rows of a step, as the numbers of a field."""
    return tuple(x for rows, c in cuts.items() for x in (rows, c.warps, c.tokens, c.chunks, c.stages))


def many_of(numbers: tuple[int, ...], rows: int) -> TunedMany:
    """Raises ValueError when there is no cut for steps of so many rows."""
    cuts = {numbers[i]: TunedMany(*numbers[i + 1 : i + _MANY]) for i in range(0, len(numbers), _MANY)}
    if rows not in cuts:
        raise ValueError(f"a step of {rows} rows (the bundle has kernels for 1, {SHORT}, {', '.join(map(str, cuts))})")
    return cuts[rows]
