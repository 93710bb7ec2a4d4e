"""Int4Linear: a product with packed weights, and what the model does around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mimo_edge.kernels.int4_linear import variants
from mimo_edge.kernels.launch import Buffer
from mimo_edge.kernels.norm.variants import add_norm
from mimo_edge.trt_plugins.op import (
    SHORT,
    Copy,
    Op,
    Tensor,
    Work,
    check_cuts,
    check_flags,
    check_product,
    cut_of,
    many_of,
    packed,
    quant,
)


@dataclass(frozen=True)
class Int4Linear(Op):
    """y [rows, n] = x w^T.

    `norm`: x is the float32 residual stream, normed first (RMS, times a weight). `bias` is added. `residual`: y is
    float32, residual + product; with `post_norm` the product is normed before it is added (Gemma).
    """

    kind: ClassVar[str] = "Int4Linear"
    n: int
    k: int
    bits: int
    group: int
    norm: int
    bias: int
    residual: int
    post_norm: int
    eps: float
    cut: tuple[int, ...]
    many: tuple[int, ...]

    def __post_init__(self) -> None:
        check_product(self.k, self.bits, self.group, n=self.n)
        check_flags(norm=self.norm, bias=self.bias, residual=self.residual, post_norm=self.post_norm)
        if self.post_norm and not self.residual:
            raise ValueError("post_norm 1 without residual (allowed: 0)")
        check_cuts(self.many, cut=self.cut)

    def inputs(self) -> tuple[Tensor, ...]:
        extra = {
            "norm": (self.norm, ("fp32", (self.k,))),
            "bias": (self.bias, ("fp32", (self.n,))),
            "residual": (self.residual, ("fp32", ("rows", self.n))),
            "post_norm": (self.post_norm, ("fp32", (self.n,))),
        }
        return (
            Tensor("x", "fp32" if self.norm else "fp16", ("rows", self.k)),
            *packed("w", self.n, self.k, self.bits, self.group),
            *(Tensor(name, *rest) for name, (used, rest) in extra.items() if used),  # type: ignore[arg-type]
        )

    def outputs(self) -> tuple[Tensor, ...]:
        return (Tensor("y", "fp32" if self.residual else "fp16", ("rows", self.n)),)

    def scratch(self, rows: int) -> dict[str, Buffer]:
        normed = {"normed": Buffer("fp16", (rows, self.k), "scratch")} if self.norm else {}
        product = {"product": Buffer("fp16", (rows, self.n), "scratch")} if self.post_norm else {}
        return normed | product

    def work(self, rows: int) -> Work:
        added = self.residual and not self.post_norm
        names = {
            "x": "x",
            "w": "w",
            "y": "product" if self.post_norm else "y",
            "norm": "norm" if self.norm else None,
            "normed": "normed" if self.norm else None,
            "bias": "bias" if self.bias else None,
            "residual": "residual" if added else None,
        }
        q, out = quant(self.bits, self.group), "fp32" if added else "fp16"
        if rows <= SHORT:
            cut = cut_of(self.cut)
            product: Work = variants.decode(rows, self.n, self.k, q, eps=self.eps, out=out, tuned=cut, **names)  # type: ignore[arg-type]
        else:
            many = many_of(self.many, rows)
            product = variants.prefill(rows, self.n, self.k, q, eps=self.eps, out=out, tuned=many, **names)  # type: ignore[arg-type]
        if not self.post_norm:
            return product
        return *product, Copy("residual", "y"), add_norm(rows, self.n, self.eps, y="product", w="post_norm", x="y")
