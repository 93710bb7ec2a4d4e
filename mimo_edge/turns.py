"""Whose step runs next when several replies are generated at once.

The fewest tokens left to evaluate first: a decode step does not wait behind a long prompt, whose chunks fill the gaps.
Whoever waits moves up, so nobody starves. Lengths count in buckets, doubling; within a bucket the first come is first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
        self._changed = threading.Condition(threading.Lock())
        self._queue: list[_Waiting] = []  # in order of arrival
        self._busy = False

    @contextmanager
    def turn(self, left: int) -> Iterator[None]:
        """Waits for a turn and keeps it inside the block. `left`: tokens that the reply still has to evaluate."""
        me = _Waiting(left.bit_length())
        with self._changed:
            self._queue.append(me)
            try:
                self._changed.wait_for(lambda: not self._busy and min(self._queue, key=lambda w: w.urgency) is me)
                self._busy = True
            finally:  # Ctrl-C while waiting, too
                self._queue.remove(me)
            for other in self._queue:
                other.passed += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
