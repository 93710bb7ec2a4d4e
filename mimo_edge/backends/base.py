"""What a backend is: it owns device buffers and runs rows; it decides nothing about tokens or memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mimo_edge.kv.layout import KvLayout, SequenceSlots

__all__ = ["Backend", "SequenceSlots", "Step", "StepOutput"]


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

    `run` reads committed rows and changes nothing that a later run could see, so dropping its result is an abort.
    `commit(accepted)` stores the first `accepted[j]` rows of the last run's step j (0 = none) and must follow a run.
    """

    name: str

    def allocate(self, layout: KvLayout) -> None: ...

    def run(self, steps: Sequence[Step]) -> list[StepOutput]: ...

    def commit(self, accepted: Sequence[int]) -> None: ...

    def close(self) -> None: ...
