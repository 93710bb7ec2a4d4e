"""Int4GateUp: both first products of a feed-forward and its activation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mimo_edge.kernels.int4_linear import variants
from mimo_edge.kernels.launch import Buffer
from mimo_edge.trt_plugins.op import (
    SHORT,
    Op,
    Tensor,
    Work,
    check_activation,
    check_cuts,
    check_product,
    cut_of,
    many_of,
    packed,
    quant,
)


@dataclass(frozen=True)
class Int4GateUp(Op):
    """h float16 [rows, intermediate] = act(gate y) * up y of y = rmsnorm(x) * norm; x float32 [rows, k]."""

    kind: ClassVar[str] = "Int4GateUp"
    intermediate: int
    k: int
    bits: int
    group: int
    activation: str
    eps: float
    cut: tuple[int, ...]
    many: tuple[int, ...]

    def __post_init__(self) -> None:
        check_product(self.k, self.bits, self.group, intermediate=self.intermediate)
        check_activation(self.activation)
        check_cuts(self.many, cut=self.cut)

    def inputs(self) -> tuple[Tensor, ...]:
        weights = packed("w", 2 * self.intermediate, self.k, self.bits, self.group, stacked=2)
        return Tensor("x", "fp32", ("rows", self.k)), *weights, Tensor("norm", "fp32", (self.k,))

    def outputs(self) -> tuple[Tensor, ...]:
        return (Tensor("h", "fp16", ("rows", self.intermediate)),)

    def scratch(self, rows: int) -> dict[str, Buffer]:
        return {"normed": Buffer("fp16", (rows, self.k), "scratch")}

    def work(self, rows: int) -> Work:
        sizes = (rows, self.intermediate, self.k, quant(self.bits, self.group))
        names = {"x": "x", "w": "w", "h": "h", "norm": "norm", "normed": "normed"}
        options = {"eps": self.eps, "activation": self.activation}
        if rows <= SHORT:
            return variants.decode_gate_up(*sizes, tuned=cut_of(self.cut), **names, **options)  # type: ignore[arg-type]
        return variants.prefill_gate_up(*sizes, tuned=many_of(self.many, rows), **names, **options)  # type: ignore[arg-type]
