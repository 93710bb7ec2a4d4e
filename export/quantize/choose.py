"""Chooses bits and groups by measurement: the fewest bytes read per decoded token within a loss of perplexity.

1. The candidates with one format for all kinds are measured, cheapest first; one within the budget is taken.
2. Otherwise each kind of tensor alone is measured in 4 bits. Losses in nats add up (Gemma 3 270M: sum of parts 0.34
   and 0.41, together 0.33 and 0.42), so the sums rank all mixtures of 4 and 8 bits.
3. Mixtures whose sum is within the budget are measured, cheapest first, until one really is.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mimo_edge.errors import BadInputError
from mimo_edge.export.quantize.calibrate import Calibrator
from mimo_edge.export.quantize.perplexity import LayerWeights, Method, Source, cross_entropy, hidden_states
from mimo_edge.export.quantize.rtn import GROUPS
from mimo_edge.params import count, parameters, stored, stored_tensors
from mimo_edge.spec import ModelSpec, QuantSpec, TensorQuant

log = logging.getLogger(__name__)

# Of perplexity, on the two texts here. They are hard on a small model: Gemma 3 270M loses 8.8 % on them where it loses
# 7.0 % on other prose and documentation (docs/measurements.md).
DEFAULT_BUDGET = 0.09
LARGE_MODEL = 1_000_000_000  # weights: from here on coarse 4-bit groups are candidates, and fewer tokens are measured
KINDS = ("attention", "ffn", "embedding", "head")
TEXTS = ("prose", "docs")
NOT_PACKED = QuantSpec()  # no kind of tensor is quantised in the checkpoint already
_TOKENS, _TOKENS_LARGE = 1100, 256  # of each text

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Measured:
    """`losses`: text -> perplexity over float perplexity, minus 1. Bytes: read per decoded token, and in the file."""

    quant: QuantSpec
    read_bytes: int
    stored_bytes: int
    losses: dict[str, float]

    @property
    def worst(self) -> float:
        return max(self.losses.values())


@dataclass(frozen=True)
class QuantReport:
    """What was measured, in this order, and chosen. `tokens` and `perplexity` (of the float model) are by text."""

    quant: QuantSpec
    reason: str
    budget: float
    tokens: dict[str, int]
    perplexity: dict[str, float]
    measured: tuple[Measured, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def choose(
    spec: ModelSpec,
    source: Source,
    tokenizer_json: str,
    *,
    budget: float,
    method: Method,
    progress: Progress,
    packed: QuantSpec = NOT_PACKED,
    calibrator: Calibrator | None = None,
) -> QuantReport:
    """Measures candidates on the two texts and picks one; logs the reason, as a warning if none is within `budget`.

    `progress` gets (layers done, all layers, which candidate) for each candidate in turn. Kinds that `packed` gives a
    format are stored in it already and keep it; losses are against the model as it comes. With a `calibrator`, which
    stands for `method`, candidates share one calibration of the float model; the one picked is calibrated for itself
    (what the calibrator gave last) and measured again, as the last row.
    Raises BadInputError if `budget` is negative, and what the source raises.
    """
    if not budget >= 0:
        raise BadInputError(f"quality budget {budget}: a share of perplexity that may be lost, 0 or more (0.06 is 6 %)")
    texts = measuring_texts(spec, tokenizer_json)
    first = calibrator.run(QuantSpec()) if calibrator else Uncalibrated(spec, source, method)
    meter = _Meter(first, texts, progress)
    best = next((m for m in map(meter.measure, _uniform_candidates(spec, packed)) if m.worst <= budget), None)
    best = best or _mixture(spec, meter, budget, packed)
    if calibrator:
        meter.use(calibrator.run(best.quant))
        best = meter.measure(best.quant)
    reason = _reason(best, budget, meter.measured)
    log.log(logging.INFO if best.worst <= budget else logging.WARNING, reason)
    tokens = {name: len(text) for name, text in texts.items()}
    perplexity = {name: math.exp(nats) for name, nats in meter.baseline.items()}
    return QuantReport(best.quant, reason, budget, tokens, perplexity, tuple(meter.measured))


def label(quant: QuantSpec) -> str:
    """For example `attention 8g128, ffn 4g32, embedding 8g128, head float`."""
    parts = [(kind, quant.of(kind)) for kind in KINDS]
    return ", ".join(f"{kind} {q.bits}g{q.group}" if q else f"{kind} float" for kind, q in parts)


def read_bytes(spec: ModelSpec) -> int:
    """Bytes of weights that one decoded token reads: all layers (of experts the active share) and the head.

    The lookup reads one row of the embedding and is left out; so are MTP heads, which plain decoding does not run.
    """
    head = "head" if spec.separate_head else "embed"
    total = 0
    for p in parameters(spec):
        if p.name != head and not p.name.startswith("layers.") and p.name != "norm":
            continue
        nbytes = sum(s.nbytes for s in stored(p, spec.quant.of(p.kind)))
        moe = spec.ffn_of(int(p.name.split(".")[1])).moe if ".experts." in p.name else None
        total += nbytes * moe.top_k // moe.experts if moe else nbytes
    return total


class Quantiser(Protocol):
    """The model in any quantisation: spec (without it), source of rows and biases, and how rows are rounded."""

    @property
    def spec(self) -> ModelSpec: ...

    def source(self, quant: QuantSpec) -> Source: ...

    def method(self, quant: QuantSpec) -> Method: ...


@dataclass(frozen=True)
class Uncalibrated:
    """The same source and method for all quantisations."""

    spec: ModelSpec
    rows: Source
    rounding: Method

    def source(self, quant: QuantSpec) -> Source:
        return self.rows

    def method(self, quant: QuantSpec) -> Method:
        return self.rounding


class _Meter:
    """Measures candidates against the float model; hidden states of equal layers are kept."""

    def __init__(self, quantiser: Quantiser, texts: dict[str, Tensor], progress: Progress):
        self._texts, self._progress = texts, progress
        self.use(quantiser)
        self.measured: list[Measured] = []
        self.baseline = self._nats(QuantSpec())

    def use(self, quantiser: Quantiser) -> None:
        self._quantiser = quantiser
        self._states: dict[tuple[QuantSpec, bool], Tensor] = {}

    def measure(self, quant: QuantSpec) -> Measured:
        nats = self._nats(quant)
        losses = {name: math.exp(nats[name] - self.baseline[name]) - 1 for name in self._texts}
        spec = replace(self._quantiser.spec, quant=quant)
        result = Measured(quant, read_bytes(spec), sum(s.nbytes for s in stored_tensors(spec)), losses)
        self.measured.append(result)
        return result

    def _nats(self, quant: QuantSpec) -> dict[str, float]:
        """Mean nats a token, by text."""
        spec, source, method = self._quantiser.spec, self._quantiser.source(quant), self._quantiser.method(quant)
        body = replace(quant, head=None)
        key = body, spec.tied and quant.head == quant.embedding  # a table that is the head may be rounded for that
        if key not in self._states:
            weights = LayerWeights(spec, source, method, body)
            what = f"measuring {label(quant)}"
            texts = list(self._texts.values())
            states = hidden_states(spec, weights, texts, lambda done, total: self._progress(done, total, what))
            self._states[key] = torch.cat([x[:-1] for x in states])
        targets = torch.cat([text[1:] for text in self._texts.values()])
        nats = cross_entropy(spec, source, method, quant.head, self._states[key], targets)
        parts = nats.split([len(text) - 1 for text in self._texts.values()])
        return {name: float(part.mean()) for name, part in zip(self._texts, parts, strict=True)}


def _uniform_candidates(spec: ModelSpec, packed: QuantSpec) -> Iterator[QuantSpec]:
    """All kinds in 4 bits, coarsest group first; below LARGE_MODEL groups of 32 only (coarser ones lose too much)."""
    for group in reversed(GROUPS) if count(spec) >= LARGE_MODEL else GROUPS[:1]:
        yield _formats(spec, 4, group, packed)


def _mixture(spec: ModelSpec, meter: _Meter, budget: float, packed: QuantSpec) -> Measured:
    """The cheapest mixture of 4 and 8 bits within `budget` by sum and by measurement, else the best one measured."""
    four, eight = _formats(spec, 4, GROUPS[0], packed), _formats(spec, 8, GROUPS[-1], packed)
    tried = list(meter.measured)
    kinds = [kind for kind in KINDS if four.of(kind) != eight.of(kind)]
    alone = {kind: meter.measure(replace(QuantSpec(), **{kind: four.of(kind)})).losses for kind in kinds}
    for low in _by_cost(spec, kinds, four, eight):
        expected = max(math.prod(1 + alone[kind][text] for kind in low) - 1 for text in meter.baseline)
        if expected > budget or len(low) == len(kinds):
            continue
        tried.append(meter.measure(_mix(eight, four, low)))
        if tried[-1].worst <= budget:
            return tried[-1]
    return min(tried, key=lambda m: m.worst)


def _by_cost(spec: ModelSpec, kinds: list[str], four: QuantSpec, eight: QuantSpec) -> list[tuple[str, ...]]:
    """Sets of kinds to keep in 4 bits, the fewest bytes read (then stored) first; the empty set is one of them."""
    sets = [low for n in range(len(kinds) + 1) for low in itertools.combinations(kinds, n)]

    def cost(low: tuple[str, ...]) -> tuple[int, int]:
        mixed = replace(spec, quant=_mix(eight, four, low))
        return read_bytes(mixed), sum(s.nbytes for s in stored_tensors(mixed))

    return sorted(sets, key=cost)


def _mix(eight: QuantSpec, four: QuantSpec, low: tuple[str, ...]) -> QuantSpec:
    return replace(eight, **{kind: four.of(kind) for kind in low})


def _formats(spec: ModelSpec, bits: int, group: int, packed: QuantSpec) -> QuantSpec:
    """`bits` for all kinds, in the largest groups up to `group` that divide; a kind that none divides stays float, one
    that is `packed` keeps its format."""
    fitting = {}
    for kind in KINDS:
        source_kind = "embedding" if kind == "head" and spec.tied else kind
        sizes = [p.shape[1] for p in parameters(spec) if p.kind == source_kind]
        groups = [g for g in GROUPS if g <= group and all(k % g == 0 for k in sizes)]
        fitting[kind] = packed.of(kind) or (TensorQuant(bits, groups[-1]) if groups else None)
    return QuantSpec(**fitting)


def measuring_texts(spec: ModelSpec, tokenizer_json: str) -> dict[str, Tensor]:
    """Token ids int64 [T] of the texts, behind the model's first token if it has one."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    limit = min(_TOKENS if count(spec) < LARGE_MODEL else _TOKENS_LARGE, spec.max_context)
    texts = {}
    for name in TEXTS:
        text = resources.files(__package__).joinpath(f"texts/{name}.txt").read_text(encoding="utf-8")
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        texts[name] = torch.tensor(([] if spec.bos_id is None else [spec.bos_id]) + ids)[:limit]
    return texts


def _reason(best: Measured, budget: float, measured: list[Measured]) -> str:
    losses = ", ".join(f"{name} {loss:+.1%}" for name, loss in best.losses.items())
    what = f"quantisation {label(best.quant)}: {best.read_bytes / 1e6:.0f} MB read a token, perplexity {losses}"
    if best.worst > budget:
        return f"{what}; no candidate of {len(measured)} is within the budget of {budget:.1%}, this is the best one"
    return f"{what}; the cheapest within the budget of {budget:.1%} ({len(measured)} candidates measured)"
