"""MTP heads of the cuda backend: graphs for rows of one head, and for whole rounds of draft, verify and accept.

A round is one graph: its drafts never leave the device, and six integers come back (export/programs/heads.py says what
the pieces are and where tokens lie).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mimo_edge.backends import cuda_steps
from mimo_edge.backends.base import Round, SequenceSlots
from mimo_edge.backends.cuda_steps import SHORT, Steps
from mimo_edge.errors import MimoEdgeError
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.request import SamplingParams

_OUT = 2  # of `mtp.round`: the count and the token behind it come before the rows' tokens


def graphs(programs: ProgramSet) -> dict[str, list[str]]:
    """The graphs of all heads that `programs` has: the programs that each captures."""
    made = {}
    for name in programs.programs:
        kind = name.split(".")[0]
        if kind in ("catchup", "draft"):
            made[name] = [name] if kind == "catchup" else ["begin.drafts", name]
    for drafts in range(1, programs.heads + 1):
        made |= {_round(drafts, way): _pieces(drafts, way) for way in ("best", "sample")}
    return made


def nodes(programs: ProgramSet) -> int:
    """Kernels in all graphs that a backend captures of `programs`."""
    every = [*cuda_steps.graphs(programs).values(), *graphs(programs).values()]
    commits = sum(len(p.commit) for p in programs.programs.values())
    return commits + sum(len(programs.programs[name].launches) for pieces in every for name in pieces)


class Heads:
    """Captures the graphs of the first `heads` heads among those of `steps`."""

    def __init__(self, steps: Steps, heads: int):
        self._steps, self._heads = steps, heads
        self._catch_up = {p.rows for n, p in steps.programs.programs.items() if n.startswith("catchup.")}
        for name, pieces in graphs(steps.programs).items():
            steps.capture(name, *pieces)
        self._out = steps.host("mtp.round")

    def draft(
        self, slots: SequenceSlots, head: int, held: int, start: int, tokens: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """As base.DraftHeads. The last rows alone need logits: older ones leave keys and values, and nothing else."""
        count = min(len(tokens), SHORT)
        self.catch_up(slots, head, held, start, tokens[:-count])
        self._set_rows(slots, held, start + len(tokens) - count, count, SHORT - count, SHORT)
        self._set_tokens(head + SHORT - count, tokens[-count:])
        self._steps.replay(f"draft.{head}")
        return self._steps.first_logits()

    def catch_up(self, slots: SequenceSlots, head: int, held: int, start: int, tokens: NDArray[np.int64]) -> None:
        """As base.DraftRounds."""
        at, longest = 0, max(self._catch_up)
        while at < len(tokens):
            part = tokens[at : at + longest]
            rows = min(r for r in self._catch_up if r >= len(part))
            self._set_rows(slots, held, start + at, len(part), 0, rows)
            self._set_tokens(head, part)
            self._steps.replay(f"catchup.{rows}.{head}")
            self._steps.sync()  # the inputs' mirror may be written again
            at += len(part)

    def queue_round(self, asked: Round) -> None:
        """Queues everything; `take_round` waits. Raises MimoEdgeError on more drafts than heads."""
        drafts, n, known = asked.drafts, asked.length, asked.tokens[-SHORT:]
        if not 1 <= drafts <= self._heads or len(known) != min(n + 1, SHORT):
            raise MimoEdgeError(f"a round of {drafts} drafts behind {n} rows: {self._heads} heads, {len(known)} tokens")
        count = min(n, SHORT)
        self._set_rows(asked.slots, asked.held, n - count, count, SHORT - count, SHORT)
        self._set_tokens(SHORT - len(known), known)
        self._steps.set_rows(asked.slots, n, 1 + drafts, SHORT)
        sampled = asked.sampling.temperature > 0
        if sampled:
            self._set_sampling(asked.sampling)
        self._steps.replay(_round(drafts, "sample" if sampled else "best"))
        self._steps.fetch(self._out, "mtp.round")

    def take_round(self) -> NDArray[np.int64]:
        """What base.DraftRounds.round returns, of the round that was queued."""
        self._steps.sync()
        return self._out[_OUT : _OUT + 1 + int(self._out[0])].astype(np.int64)

    def _set_rows(self, slots: SequenceSlots, held: int, start: int, count: int, padding: int, rows: int) -> None:
        """Rows [start, start + count) behind `padding`, in front of more of it."""
        inputs = self._steps.inputs
        self._steps.set_place(slots)
        positions = inputs["mtp.positions"]
        positions[:rows] = -1
        positions[padding : padding + count] = np.arange(start, start + count)
        inputs["mtp.lengths"][:] = start, min(held, start)
        inputs["mtp.counts"][0] = count

    def _set_tokens(self, place: int, tokens: NDArray[np.int64]) -> None:
        self._steps.inputs["mtp.ahead"][place : place + len(tokens)] = tokens

    def _set_sampling(self, sampling: SamplingParams) -> None:
        inputs = self._steps.inputs
        inputs["sampling.floats"][0] = sampling.temperature, sampling.top_p, sampling.min_p
        words = np.array([sampling.seed & 0xFFFFFFFF, sampling.seed >> 32], np.uint32)
        inputs["sampling.integers"][0, 0] = min(sampling.top_k, 2**31 - 1)
        inputs["sampling.integers"][0, 1:] = words.view(np.int32)


def _round(drafts: int, way: str) -> str:
    return f"round.{drafts}.{way}"


def _pieces(drafts: int, way: str) -> list[str]:
    """The programs of a round, in order."""
    heads = [name for m in range(drafts) for name in (f"draft.{m}", f"{way}.{m}")]
    return ["begin.drafts", *heads, "verify", f"accept.{way}"]
