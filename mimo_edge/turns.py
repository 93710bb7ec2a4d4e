"""Whose step runs next when several replies are generated at once.

The fewest tokens left to evaluate first: a decode step does not wait behind a long prompt, whose chunks fill the gaps.
Whoever waits moves up, so nobody starves. Lengths count in buckets, doubling; within a bucket the first come is first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PATIENCE = 2  # turns of others that make up for a bucket


@dataclass(eq=False)
class _Waiting:
    bucket: int
    passed: int = 0

    @property
    def urgency(self) -> float:
        """Lowest goes first."""
        return self.bucket - self.passed / PATIENCE


class Turns:
    """One turn at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[_Waiting] = []  # in order of arrival
        self._busy = False

    @contextmanager
    def turn(self, left: int, over: Callable[[], object] = lambda: False, due: float | None = None) -> Iterator[bool]:
        """Waits for a turn and keeps it inside the block. `left`: tokens that the reply still has to evaluate.

        Gives False, and no turn, when the reply is `over`, which is looked at when woken and at `due`, a time of
        time.perf_counter.
        """
        me, mine = _Waiting(left.bit_length()), False
        with self._changed:
            self._queue.append(me)
            try:
                timeout = None if due is None else max(0.0, due - time.perf_counter())
                self._changed.wait_for(lambda: over() or self._is_next(me), timeout)
                if mine := self._is_next(me) and not over():
                    self._busy = True
            finally:  # Ctrl-C while waiting, too
                self._queue.remove(me)
                if not mine:
                    self._changed.notify_all()  # another may be next without this one
            if mine:
                for other in self._queue:
                    other.passed += 1
        try:
            yield mine
        finally:
            if mine:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def wake(self) -> None:
        """Whoever waits looks again at whether its reply is over. From any thread."""
        with self._changed:
            self._changed.notify_all()

    def _is_next(self, me: _Waiting) -> bool:
        return not self._busy and min(self._queue, key=lambda w: w.urgency) is me
