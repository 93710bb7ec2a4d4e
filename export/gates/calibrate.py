"""From calibration text to orders and gates, one layer's weights in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimo_edge.export.families import Source
from mimo_edge.export.gates.feed_forward import FeedForward, walk
from mimo_edge.export.gates.importance import output_change
from mimo_edge.export.gates.permute import permute
from mimo_edge.export.gates.source import Gate, GatedSource
from mimo_edge.export.gates.threshold import Ranked, set_thresholds
from mimo_edge.export.gates.train import first_gate, scores, train_gate
from mimo_edge.spec import GateSpec, ModelSpec

ORDER_ROWS = 2048  # rows that orders and prices are found on
ANCHORS = (0.2, 0.4, 0.6, 0.8)  # shares that gates are trained for; those between take the nearest one's
_HELD_OUT = 8  # one row in so many, at the end of each text, sets thresholds and is not trained on
_LEAST_PRICE = 1e-30  # where whole blocks do nothing
_EPOCHS, _MORE_EPOCHS = 10, 5  # of the first anchor, and of each that starts from the one before

Report = Callable[[int, int], None]  # layers done, all layers


@dataclass(frozen=True)
class Prepared:
    """Orders int64 [intermediate] by layer, and the importance of all (row, block) pairs seen, ascending."""

    block: int
    metrics: list[Tensor]
    orders: dict[int, NDArray[np.int64]]
    pooled: Tensor

    def importance(self, ffn: FeedForward) -> Tensor:
        """[T, blocks], nats, of a feed-forward that is in this order already."""
        return output_change(ffn, self.block, self.metrics[ffn.i])

    def price(self, share: float) -> float:
        """The importance below which the share `share` of all pairs lies."""
        return float(self.pooled[min(len(self.pooled) - 1, round(share * len(self.pooled)))])


@dataclass(frozen=True)
class Trained:
    """A gate for each anchor and layer, and how it ranks rows that it was not trained on."""

    gates: dict[float, list[Gate]]
    ranked: dict[float, list[Ranked]]
    sizes: list[int]

    def at(self, share: float) -> dict[int, Gate]:
        """Gates by layer that skip the share `share` of all work."""
        anchor = min(self.gates, key=lambda a: abs(a - share))
        return dict(enumerate(set_thresholds(self.gates[anchor], self.ranked[anchor], self.sizes, share)))


def prepare(
    spec: ModelSpec,
    source: Source,
    texts: Sequence[Tensor],
    block: int,
    metrics: list[Tensor],
    seed: int,
    progress: Report,
) -> Prepared:
    """Orders of channels and prices from at most ORDER_ROWS rows of `texts` (int64 [T] each)."""
    orders: dict[int, NDArray[np.int64]] = {}
    found: list[Tensor] = []

    def visit(ffn: FeedForward) -> None:
        order = permute(output_change(ffn, 1, metrics[ffn.i]), block, seed)
        orders[ffn.i] = order.numpy()
        found.append(output_change(ffn.reordered(order), block, metrics[ffn.i]).flatten())

    walk(spec, source, head_of(texts, ORDER_ROWS), visit, progress)
    return Prepared(block, metrics, orders, torch.cat(found).sort().values)


def train(
    spec: ModelSpec,
    source: Source,
    texts: Sequence[Tensor],
    prepared: Prepared,
    gate: GateSpec,
    seed: int,
    progress: Report,
) -> Trained:
    """Gates trained on what the ungated model computes from `texts`, layer by layer."""
    gates: dict[float, list[Gate]] = {a: [] for a in ANCHORS}
    ranked: dict[float, list[Ranked]] = {a: [] for a in ANCHORS}
    seen = torch.cat([torch.arange(len(text)) < len(text) - max(1, len(text) // _HELD_OUT) for text in texts])

    def visit(ffn: FeedForward) -> None:
        importance, x = prepared.importance(ffn), ffn.x
        current = None
        for anchor in ANCHORS:
            price = max(prepared.price(anchor), _LEAST_PRICE)
            epochs = _MORE_EPOCHS if current else _EPOCHS
            current = current or first_gate(x[seen], importance[seen], price, gate.rank)
            current = train_gate(x[seen], importance[seen], price, current, epochs, seed)
            gates[anchor].append(current)
            ranked[anchor].append(Ranked.of(scores(current, x[~seen]), importance[~seen]))

    walk(spec, GatedSource(source, prepared.orders, {}), texts, visit, progress)
    return Trained(gates, ranked, [spec.ffn_of(i).intermediate for i in range(len(spec.layers))])


def head_of(texts: Sequence[Tensor], rows: int) -> list[Tensor]:
    """The first texts with at most `rows` rows together, the last one cut."""
    found: list[Tensor] = []
    for text in texts:
        if rows <= 0:
            break
        found.append(text[:rows])
        rows -= len(found[-1])
    return found
