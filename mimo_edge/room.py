"""Room for sequences: who has it, who waits for it, and which rows stay between requests of a conversation."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.kv.layout import KvLayout
from mimo_edge.kv.pools import KvPools
from mimo_edge.kv.sequence import Sequence
from mimo_edge.warm import Key, WarmSequences

LONGEST_QUEUE = 65536


class Seat:
    """The sequence that a reply may use. This one is the session's, which wants nothing back."""

    def __init__(self, sequence: Sequence | None):
        self.sequence = sequence

    def wait(self, over: Callable[[], object], due: float | None) -> Sequence | None:
        """The sequence, once there is room; None when `over`, looked at when woken and at `due` (time.perf_counter)."""
        return self.sequence

    def wake(self) -> None:
        """Whoever waits looks at `over` again. From any thread, at once."""

    def leave(self) -> None:
        """The reply ended."""


class Room:
    """Threads may share it. No step is waited for: what it has is bookkeeping."""

    def __init__(self, layout: KvLayout, queue: int):
        """Up to `queue` requests may wait for room. Raises BadInputError when that is out of range."""
        if type(queue) is not int or not 0 <= queue <= LONGEST_QUEUE:
            raise BadInputError(f"queue {queue!r} is out of range (allowed: 0 to {LONGEST_QUEUE}, 0 refuses at once)")
        self.pools, self.closed = KvPools(layout), False
        self.lock = threading.RLock()  # whoever holds it may collect a dropped reply, which gives its room back
        self.warm, self.waiting = WarmSequences(), deque[Place]()
        self._layout, self._queue = layout, queue

    def check_open(self) -> None:
        if self.closed:
            raise MimoEdgeError("the engine is closed: open it again with Engine.open")

    def enter(self, tokens: int, key: Key | None = None) -> Seat:
        """A place for a sequence of up to `tokens` tokens; with a `key`, for the sequence that was left warm under it,
        or for a whole context. Raises MimoEdgeError when it had to wait and cannot."""
        place = Place(self, self._layout.context if key else tokens, key)
        with self.lock:
            self.check_open()
            if self.waiting or not place.take():
                if not self._queue:
                    self.pools.admit(place.tokens)  # raises, with the numbers
                if len(self.waiting) >= self._queue:
                    raise MimoEdgeError(f"{self._queue} requests wait for room, which is the whole queue: try later")
                self.waiting.append(place)
        return place

    def admit(self, tokens: int) -> Sequence:
        """Room at once, before those that wait. Raises MimoEdgeError when there is none."""
        with self.lock:
            self.check_open()
            return self.find(tokens) or Sequence(self._layout, self.pools.admit(tokens))

    def find(self, tokens: int) -> Sequence | None:
        """Room, if there is any; warm sequences make way, the longest unused first. Under the lock."""
        while not self.pools.can_admit(tokens) and (idle := self.warm.give_up()) is not None:
            self.pools.release(idle.slots)
        return Sequence(self._layout, self.pools.admit(tokens)) if self.pools.can_admit(tokens) else None

    def release(self, sequence: Sequence) -> None:
        """Gives a sequence's pages and ring back."""
        with self.lock:
            self.pools.release(sequence.slots)
            self.call_next()

    def call_next(self) -> None:
        if self.waiting:
            self.waiting[0].wake()

    def close(self) -> bool:
        """Whether it was open. Nobody gets room from now on."""
        with self.lock:
            was_open, self.closed = not self.closed, True
            for place in tuple(self.waiting):
                place.wake()
            return was_open


class Place(Seat):
    """A request's place in line, then its room."""

    def __init__(self, room: Room, tokens: int, key: Key | None):
        super().__init__(None)
        self.tokens = tokens
        self._room, self._key = room, key
        self._called = threading.Event()

    def take(self) -> bool:
        """Takes room, if there is any. Under the lock."""
        self.sequence = self._room.warm.take(self._key) if self._key else None
        self.sequence = self.sequence or self._room.find(self.tokens)
        return self.sequence is not None

    def wait(self, over: Callable[[], object], due: float | None) -> Sequence | None:
        while self.sequence is None:
            self._called.clear()  # before anything is looked at, so that no call is missed
            if over():
                break
            with self._room.lock:
                self._room.check_open()
                if self._room.waiting[0] is self and self.take():
                    self._room.waiting.popleft()
                    self._room.call_next()
                    break
            self._called.wait(None if due is None else max(0.0, due - time.perf_counter()))
        return self.sequence

    def wake(self) -> None:
        self._called.set()

    def leave(self) -> None:
        room = self._room
        with room.lock:
            if self in room.waiting:
                room.waiting.remove(self)
            elif self.sequence is not None:
                freed = room.warm.put(self._key, self.sequence) if self._key else self.sequence
                if freed is not None:
                    room.pools.release(freed.slots)
            room.call_next()
