"""Gates for any checkpoint: orders, gates, both curves, and the point that was asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mimo_edge.errors import BadInputError
from mimo_edge.export.families import Checkpoint
from mimo_edge.export.gates.budget import gate_share, gate_spec
from mimo_edge.export.gates.calibrate import ORDER_ROWS, head_of, prepare, train
from mimo_edge.export.gates.curve import CurvePoint, LayerUse, Meter, layer_uses, measure_point
from mimo_edge.export.gates.sensitivity import metrics
from mimo_edge.export.gates.source import GatedSource
from mimo_edge.spec import GateSpec, ModelSpec

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
MOST = SHARES[-1]
ROWS = 16_384  # of calibration text
_REFINEMENTS = 3  # points measured between two of SHARES for a loss asked for

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class GateRequest:
    """Blocks of `block` channels, and either the share of feed-forward work to skip or the most perplexity to lose."""

    block: int
    skip: float | None = None
    max_loss: float | None = None

    def __post_init__(self) -> None:
        if (self.skip is None) == (self.max_loss is None):
            raise BadInputError("gates: say how much to skip (--skip 0.2) or how much may be lost (--gate-loss 0.02)")
        if self.skip is not None and not 0 < self.skip <= MOST:
            raise BadInputError(f"--skip {self.skip}: a share of feed-forward work, above 0 and at most {MOST}")
        if self.max_loss is not None and not 0 < self.max_loss < math.inf:
            raise BadInputError(f"--gate-loss {self.max_loss}: a share of perplexity, above 0 (0.02 is 2 %)")


@dataclass(frozen=True)
class GateReport:
    """`byte_share`: of the largest gate, of its feed-forward in 4 bits. `rows` of calibration text; `tokens` and
    `perplexity` (of the dense model) of the texts measured on. `layers`: of the point chosen."""

    block: int
    rank: int
    byte_share: float
    rows: int
    tokens: dict[str, int]
    perplexity: dict[str, float]
    curve: tuple[CurvePoint, ...]
    chosen: CurvePoint
    layers: tuple[LayerUse, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def add_gates(
    checkpoint: Checkpoint,
    request: GateRequest,
    texts: Sequence[Tensor],
    measured: Mapping[str, Tensor],
    progress: Progress,
    seed: int = 0,
) -> tuple[Checkpoint, GateReport]:
    """The checkpoint with gates and with its channels in the order of their blocks, and what they cost.

    texts: calibration, int64 [T] each, of which the first ROWS rows are used. measured: texts by name that both curves
    are measured on. The model's own weights change their places only. Deterministic for a seed on one machine.

    Raises what gate_spec raises, and BadInputError when every point of the curve loses more than asked for.
    """
    spec, source, layers = checkpoint.spec, checkpoint.source, len(checkpoint.spec.layers)
    gate = gate_spec(spec, request.block)
    texts = head_of(texts, ROWS)
    found = metrics(spec, source, head_of(texts, ORDER_ROWS), seed, _step(progress, "gates: what the loss minds"))
    prepared = prepare(spec, source, texts, gate.block, found, seed, _step(progress, "gates: order of channels"))
    trained = train(spec, source, texts, prepared, gate, seed, _step(progress, "gates: training"))
    meter = Meter(spec, source, measured)
    points = _curve(lambda share: measure_point(meter, source, prepared, trained, share), request, progress)
    chosen = _chosen(points, request)
    gates = trained.at(chosen.asked)
    uses = layer_uses(spec, source, prepared, gates, chosen.asked, measured)
    report = GateReport(
        block=gate.block,
        rank=gate.rank,
        byte_share=max(gate_share(spec.hidden_size, spec.ffn_of(i).intermediate, gate) for i in range(layers)),
        rows=sum(map(len, texts)),
        tokens={name: len(text) for name, text in measured.items()},
        perplexity={name: math.exp(nats) for name, nats in meter.dense.items()},
        curve=tuple(points),
        chosen=chosen,
        layers=tuple(uses),
    )
    gated = GatedSource(source, prepared.orders, gates)
    # packed feed-forward weights lose their groups when their columns move, and are rounded again
    packed = replace(checkpoint.packed, ffn=None)
    return replace(checkpoint, spec=gated_spec(spec, gate), source=gated, packed=packed), report


def gated_spec(spec: ModelSpec, gate: GateSpec) -> ModelSpec:
    """All layers gated; MTP heads that share their kind of feed-forward keep it ungated under another name."""
    used = {layer.ffn for layer in spec.layers}
    ffn = {name: replace(f, gate=gate) if name in used else f for name, f in spec.ffn.items()}
    mtp = spec.mtp
    if mtp and mtp.ffn in used:
        free = f"{mtp.ffn}-mtp"
        ffn[free] = spec.ffn[mtp.ffn]
        mtp = replace(mtp, ffn=free)
    return replace(spec, ffn=ffn, mtp=mtp)


def _curve(measure: Callable[[float], CurvePoint], request: GateRequest, progress: Progress) -> list[CurvePoint]:
    """Points at SHARES and at what was asked for, by share."""
    shares = sorted({*SHARES, *([request.skip] if request.skip else [])})
    total = len(shares) + (0 if request.max_loss is None else _REFINEMENTS)
    points: list[CurvePoint] = []

    def take(share: float) -> CurvePoint:
        points.append(measure(share))
        progress(len(points), total, "gates: quality against skipped share")
        return points[-1]

    for share in shares:
        take(share)
    if request.max_loss is not None:
        low, high = _bracket(points, request.max_loss)
        for _ in range(_REFINEMENTS):
            if high is None:
                break
            middle = (low + high) / 2
            low, high = (middle, high) if take(middle).gate.worst <= request.max_loss else (low, middle)
    return sorted(points, key=lambda p: p.asked)


def _bracket(points: list[CurvePoint], most: float) -> tuple[float, float | None]:
    """The last share within the loss (0 if none is), and the next one."""
    within = [p.asked for p in points if p.gate.worst <= most]
    beyond = [p.asked for p in points if p.asked > max(within, default=0.0)]
    return max(within, default=0.0), min(beyond, default=None)


def _chosen(points: list[CurvePoint], request: GateRequest) -> CurvePoint:
    if request.skip is not None:
        return next(p for p in points if p.asked == request.skip)
    assert request.max_loss is not None
    within = [p for p in points if p.gate.worst <= request.max_loss]
    if not within:
        first = points[0]
        raise BadInputError(
            f"--gate-loss {request.max_loss}: skipping {first.gate.skipped:.1%} loses {first.gate.worst:.1%} already: "
            "allow more, or leave gates out"
        )
    return within[-1]


def _step(progress: Progress, what: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(done, total, what)
