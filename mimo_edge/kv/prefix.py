"""The prefix cache's decisions: which stored prefix a prompt continues, and what goes when memory is needed.

Metadata only, for one thread at a time; cache.py moves the rows. A prefix of length P is promised only while every
layer's rows of it are stored and pinned (snapshots.py), and only if its tokens equal the prompt's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mimo_edge.kv.eviction import PathFrequency, Policy
from mimo_edge.kv.holdings import Holdings
from mimo_edge.kv.keys import Tokens
from mimo_edge.kv.snapshots import Geometry, Piece, Snapshot
from mimo_edge.kv.tree import Node

Fill = Callable[[tuple[Piece, ...]], Any]  # copies rows out of a sequence


@dataclass(frozen=True)
class Match:
    """A promise: the first `tokens` rows of a prompt can be had from `snapshot`, which is pinned until release().

    `parts_at` is where the prompt leaves all stored prompts, `branches` whether a stored one goes on otherwise there.
    """

    tokens: int
    snapshot: Snapshot | None
    parts_at: int
    branches: bool

    @property
    def in_file(self) -> bool:
        """Whether only a file holds the rows."""
        return self.snapshot is not None and not self.snapshot.in_memory


@dataclass
class Books:
    """Counters since the start: requests and their tokens, snapshots stored and refused, evictions by cause."""

    requests: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    stored: int = 0
    refused: int = 0
    evicted: Counter[str] = field(default_factory=Counter)


class PrefixCache:
    """After every operation `have.bytes_used` <= `budget`: rows in memory and the bookkeeping of all that is known."""

    def __init__(
        self,
        geometry: Geometry,
        budget: int,
        policy: Policy | None = None,
        clock: int = 0,
        freed: Callable[[Any], None] | None = None,
        adopt: Callable[[Any], Any] = lambda rows: rows,
    ):
        """`freed` is told of rows that nobody needs any more; `adopt` makes of rows from files those to hold."""
        self.geometry, self.budget, self.clock = geometry, budget, clock
        self.policy: Policy = policy or PathFrequency()
        self.books = Books()
        self._adopt = adopt
        self.have = Holdings(geometry, freed)

    def match(self, root: bytes, tokens: Tokens) -> Match:
        """The longest stored prefix that leaves at least the last token to evaluate. Pins its snapshot."""
        self.clock += 1
        tree = self.have.tree(root)
        parts_at, path = tree.walk(tokens) if tree else (0, [])
        branches = bool(path) and (path[-1].depth > parts_at or bool(path[-1].children)) and parts_at < len(tokens)
        found = self._longest(path, min(parts_at, len(tokens) - 1))
        if found is None:
            return Match(0, None, parts_at, branches)
        length, snapshot = found
        snapshot.pins += 1
        return Match(length, snapshot, parts_at, branches)

    def _longest(self, path: list[Node], limit: int) -> tuple[int, Snapshot] | None:
        """Candidates are the point where the prompt leaves the tree, then every node above it, deepest first: at each,
        any snapshot at or below serves that reaches back far enough."""
        visited = None
        for node in reversed(path):
            reach = min(node.depth, limit)
            snapshot = self._serving(node, reach, visited)
            if snapshot is not None:
                return reach, snapshot
            visited = node
        return None

    def _serving(self, node: Node, reach: int, visited: Node | None) -> Snapshot | None:
        stack = [node] if reach > 0 else []
        while stack:
            node = stack.pop()
            if self.geometry.lowest(self.geometry.firsts(node.depth)) > reach:
                continue  # deeper ones reach back even less far
            if node.snapshot is not None and node.snapshot.lowest <= reach <= node.depth:
                return node.snapshot
            stack.extend(child for child in node.children.values() if child is not visited)
        return None

    def record(self, snapshot: Snapshot | None, reused: int, prompt_tokens: int) -> None:
        """Counts a request, once its rows are in place."""
        self.books.requests += 1
        self.books.prompt_tokens += prompt_tokens
        self.books.reused_tokens += reused
        self.books.hits += reused > 0
        if snapshot is not None:
            self.policy.hit(snapshot, self.clock)

    def release(self, snapshot: Snapshot) -> None:
        """Ends a promise."""
        assert snapshot.pins > 0, "a promise was released twice"
        snapshot.pins -= 1
        if not snapshot.pins and not snapshot.in_memory and not snapshot.on_disk:
            self.have.remove(snapshot)

    def insert(
        self,
        root: bytes,
        tokens: Tokens,
        firsts: tuple[int, ...],
        fill: Fill,
        parent: Snapshot | None = None,
        expected: bool = True,
    ) -> Snapshot | None:
        """Stores a snapshot behind `tokens`, copied by `fill`. `firsts` are the oldest rows that rings hold, a kind;
        `parent` is what the request continued; `expected` says whether somebody is likely to come back here.

        None when rows cannot be continued at, or when there is no room: nothing has changed then, except that others
        may have been evicted.
        """
        g, end = self.geometry, len(tokens)
        if not end or g.lowest(firsts) > end:
            return None
        key, keys = self.have.keys(root, tokens)
        known = self.have.snapshots.get(key)
        if known is not None and known.in_memory and known.lowest <= g.lowest(firsts):
            return known
        with self._kept(known, parent), self.have.shared(keys, tokens) as shared:
            cost = (len(keys) - shared) * g.page_bytes + g.own_bytes(end, firsts)
            index = 0 if known else (len(keys) - shared) * g.page_index_cost + g.index_cost(end)
            if not self.make_room(cost + index):
                self.books.refused += 1
                return None
            own = fill(g.own_pieces(end, firsts))
            rows = {i: fill(g.page_pieces(i)) for i in range(shared, len(keys))}
            snapshot = known or self.have.add(root, tokens, firsts)
            self.have.hold(snapshot, firsts, own, rows)
            snapshot.on_disk = False  # a file of fewer rows, if any, is another snapshot
        self.books.stored += 1
        if known is None:
            self.policy.born(snapshot, parent, self.clock, expected)
        return snapshot

    def index(self, root: bytes, tokens: Tokens, firsts: tuple[int, ...], count: float, used: int) -> Snapshot | None:
        """Makes a snapshot known whose rows are in files; None, with nothing changed, if that has no room."""
        key, keys = self.have.keys(root, tokens)
        snapshot = self.have.snapshots.get(key)
        if snapshot is None:
            if self.have.bytes_used + self.have.index_cost(len(tokens), keys) > self.budget:
                return None
            snapshot = self.have.add(root, tokens, firsts)
            snapshot.count, snapshot.used = count, used
        snapshot.on_disk = snapshot.firsts == firsts
        return snapshot

    def load_cost(self, snapshot: Snapshot) -> int:
        """Bytes of rows that load() would add."""
        missing = sum(not p.held for p in snapshot.pages)
        return missing * self.geometry.page_bytes + self.geometry.own_bytes(snapshot.end, snapshot.firsts)

    def load(self, snapshot: Snapshot, own: Any, rows: dict[int, Any]) -> bool:
        """Takes over rows that were read from files; False, with nothing changed, when they have no room."""
        if snapshot.in_memory:
            return True
        keys = [p.key for p in snapshot.pages]
        with self._kept(snapshot), self.have.shared(keys, snapshot.node.tokens()) as shared:
            missing = range(shared, len(keys))
            if any(i not in rows for i in missing) or not self.make_room(self.load_cost(snapshot)):
                return False
            adopted = {i: self._adopt(rows[i]) for i in missing}
            self.have.hold(snapshot, snapshot.firsts, self._adopt(own), adopted)
        return True

    def make_room(self, cost: int) -> bool:
        """Evicts until `cost` more bytes fit; False when that is impossible."""
        while self.have.bytes_used + cost > self.budget:
            victims = [s for s in self.have.snapshots.values() if not s.pins]
            in_memory = [s for s in victims if s.in_memory]
            if cost > self.budget or not victims:
                return False
            self.evict(min(in_memory or victims, key=self.rank), "memory" if in_memory else "index")
        return True

    def rank(self, snapshot: Snapshot) -> tuple[float, int, bytes]:
        """Lowest goes first; ties are broken so that the order is the same everywhere."""
        alone = 0
        for page in reversed(snapshot.pages):  # the nearer to its start, the more snapshots need a page
            if page.held > 1:
                break
            alone += 1
        frees = alone * self.geometry.page_bytes + snapshot.own_bytes
        return self.policy.rank(snapshot, self.clock, frees), snapshot.used, snapshot.key

    def evict(self, snapshot: Snapshot, cause: str) -> None:
        """Frees a snapshot's memory. It stays known while a file holds its rows, if memory is what is needed."""
        assert not snapshot.pins, "a promised snapshot was to be evicted"
        self.books.evicted[cause] += 1
        if snapshot.in_memory:
            self.have.drop(snapshot)
        if not snapshot.on_disk or cause != "memory":
            self.have.remove(snapshot)

    def unstore(self, snapshot: Snapshot) -> None:
        """A snapshot's file is gone; what memory holds of it stays."""
        snapshot.on_disk = False
        if not snapshot.in_memory and not snapshot.pins:
            self.have.remove(snapshot)

    def clear(self) -> None:
        """Evicts everything that is not promised."""
        for snapshot in [s for s in self.have.snapshots.values() if not s.pins]:
            self.evict(snapshot, "cleared")

    @contextmanager
    def _kept(self, *snapshots: Snapshot | None) -> Iterator[None]:
        """None of these is evicted inside the block."""
        pinned = [s for s in snapshots if s is not None]
        for s in pinned:
            s.pins += 1
        try:
            yield
        finally:
            for s in pinned:
                s.pins -= 1

    def check_integrity(self) -> None:
        self.have.check_integrity()
        assert self.have.bytes_used <= self.budget, f"{self.have.bytes_used} bytes used > budget {self.budget}"
