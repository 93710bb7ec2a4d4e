"""Replies of the cuda backend, row by row and in rounds of drafts, for benchmarks: no engine in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mimo_edge.backends.base import Round, Step
from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.bundle import WEIGHTS, Bundle, read_tensors
from mimo_edge.decoding.sampling import Sampler, candidates, gumbel
from mimo_edge.kv.layout import SequenceSlots, plan_layout
from mimo_edge.request import SamplingParams
from mimo_edge.spec import MAX_DRAFTS

K = MAX_DRAFTS
NONE = np.array([], np.int64)


@dataclass
class Run:
    """Tokens of one reply, seconds from its beginning to each, and the drafts that each round made and accepted."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rounds: list[tuple[int, int, int]] = field(default_factory=list)  # tokens before it, made, accepted


class Sequence:
    """A backend whose context one sequence owns."""

    def __init__(self, backend: CudaBackend, context: int):
        self.backend, spec = backend, backend.spec
        layout = plan_layout(spec, context, element_bytes=2, heads=backend.heads, chunk=backend.chunk)
        backend.allocate(layout)
        self.slots, self.window = SequenceSlots(tuple(range(layout.pages)), 0), layout.head_attention.window

    def prefill(self, prompt: list[int]) -> None:
        for at in range(0, len(prompt) - 1, self.backend.chunk):
            part = np.array(prompt[at : min(at + self.backend.chunk, len(prompt) - 1)])
            self.backend.run([Step(self.slots, at, part, NONE)])
            self.backend.commit([len(part)])

    def decode(self, prompt: list[int], count: int, sampling: SamplingParams, drafts: int) -> Run:
        """`count` tokens, the end of the text ignored. With drafts, the time in which heads catch up counts."""
        self.prefill(prompt)
        run, began = Run(), time.perf_counter()
        step = self._rounds(prompt, sampling, drafts, count) if drafts else self._rows(prompt, sampling)
        while len(run.tokens) < count:
            before = len(run.tokens)
            new, made = step(prompt + run.tokens, count - before)
            run.tokens += new
            run.seconds += [time.perf_counter() - began] * len(new)
            run.rounds.append((before, made, len(new) - 1))
        return run

    def _rows(self, prompt: list[int], sampling: SamplingParams) -> Callable[[list[int], int], tuple[list[int], int]]:
        sampler, greedy = Sampler(sampling, prompt), sampling.temperature == 0

        def step(known: list[int], room: int) -> tuple[list[int], int]:
            row = Step(self.slots, len(known) - 1, np.array(known[-1:]), np.array([0]))
            if greedy:
                token = int(self.backend.best(row)[0])
            else:
                token = sampler.sample(self.backend.run([row])[0].logits[0], len(known))
            self.backend.commit([1])
            return [token], 0

        return step

    def _rounds(
        self, prompt: list[int], sampling: SamplingParams, drafts: int, count: int
    ) -> Callable[[list[int], int], tuple[list[int], int]]:
        n = len(prompt) - 1
        held = 0 if self.window is None else max(0, n - K - self.window)
        for m in range(drafts):
            self.backend.catch_up(self.slots, m, held, held, np.array(prompt[held + 1 + m : n - K + m], np.int64))

        def step(known: list[int], room: int) -> tuple[list[int], int]:
            n = len(known) - 1
            made = min(drafts, room)
            asked = Round(self.slots, n, np.array(known[max(0, n - K) :], np.int64), made, held, sampling)
            new = self.backend.round(asked).tolist()
            self.backend.commit([len(new)])
            return new[:room], made

        return step


def difference(sequence: Sequence, prompt: list[int], a: list[int], b: list[int], sampling: SamplingParams) -> Any:
    """Where two replies part, and by how much the best score leads the second there; None where they are equal."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
    if at is None:
        return None
    text = prompt + a[:at]
    sequence.prefill(text)
    row = Step(sequence.slots, len(text) - 1, np.array(text[-1:]), np.array([0]))
    logits = sequence.backend.run([row])[0].logits[0].copy()
    sequence.backend.commit([1])
    scores = logits.astype(np.float64)
    if sampling.temperature > 0:
        ids, some = candidates(logits, sampling)
        scores = some + gumbel(sampling.seed, len(text), ids)
    best = np.sort(scores)[-2:]
    return {"at": at, "lead": float(best[1] - best[0])}


def head_errors(bundle: Bundle, sequence: Sequence, text: list[int]) -> list[float]:
    """Relative error of each head's logits behind all but the last K tokens of a text, against the oracle."""
    import torch

    from mimo_edge.backends import oracle
    from mimo_edge.backends.reference import BundleWeights

    spec, n, errors = bundle.spec, len(text) - K, []
    weights = BundleWeights(spec, read_tensors(bundle.file(WEIGHTS)), keep=True)
    known, rows, past = torch.tensor(text), torch.arange(n), [None] * len(spec.layers)
    start = 0 if sequence.window is None else max(0, n - K - sequence.window)
    sequence.prefill(text[: n + 1])
    with torch.inference_mode():
        hidden = oracle.forward(spec, weights, known[:n], rows, past, rows[:0]).hidden
        for m in range(sequence.backend.heads):
            ahead = slice(1 + m, n + 1 + m)
            want = oracle.mtp(spec, weights, m, hidden, known[ahead], rows, None)[0][-1].numpy()
            got = sequence.backend.draft(sequence.slots, m, start, start, np.array(text[start + 1 + m : n + 1 + m]))
            errors.append(float(np.linalg.norm(got - want) / np.linalg.norm(want)))
    return errors
