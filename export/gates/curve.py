"""Quality against skipped share, for gates and for the oracle, and how well a gate finds what matters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mimo_edge.export.families import Source
from mimo_edge.export.gates.calibrate import Prepared, Trained
from mimo_edge.export.gates.feed_forward import FeedForward, Visit, walk
from mimo_edge.export.gates.source import Gate, GatedSource
from mimo_edge.export.gates.train import scores
from mimo_edge.export.quantize.perplexity import cross_entropy
from mimo_edge.export.quantize.rtn import quantize_rows
from mimo_edge.spec import ModelSpec

_AT_K = (0.125, 0.25, 0.5, 0.75)  # shares of a row's blocks that precision and recall are taken at


@dataclass(frozen=True)
class Measured:
    """`skipped` is the share of feed-forward work left out, all layers together. `losses`: text -> perplexity over the
    dense model's, minus 1."""

    skipped: float
    losses: dict[str, float]

    @property
    def worst(self) -> float:
        return max(self.losses.values())


@dataclass(frozen=True)
class CurvePoint:
    """`asked` is the share that thresholds were set for on calibration rows."""

    asked: float
    gate: Measured
    oracle: Measured


@dataclass(frozen=True)
class AtK:
    """Of a row's `k` best scored blocks, `precision` is the share that the oracle keeps; `recall` is the share of what
    the oracle keeps that is among them."""

    k: int
    precision: float
    recall: float


@dataclass(frozen=True)
class LayerUse:
    """One layer's gate on the evaluation texts. `recall` is the share of importance kept, `agreement` the precision of
    the blocks kept against the oracle's, `union2` and `union4` the share of blocks that some of so many consecutive
    rows keep."""

    skipped: float
    recall: float
    agreement: float
    union2: float
    union4: float
    at_k: tuple[AtK, ...]


class Meter:
    """Perplexity of `texts` (int64 [T] by name) with what `visit` keeps, against the dense model."""

    def __init__(self, spec: ModelSpec, source: Source, texts: Mapping[str, Tensor]):
        self._spec, self._texts = spec, texts
        self.dense = self._nats(source, lambda ffn: None)

    def measure(self, source: Source, visit: Visit) -> Measured:
        """`visit` keeps some blocks of every layer of `source`, whose order may be another one."""
        work = dropped = 0.0

        def count(ffn: FeedForward) -> Tensor | None:
            nonlocal work, dropped
            keep = visit(ffn)
            assert keep is not None
            channels = self._spec.ffn_of(ffn.i).intermediate
            work += channels
            dropped += channels * float(1 - keep.mean())
            return keep

        nats = self._nats(source, count)
        return Measured(dropped / work, {name: math.exp(nats[name] - self.dense[name]) - 1 for name in nats})

    def _nats(self, source: Source, visit: Visit) -> dict[str, float]:
        """Mean nats a token, by text."""
        texts = list(self._texts.values())
        hidden = walk(self._spec, source, texts, visit, lambda done, total: None)
        rows = torch.cat([x[:-1] for x in hidden.split([len(t) for t in texts])])
        targets = torch.cat([text[1:] for text in texts])
        nats = cross_entropy(self._spec, source, quantize_rows, None, rows, targets)
        parts = nats.split([len(text) - 1 for text in texts])
        return {name: float(part.mean()) for name, part in zip(self._texts, parts, strict=True)}


def gate_visit(gates: Mapping[int, Gate]) -> Visit:
    return lambda ffn: (scores(gates[ffn.i], ffn.x) > 0).float()


def oracle_visit(prepared: Prepared, share: float) -> Visit:
    """The blocks whose loss is felt most, as only the computed feed-forward itself can tell."""
    price = prepared.price(share)
    return lambda ffn: (prepared.importance(ffn) > price).float()


def measure_point(meter: Meter, source: Source, prepared: Prepared, trained: Trained, share: float) -> CurvePoint:
    """Both curves at one share; `source` is the checkpoint's own."""
    ordered = GatedSource(source, prepared.orders, {})
    gates = meter.measure(ordered, gate_visit(trained.at(share)))
    return CurvePoint(share, gates, meter.measure(ordered, oracle_visit(prepared, share)))


def layer_uses(
    spec: ModelSpec,
    source: Source,
    prepared: Prepared,
    gates: Mapping[int, Gate],
    share: float,
    texts: Mapping[str, Tensor],
) -> list[LayerUse]:
    """How each layer's gate does on `texts`, in the gated model. Pairs of rows do not cross texts."""
    price, sizes = prepared.price(share), [len(text) for text in texts.values()]
    found: list[LayerUse] = []

    def visit(ffn: FeedForward) -> Tensor:
        z, importance = scores(gates[ffn.i], ffn.x), prepared.importance(ffn)
        keep, truth = z > 0, importance > price
        found.append(
            LayerUse(
                skipped=float(1 - keep.float().mean()),
                recall=_ratio((importance * keep).sum(), importance.sum()),
                agreement=_ratio((keep & truth).sum(), keep.sum()),
                union2=_union(keep, sizes, 2),
                union4=_union(keep, sizes, 4),
                at_k=tuple(_at_k(z, truth, max(1, round(part * z.shape[1]))) for part in _AT_K),
            )
        )
        return keep.float()

    walk(spec, GatedSource(source, prepared.orders, {}), list(texts.values()), visit, lambda done, total: None)
    return found


def _at_k(z: Tensor, truth: Tensor, k: int) -> AtK:
    hits = truth.gather(1, z.topk(k, dim=1).indices).sum()
    return AtK(k, float(hits) / (len(z) * k), _ratio(hits, truth.sum()))


def _union(keep: Tensor, sizes: list[int], rows: int) -> float:
    parts = [part.unfold(0, rows, 1).any(-1).flatten() for part in keep.split(sizes) if len(part) >= rows]
    return float(torch.cat(parts).float().mean()) if parts else float(keep.float().mean())


def _ratio(part: Tensor, whole: Tensor) -> float:
    """1 of nothing."""
    return float(part) / float(whole) if float(whole) else 1.0
