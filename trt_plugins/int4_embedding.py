"""Int4Embedding: rows of a packed table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mimo_edge.kernels.int4_embedding import variants
from mimo_edge.trt_plugins.op import Op, Tensor, Work, check_product, packed, quant


@dataclass(frozen=True)
class Int4Embedding(Op):
    """x float32 [rows, k] = table[tokens] * scale; the table is [n, k]."""

    kind: ClassVar[str] = "Int4Embedding"
    n: int
    k: int
    bits: int
    group: int
    scale: float

    def __post_init__(self) -> None:
        check_product(self.k, self.bits, self.group, n=self.n)

    def inputs(self) -> tuple[Tensor, ...]:
        return Tensor("tokens", "i32", ("rows",)), *packed("w", self.n, self.k, self.bits, self.group)

    def outputs(self) -> tuple[Tensor, ...]:
        return (Tensor("x", "fp32", ("rows", self.k)),)

    def work(self, rows: int) -> Work:
        q = quant(self.bits, self.group)
        return variants.embed(rows, self.n, self.k, q, tokens="tokens", w="w", y="x", scale=self.scale)
