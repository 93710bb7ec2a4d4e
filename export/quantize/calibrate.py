"""Calibration: what every product of the model multiplies, seen on text, layer by layer.

Two models walk side by side, the float one and the one quantised so far. At each product the rows that both are about
to multiply are summed up (Hessian, means, ranges); then its weights can be rounded with error feedback, and both walk
on. One layer's weights are in memory at a time, and the rows of the calibration text.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from mimo_edge.backends import oracle
from mimo_edge.export.families.checkpoint import Checkpoint
from mimo_edge.export.quantize import rtn, walk
from mimo_edge.export.quantize.calibration import BIASED, Calibration, Conditions
from mimo_edge.export.quantize.calibration_data import read_calibration
from mimo_edge.export.quantize.perplexity import LayerWeights, Source
from mimo_edge.export.quantize.statistics import Statistics
from mimo_edge.params import parameters
from mimo_edge.spec import ModelSpec, QuantSpec
from mimo_edge.text import Text

Progress = Callable[[int, int, str], None]


class Calibrator:
    """Calibrates one checkpoint on the same text as often as needed; results live in `folder` (see `calibrate`)."""

    def __init__(
        self,
        spec: ModelSpec,
        source: Source,
        sequences: Sequence[Tensor],
        conditions: Conditions,
        folder: Path,
        progress: Progress,
    ):
        self._spec, self._source, self._sequences = spec, source, sequences
        self._conditions, self._folder, self._progress = conditions, folder, progress
        self._last: Calibration | None = None

    @staticmethod
    def open(
        checkpoint: Checkpoint, path: Path, tokens: int | None, conditions: Conditions, folder: Path, progress: Progress
    ) -> Calibrator:
        """Reads the text (see read_calibration, also for the errors)."""
        spec = checkpoint.spec
        text = Text(Tokenizer.from_str(checkpoint.tokenizer_json), spec, checkpoint.chat_template)
        sequences = read_calibration(path, text, spec.eos_ids[:1], tokens, stratified=conditions.stratified)
        return Calibrator(spec, checkpoint.source, sequences, conditions, folder / "seen", progress)

    def run(self, quant: QuantSpec) -> Calibration:
        """For any quantisation if `quant` is QuantSpec(), else for exactly this one. Earlier results end their life."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        self._last = calibrate(
            self._spec, self._source, self._sequences, quant, self._conditions, self._folder, self._progress
        )
        return self._last

    def last(self, quant: QuantSpec) -> Calibration:
        """The latest result if it was for `quant`, else a new one."""
        return self._last if self._last and self._last.quant == quant else self.run(quant)


def calibrate(
    spec: ModelSpec,
    source: Source,
    sequences: Sequence[Tensor],
    quant: QuantSpec,
    conditions: Conditions,
    folder: Path,
    progress: Progress,
) -> Calibration:
    """Walks through `sequences` (token ids int64 [T] each) and returns what was seen.

    `quant` is what the second model is rounded to as it walks; with QuantSpec() only the float model walks, and the
    result serves any quantisation. `folder` must be empty; the result reads from it. `progress` gets (layers done, all
    layers and MTP heads, "calibrating").
    """
    return _Walker(Calibration(spec, source, conditions, folder, quant), source, sequences, progress).run()


class _Walker:
    def __init__(self, result: Calibration, source: Source, sequences: Sequence[Tensor], progress: Progress):
        heads = result.spec.mtp.heads if result.spec.mtp else 0
        self._sequences = [s for s in sequences if len(s) > heads + 1]  # shorter ones have no rows in the last head
        self._result, self._progress = result, progress
        exact, quant = replace(result.spec, output_bias=result.own_bias), result.quant
        both = [(exact, LayerWeights(exact, source, rtn.quantize_rows, QuantSpec()))]
        if any(quant.of(p.kind) for p in parameters(exact)):
            rounded = LayerWeights(result.spec, result.source(quant), result.method(quant), quant)
            both.append((result.spec, rounded))
        self._kinds = {p.name: p.kind for p in parameters(exact)} | {"head": "head"}
        result.tokens = sum(map(len, self._sequences))
        self._models = both  # the float model, then the rounded one, if any

    @torch.inference_mode()
    def run(self) -> Calibration:
        spec, mtp = self._result.spec, self._result.spec.mtp
        total = len(spec.layers) + (mtp.heads if mtp else 0)
        states = [self._embedded(weights) for _, weights in self._models]
        for i, kinds in enumerate(spec.layers):
            walks = [
                [walk.block(s, w, f"layers.{i}", kinds, x) for x in states[m]] for m, (s, w) in enumerate(self._models)
            ]
            states = self._together(walks)
            self._progress(i + 1, total, "calibrating")
        self._see_head(states)
        hidden = states
        for m in range(mtp.heads if mtp else 0):
            states = self._together(self._mtp_walks(m, states if mtp and mtp.chained and m else hidden))
            self._progress(len(spec.layers) + m + 1, total, "calibrating")
        return self._result

    def _embedded(self, weights: LayerWeights) -> list[Tensor]:
        tokens = torch.cat(list(self._sequences))
        rows = weights.rows("embed", tokens) * self._result.spec.embed_scale
        return list(rows.split([len(s) for s in self._sequences]))

    def _mtp_walks(self, m: int, hidden: list[list[Tensor]]) -> list[list[walk.Walk]]:
        """Row p pairs the hidden state of p with token p+1+m; the last rows have no such token."""
        return [
            [
                walk.mtp(spec, weights, m, x[: len(text) - 1 - m], text[1 + m :])
                for x, text in zip(states, self._sequences, strict=True)
            ]
            for (spec, weights), states in zip(self._models, hidden, strict=True)
        ]

    def _together(self, walks: list[list[walk.Walk]]) -> list[list[Tensor]]:
        """Walks all sequences through a block, product by product, in all models; returns their outputs."""
        for _, weights in self._models:
            weights.clear()
        waiting = [[next(w) for w in model] for model in walks]
        while True:
            name = waiting[0][0][0]
            self._see(name, [[rows for _, rows in model] for model in waiting])
            ends: list[list[Tensor]] = [[] for _ in walks]
            for m, model in enumerate(walks):
                for t, w in enumerate(model):
                    try:
                        waiting[m][t] = w.send(waiting[m][t][1])
                    except StopIteration as end:
                        ends[m].append(end.value)
            if ends[0]:
                return ends

    def _see(self, name: str, rows: list[list[Tensor]]) -> None:
        self._add(name, rows)
        _, weights = self._models[-1]
        if len(self._models) > 1 and self._result.spec.output_bias and name.endswith(BIASED):
            self._result.correct(name, weights.get(name))

    def _see_head(self, states: list[list[Tensor]]) -> None:
        normed = [
            [oracle.rms_norm(x, weights.get("norm"), spec.norm_eps) for x in model]
            for (spec, weights), model in zip(self._models, states, strict=True)
        ]
        self._add("head", normed)

    def _add(self, name: str, rows: list[list[Tensor]]) -> None:
        """8-bit products are rounded to nearest: they lose next to nothing, and Hessians cost most of the time."""
        quant = self._result.quant.of(self._kinds[name])
        seen = Statistics.of(
            rows[0],
            rows[-1],
            hessian=len(self._models) == 1 or (quant is not None and quant.bits < 8),
            cross=self._result.conditions.follow and name != "head" and ".experts." not in name,
        )
        self._result.add(name, seen)
