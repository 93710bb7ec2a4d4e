"""Int4Head: logits of a few rows, and what their best tokens are found from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mimo_edge.kernels.int4_linear import variants
from mimo_edge.kernels.launch import Buffer
from mimo_edge.trt_plugins.op import SHORT, Op, Tensor, Work, check_cuts, check_product, cut_of, packed, quant


@dataclass(frozen=True)
class Int4Head(Op):
    """logits float32 [logit_rows, n] of the final norm of x float32 [logit_rows, k], at most 4 rows.

    best float32 and ids i32 [logit_rows, parts]: the largest logit among each program's and its token.
    """

    kind: ClassVar[str] = "Int4Head"
    n: int
    k: int
    bits: int
    group: int
    eps: float
    cut: tuple[int, ...]

    def __post_init__(self) -> None:
        check_product(self.k, self.bits, self.group, n=self.n)
        check_cuts((0,) * 5, cut=self.cut)

    def inputs(self) -> tuple[Tensor, ...]:
        weights = packed("w", self.n, self.k, self.bits, self.group)
        return Tensor("x", "fp32", ("logit_rows", self.k)), *weights, Tensor("norm", "fp32", (self.k,))

    def outputs(self) -> tuple[Tensor, ...]:
        parts = variants.head_programs(self.n, cut_of(self.cut))
        return (
            Tensor("logits", "fp32", ("logit_rows", self.n)),
            Tensor("best", "fp32", ("logit_rows", parts)),
            Tensor("ids", "i32", ("logit_rows", parts)),
        )

    def scratch(self, rows: int) -> dict[str, Buffer]:
        return {"normed": Buffer("fp16", (rows, self.k), "scratch")}

    def work(self, rows: int) -> Work:
        if rows > SHORT:
            raise ValueError(f"logits of {rows} rows (allowed: 1 to {SHORT})")
        return variants.decode_head(
            rows,
            self.n,
            self.k,
            quant(self.bits, self.group),
            x="x",
            w="w",
            y="logits",
            best="best",
            best_index="ids",
            norm="norm",
            normed="normed",
            eps=self.eps,
            tuned=cut_of(self.cut),
        )
