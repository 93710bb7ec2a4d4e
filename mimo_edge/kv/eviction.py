"""Which snapshot goes first when memory is needed. A policy ranks; the lowest rank goes.

Time is a logical clock of requests (machines may boot without a clock), so idling orders eviction and expires nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from mimo_edge.kv.snapshots import Snapshot
from mimo_edge.kv.tree import Node

HALF_LIFE = 25.0  # requests; scripts/replay_trace.py compares


def aged(count: float, idle: float, half_life: float = HALF_LIFE) -> float:
    """A count after so many requests without a use."""
    return count * 2.0 ** (-max(0.0, idle) / half_life)


class Policy(Protocol):
    """Keeps `count` and `used` of snapshots, and ranks them."""

    name: str

    def hit(self, snapshot: Snapshot, now: int) -> None: ...

    def born(self, snapshot: Snapshot, parent: Snapshot | None, now: int, expected: bool) -> None:
        """`snapshot` was stored for a request that continued `parent`; `expected` is somebody to come back to it."""

    def rank(self, snapshot: Snapshot, now: int, frees: int) -> float:
        """`frees`: bytes that go with it."""


class PathFrequency:
    """Uses count for the path, not for the point: a new tip inherits the count of the parent that it supersedes, which
    drops to zero. Where prompts part, nothing is superseded, and each way starts anew. Counts halve every `half_life`
    requests.

    Rank: count x tokens to evaluate again without it / bytes.
    """

    name = "path"

    def __init__(self, half_life: float = HALF_LIFE):
        self._half_life = half_life

    def hit(self, snapshot: Snapshot, now: int) -> None:
        snapshot.count = self._aged(snapshot, now) + 1
        snapshot.used = now

    def born(self, snapshot: Snapshot, parent: Snapshot | None, now: int, expected: bool) -> None:
        snapshot.count, snapshot.used = float(expected), now
        if expected and parent is not None and not _live_junction(parent.node):
            snapshot.count = max(1.0, self._aged(parent, now))
            parent.count = 0.0

    def rank(self, snapshot: Snapshot, now: int, frees: int) -> float:
        if not snapshot.count:
            return 0.0
        node = snapshot.node.parent
        while node is not None and (node.snapshot is None or node.snapshot.count <= 0):
            node = node.parent
        saves = snapshot.end - (node.depth if node is not None else 0)
        return self._aged(snapshot, now) * saves / max(1, frees)

    def _aged(self, snapshot: Snapshot, now: int) -> float:
        return aged(snapshot.count, now - snapshot.used, self._half_life)


class LeastRecent:
    """The longest unused goes."""

    name = "lru"

    def hit(self, snapshot: Snapshot, now: int) -> None:
        snapshot.used = now

    def born(self, snapshot: Snapshot, parent: Snapshot | None, now: int, expected: bool) -> None:
        snapshot.used = now

    def rank(self, snapshot: Snapshot, now: int, frees: int) -> float:
        return snapshot.used


class PlainFrequency:
    """The published design's rule: the least used goes, but five uses protect until `idle` requests have passed."""

    name = "lfu"

    def __init__(self, floor: int = 5, idle: int = 300):
        self._floor, self._idle = floor, idle

    def hit(self, snapshot: Snapshot, now: int) -> None:
        snapshot.count += 1
        snapshot.used = now

    def born(self, snapshot: Snapshot, parent: Snapshot | None, now: int, expected: bool) -> None:
        snapshot.count, snapshot.used = 1.0, now

    def rank(self, snapshot: Snapshot, now: int, frees: int) -> float:
        shielded = snapshot.count >= self._floor and now - snapshot.used < self._idle
        return (1e6 if shielded else 0.0) + snapshot.count + snapshot.used * 1e-9


def _live_junction(node: Node) -> bool:
    """Whether at least two of the ways on from here are of use."""
    return sum(any(_live(child)) for child in node.children.values()) > 1


def _live(node: Node) -> Iterator[bool]:
    yield node.snapshot is not None and node.snapshot.count > 0
    for child in node.children.values():
        yield from _live(child)
