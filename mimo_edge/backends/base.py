"""What a backend is: it owns device buffers and runs rows; it decides nothing about tokens or memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mimo_edge.kv.layout import KvLayout, SequenceSlots
from mimo_edge.request import SamplingParams

__all__ = ["Backend", "DraftHeads", "DraftRounds", "Round", "RowCopies", "SequenceSlots", "Step", "StepOutput"]


@dataclass(frozen=True)
class Step:
    """Rows to evaluate for one sequence: row i has position `start + i`; positions below `start` are committed.

    tokens: int64 [T], T >= 1. logit_rows: int64 [M], rows whose logits are wanted (M may be 0).
    """

    slots: SequenceSlots
    start: int
    tokens: NDArray[np.int64]
    logit_rows: NDArray[np.int64]


@dataclass(frozen=True)
class StepOutput:
    """logits: float32 [M, vocab], the caller's until the next run."""

    logits: NDArray[np.float32]


class Backend(Protocol):
    """The order is: allocate once; then run, commit, run, commit ...; close.

    A backend may also have `chunk`, the most rows of a step that it is quick at, `element_bytes`, the size of a cached
    element where that is not float32, and `best(step)`, a run of at most MAX_DRAFTS + 1 rows that returns int64 [T],
    the best token behind each row (-1: logits are not finite). With `writes_in_run` a run of so few rows stores them in
    rings at once, over older rows than any later run sees; going back further is then limited (kv/sequence.py).

    `run` reads committed rows and changes nothing that a later run could see, so dropping its result is an abort.
    `commit(accepted)` stores the first `accepted[j]` rows of the last run's step j (0 = none) and must follow a run.
    """

    name: str

    def allocate(self, layout: KvLayout) -> None: ...

    def run(self, steps: Sequence[Step]) -> list[StepOutput]: ...

    def commit(self, accepted: Sequence[int]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class DraftHeads(Protocol):
    """What a backend has beside Backend if it can draft. With layout.heads above 0, `commit` also stores the accepted
    rows' hidden states (before the final norm) in the ring HIDDEN_ROWS, of a long step the newest.
    """

    def draft(
        self, slots: SequenceSlots, head: int, held: int, start: int, tokens: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Evaluates rows [start, start + T) of an MTP head, T >= 1, stores their keys and values, and returns the
        logits behind the last row, float32 [vocab], the caller's until the next call.

        Row p pairs the main model's hidden state of p with `tokens` int64 [T], t_{p+1+head}. All these rows are
        committed in the main model. Of the head's own rows, [held, start) were evaluated before and are visible as far
        as its window goes; older ones count as if there were none. Heads of a chained spec are called in order for the
        same rows. Not called between a run and its commit.
        """


@dataclass(frozen=True)
class Round:
    """`drafts` tokens from as many heads, and their verification, behind `length` = n rows of one sequence.

    tokens: int64 [min(n, K) + 1], the newest that are known: t_{n-K} .. t_n, the last one pending (K = MAX_DRAFTS).
    Each of these heads has evaluated its rows [held, n-K-1) with the text's tokens and evaluates the next K+1 in the
    round. `sampling` has no repetition penalty: drafts and tokens are sampled by it with the noise of their positions.
    """

    slots: SequenceSlots
    length: int
    tokens: NDArray[np.int64]
    drafts: int
    held: int
    sampling: SamplingParams


@runtime_checkable
class DraftRounds(Protocol):
    """What a backend has beside DraftHeads if it can draft, verify and accept in one call, no logits in between."""

    def round(self, asked: Round) -> NDArray[np.int64]:
        """A run of the pending token's row and `drafts` more. Returns the tokens that follow, int64 [1 + accepted
        drafts]: the accepted ones, then the one sampled behind them; -1 where logits are not finite. `commit` follows,
        with at most as many rows."""

    def catch_up(self, slots: SequenceSlots, head: int, held: int, start: int, tokens: NDArray[np.int64]) -> None:
        """As DraftHeads.draft, without logits: rows that a head lacks before a round, T >= 0."""


@runtime_checkable
class RowCopies(Protocol):
    """What a backend has beside Backend if the prefix cache can be used with it: rows come out and go in as bytes.

    `row_format` names what the bytes are and how they were computed: rows of another format are never reused.
    The bytes of positions [first, last) of one attention kind: of every layer of that kind in order, keys
    [last - first, kv_heads, head_dim], then values [last - first, kv_heads, v_head_dim]. Neither method is called
    between a run and its commit.
    """

    row_format: str

    def read_rows(self, slots: SequenceSlots, kind: str, first: int, last: int, out: NDArray[np.uint8]) -> None:
        """Copies committed rows into `out`."""

    def write_rows(self, slots: SequenceSlots, kind: str, first: int, last: int, rows: NDArray[np.uint8]) -> None:
        """Stores rows as if they had been evaluated and committed."""
