"""What calibration keeps of the rows in front of a product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BATCH = 8192  # rows


@dataclass(frozen=True)
class Range:
    """Of absolute inputs: the largest, and what 99.9 % of rows stay within. Batches are combined by geometric mean."""

    largest: float
    usual: float


@dataclass(frozen=True)
class Statistics:
    """hessian float64 [K, K]: sum of x x^T of the rounded model, None where nobody needs it; cross: sum of (float
    model's x) x^T, None also where the two models' rows do not belong together; means float64 [K] of both, the float
    model's first; range of the rounded model's inputs, None without rows."""

    hessian: Tensor | None
    cross: Tensor | None
    means: tuple[Tensor, Tensor]
    range: Range | None

    @staticmethod
    def of(exact: Sequence[Tensor], rounded: Sequence[Tensor], *, hessian: bool, cross: bool) -> Statistics:
        """Rows float32 [T, K] of each sequence, in the float and in the rounded model; the same list if there is one
        model only. `cross` needs rows that are the same places of the text."""
        return Statistics(
            hessian=_products(rounded, rounded) if hessian else None,
            cross=_products(exact, rounded) if hessian and cross and exact is not rounded else None,
            means=(_mean(exact), _mean(rounded)),
            range=_range(rounded),
        )


def _products(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Sum of left right^T over all rows, float64 [K, K]."""
    total = torch.zeros(left[0].shape[1], right[0].shape[1], dtype=torch.float64)
    for a, b in zip(_batches(left), _batches(right), strict=True):
        total += a.T @ b
    return total


def _mean(rows: Sequence[Tensor]) -> Tensor:
    total = torch.stack([x.double().sum(0) for x in rows]).sum(0)
    return total / max(1, sum(map(len, rows)))


def _range(rows: Sequence[Tensor]) -> Range | None:
    tops = [x.abs().amax(-1) for x in rows if len(x)]
    if not tops:
        return None
    batches = list(_batches(tops))
    largest = torch.stack([b.max() for b in batches])
    usual = torch.stack([b.quantile(0.999) for b in batches])
    return Range(*(float(v.double().clamp(min=1e-30).log().mean().exp()) for v in (largest, usual)))


def _batches(rows: Sequence[Tensor]) -> Iterator[Tensor]:
    """Batches of about _BATCH rows, in the order of the text."""
    held: list[Tensor] = []
    for x in rows:
        held.append(x)
        if sum(map(len, held)) >= _BATCH:
            yield torch.cat(held)
            held = []
    if held:
        yield torch.cat(held)
