"""A threshold for each layer, so that all layers together skip the share asked for where it costs least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mimo_edge.export.gates.source import Gate

_HALVINGS = 40


@dataclass(frozen=True)
class Ranked:
    """A layer's (row, block) pairs on rows not trained on, best score first: scores float32 [N], and the importance
    float64 [N + 1] that keeping the first n of them holds."""

    scores: Tensor
    held: Tensor

    @staticmethod
    def of(scores: Tensor, importance: Tensor) -> Ranked:
        """Both [T, blocks]."""
        values, at = scores.flatten().sort(descending=True, stable=True)
        held = importance.flatten().double()[at].cumsum(0)
        return Ranked(values, torch.cat([held.new_zeros(1), held]))

    def kept(self, price: float) -> int:
        """How many pairs to keep when keeping one costs `price`."""
        return int((self.held - price * torch.arange(len(self.held))).argmax())

    def threshold(self, kept: int) -> float:
        """Half way between the last score kept and the first one dropped."""
        low = self.scores[min(kept, len(self.scores) - 1)]
        high = self.scores[max(kept - 1, 0)]
        return float((low + high) / 2) if 0 < kept < len(self.scores) else float(low + 1 if kept == 0 else low - 1)


def set_thresholds(gates: Sequence[Gate], ranked: Sequence[Ranked], sizes: Sequence[int], skip: float) -> list[Gate]:
    """The gates with biases moved so that the layers, `sizes` channels each, skip the share `skip` together.

    One price is the same in all layers: the next block skipped costs alike everywhere. Layers differ in the share they
    skip. The price is found by bisection.
    """
    work = torch.tensor(sizes, dtype=torch.float64)

    def kept_at(price: float) -> list[int]:
        return [r.kept(price) for r in ranked]

    def skipped(kept: list[int]) -> float:
        shares = torch.tensor([1 - k / len(r.scores) for k, r in zip(kept, ranked, strict=True)], dtype=torch.float64)
        return float((shares * work).sum() / work.sum())

    low, high = 0.0, max(float(r.held[-1]) for r in ranked) + 1e-30  # nothing is skipped; everything is
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5 if low else high * 1e-3
        low, high = (low, middle) if skipped(kept_at(middle)) > skip else (middle, high)
    kept = kept_at(low)
    return [
        replace(gate, bias=gate.bias - gate.bias.dtype.type(r.threshold(k)))
        for gate, r, k in zip(gates, ranked, kept, strict=True)
    ]
