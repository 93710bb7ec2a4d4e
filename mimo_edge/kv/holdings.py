"""What a prefix cache has: snapshots, the pages they share, the tree of their tokens, and how many bytes that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mimo_edge.kv.keys import Tokens, page_keys, snapshot_key
from mimo_edge.kv.snapshots import Geometry, Page, Snapshot
from mimo_edge.kv.tree import Tree


class Holdings:
    """Accounting only; prefix.py decides. Pages come and go with the snapshots that need them."""

    def __init__(self, geometry: Geometry, freed: Callable[[Any], None] | None = None):
        """`freed` is told of rows that nobody needs any more."""
        self.geometry, self._freed = geometry, freed or (lambda rows: None)
        self.snapshots: dict[bytes, Snapshot] = {}
        self.pages: dict[bytes, Page] = {}
        self.page_bytes = self.own_bytes = 0  # of rows in memory: those of pages, those of snapshots
        self.index_bytes = 0
        self._trees: dict[bytes, Tree] = {}

    @property
    def bytes_used(self) -> int:
        return self.page_bytes + self.own_bytes + self.index_bytes

    def tree(self, root: bytes) -> Tree | None:
        return self._trees.get(root)

    def keys(self, root: bytes, tokens: Tokens) -> tuple[bytes, list[bytes]]:
        """Keys of a snapshot behind `tokens` and of its whole pages."""
        pages = page_keys(root, tokens, self.geometry.page_size)
        return snapshot_key(root, pages, tokens, self.geometry.page_size), pages

    def index_cost(self, tokens: int, pages: list[bytes]) -> int:
        """Bookkeeping bytes that add() would need."""
        fresh = sum(k not in self.pages for k in pages)
        return fresh * self.geometry.page_index_cost + self.geometry.index_cost(tokens)

    def add(self, root: bytes, tokens: Tokens, firsts: tuple[int, ...]) -> Snapshot:
        """Makes a snapshot known, without rows."""
        key, keys = self.keys(root, tokens)
        size = self.geometry.page_size
        pages = []
        for i, k in enumerate(keys):
            page = self.pages.get(k)
            if page is None:
                page = self.pages[k] = Page(k, i, tokens[i * size : (i + 1) * size].tobytes())
                self.index_bytes += self.geometry.page_index_cost
            page.refs += 1
            pages.append(page)
        node = self._trees.setdefault(root, Tree()).insert(tokens)
        snapshot = Snapshot(key, root, len(tokens), firsts, self.geometry.lowest(firsts), pages, node)
        node.snapshot = self.snapshots[key] = snapshot
        self.index_bytes += self.geometry.index_cost(len(tokens))
        return snapshot

    def hold(self, snapshot: Snapshot, firsts: tuple[int, ...], own: Any, rows: dict[int, Any]) -> None:
        """Rows come into memory: the snapshot's `own`, and `rows` of pages that memory lacks, by their index."""
        if snapshot.in_memory:  # replaced by rows that reach further back
            self.own_bytes -= snapshot.own_bytes
            self._freed(snapshot.data)
        for page in snapshot.pages if not snapshot.in_memory else []:
            if not page.held:
                page.data = rows[page.index]
                self.page_bytes += self.geometry.page_bytes
            page.held += 1
        snapshot.data, snapshot.firsts, snapshot.lowest = own, firsts, self.geometry.lowest(firsts)
        snapshot.in_memory, snapshot.own_bytes = True, self.geometry.own_bytes(snapshot.end, firsts)
        self.own_bytes += snapshot.own_bytes

    def drop(self, snapshot: Snapshot) -> None:
        """Rows leave memory."""
        self.own_bytes -= snapshot.own_bytes
        self._freed(snapshot.data)
        snapshot.data, snapshot.in_memory, snapshot.own_bytes = None, False, 0
        for page in snapshot.pages:
            self._let_go(page)

    def _let_go(self, page: Page) -> None:
        page.held -= 1
        if not page.held:
            self._freed(page.data)
            page.data = None
            self.page_bytes -= self.geometry.page_bytes

    def remove(self, snapshot: Snapshot) -> None:
        """Forgets a snapshot whose rows are not in memory."""
        del self.snapshots[snapshot.key]
        self.index_bytes -= self.geometry.index_cost(snapshot.end)
        for page in snapshot.pages:
            self._unref(page)
        snapshot.node.snapshot = None
        tree = self._trees[snapshot.root]
        tree.prune(snapshot.node)
        if not tree.root.children:
            del self._trees[snapshot.root]

    def _unref(self, page: Page) -> None:
        page.refs -= 1
        if not page.refs:
            del self.pages[page.key]
            self.index_bytes -= self.geometry.page_index_cost

    @contextmanager
    def shared(self, keys: list[bytes], tokens: Tokens) -> Iterator[int]:
        """How many leading pages memory holds already; they are kept inside the block."""
        size, shared = self.geometry.page_size, list[Page]()
        for i, key in enumerate(keys):
            page = self.pages.get(key)
            if page is None or not page.held:
                break  # whoever needs a later page needs this one as well
            assert page.tokens == tokens[i * size : (i + 1) * size].tobytes(), "two pages of one key"
            page.held += 1
            page.refs += 1
            shared.append(page)
        try:
            yield len(shared)
        finally:
            for page in shared:
                self._let_go(page)
                self._unref(page)

    def check_integrity(self) -> None:
        """Raises AssertionError with all terms of the violated equation."""
        g, snapshots = self.geometry, self.snapshots.values()
        held = Counter(id(p) for s in snapshots if s.in_memory for p in s.pages)
        refs = Counter(id(p) for s in snapshots for p in s.pages)
        for p in self.pages.values():
            assert (p.refs, p.held) == (refs[id(p)], held[id(p)]), f"{p}: {refs[id(p)]} refs, {held[id(p)]} held"
            assert p.held or p.data is None, f"{p} keeps rows that nobody needs"
        assert all(self.pages.get(p.key) is p for s in snapshots for p in s.pages), "a page is not listed"
        page_bytes = sum(g.page_bytes for p in self.pages.values() if p.held)
        own = sum(g.own_bytes(s.end, s.firsts) for s in snapshots if s.in_memory)
        index = len(self.pages) * g.page_index_cost + sum(g.index_cost(s.end) for s in snapshots)
        have = (self.page_bytes, self.own_bytes, self.index_bytes)
        assert have == (page_bytes, own, index), f"counted {have}, there are {(page_bytes, own, index)}"
        for s in snapshots:
            assert s.in_memory or s.on_disk or s.pins, f"{s} is nowhere"
            assert s.in_memory or s.data is None, f"{s} keeps rows that are not counted"
            assert s.node.snapshot is s and s.node.depth == s.end, f"{s} is not in the tree"
