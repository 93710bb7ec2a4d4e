"""How many drafts of the MTP heads a text would have accepted, and texts that repeat themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TAIL, LONGEST_PERIOD = 64, 32  # tokens: a loop shows as two periods or more in the tail


@dataclass(frozen=True)
class Acceptance:
    """Sums over texts. tokens: those that came out of `steps` verification steps; accepted: of each head's drafts."""

    tokens: int
    steps: int
    accepted: tuple[int, ...]

    @property
    def length(self) -> float:
        """Mean number of tokens that a step yields: its own one and the accepted drafts."""
        return self.tokens / self.steps if self.steps else float("nan")

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of steps in which the draft of head i, and all before it, were accepted."""
        return tuple(a / self.steps if self.steps else float("nan") for a in self.accepted)


def acceptance(texts: Iterable[NDArray[np.bool_]], heads: int | None = None) -> Acceptance:
    """Of agreements, one array bool [heads, n] a text; only the first `heads` heads draft.

    Column r of a text belongs to the step whose pending token is token r; row i says whether head i's draft is the
    text's token r + 1 + i (False behind the end). Token 0 comes from the prompt, so n - 1 are counted.
    """
    tokens = steps = 0
    accepted = None
    for agree in texts:
        count = len(agree) if heads is None else heads
        if accepted is None:
            accepted = np.zeros(count, np.int64)
        last, at = agree.shape[1] - 1, 0
        tokens += max(0, last)
        while at < last:
            taken = 0
            while taken < count and at + 1 + taken <= last and agree[taken, at]:
                accepted[taken] += 1
                taken += 1
            steps += 1
            at += 1 + taken
    return Acceptance(tokens, steps, tuple(accepted.tolist()) if accepted is not None else ())


def agreements(tokens: Sequence[int], drafts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """`acceptance`'s array for one text: drafts [heads, n], column r made while token r is pending."""
    known = np.asarray(tokens)
    out = np.zeros(drafts.shape, bool)
    for i, row in enumerate(drafts):
        ahead = len(known) - 1 - i
        if ahead > 0:
            out[i, :ahead] = row[:ahead] == known[1 + i :]
    return out


def loops(tokens: Sequence[int]) -> bool:
    """Whether the end of a text only repeats itself: greedy decoding falls into this, and drafts then always fit."""
    tail = np.asarray(tokens[-TAIL:])
    if len(tail) < TAIL:
        return False
    return any(np.array_equal(tail[p:], tail[:-p]) for p in range(1, LONGEST_PERIOD + 1))
