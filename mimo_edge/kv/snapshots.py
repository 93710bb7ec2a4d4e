"""What a stored prefix consists of, and from where it may be continued.

A snapshot at S holds, beside its whole pages, which snapshots share, a part of its own:

    full layers      |page 0|page 1|..|page i|  tail  |S          rows [0, S), the tail being less than a page
    a window layer                  |first .. window .. |S        rows [first, S), all that the ring still holds

A ring holds a few rows more than a window (windows.py), so a snapshot serves not only S but every P from `lowest` to S:
the rows of P's window are there. That is why a snapshot at a prompt's end also serves the same prompt sent again, of
which the last token must be evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mimo_edge.kv.layout import KvLayout, RowKind
from mimo_edge.kv.tree import Node

# Bytes of bookkeeping beside the rows themselves, checked against tracemalloc in tests/kv/test_prefix.py.
PAGE_OVERHEAD, SNAPSHOT_OVERHEAD, TOKEN_OVERHEAD = 700, 2500, 8


@dataclass(frozen=True)
class Piece:
    """Rows [first, last) of one kind and their place [at, at + bytes) in a buffer."""

    kind: str
    first: int
    last: int
    at: int
    nbytes: int


@dataclass(frozen=True)
class Geometry:
    """Sizes and legality of snapshots for one layout."""

    page_size: int
    kinds: tuple[RowKind, ...]

    @staticmethod
    def of(layout: KvLayout) -> Geometry:
        return Geometry(layout.page_size, layout.row_kinds)

    @cached_property
    def page_bytes(self) -> int:
        return self.page_size * sum(k.token_bytes for k in self.kinds if k.window is None)

    def firsts(self, end: int) -> tuple[int, ...]:
        """First rows that rings hold, a kind, when `end` rows were written and none was taken back."""
        return tuple(0 if k.slots is None else max(0, end - k.slots) for k in self.kinds)

    def lowest(self, firsts: tuple[int, ...]) -> int:
        """The least P that rows from `firsts` on can be continued at: [P-W+1, P) must be among them in every kind."""
        needs = [
            first + k.window - 1
            for k, first in zip(self.kinds, firsts, strict=True)
            if k.window is not None and k.window > 1 and first > 0
        ]
        return max(needs, default=0)

    def page_pieces(self, index: int) -> tuple[Piece, ...]:
        """Rows of page `index`."""
        first = index * self.page_size
        return self._pieces((k, first, first + self.page_size) for k in self.kinds if k.window is None)

    def own_pieces(self, end: int, firsts: tuple[int, ...]) -> tuple[Piece, ...]:
        """Rows of a snapshot at `end` that no page holds."""
        tail = end - end % self.page_size
        return self._pieces(
            (k, tail if k.window is None else first, end) for k, first in zip(self.kinds, firsts, strict=True)
        )

    def _pieces(self, spans: Iterator[tuple[RowKind, int, int]]) -> tuple[Piece, ...]:
        pieces, at = [], 0
        for kind, first, last in spans:
            nbytes = (last - first) * kind.token_bytes
            if nbytes:
                pieces.append(Piece(kind.name, first, last, at, nbytes))
            at += nbytes
        return tuple(pieces)

    def own_bytes(self, end: int, firsts: tuple[int, ...]) -> int:
        rows = sum((end - f) * k.token_bytes for k, f in zip(self.kinds, firsts, strict=True) if k.window is not None)
        return rows + end % self.page_size * self.page_bytes // self.page_size

    def most_bytes(self, context: int) -> int:
        """Bytes of the largest single entry: a snapshot at `context` with all its pages, bookkeeping included."""
        ends = {context, max(1, context - context % self.page_size - 1)}  # the second has the longest tail
        page = self.page_bytes + self.page_index_cost
        return max(e // self.page_size * page + self.own_bytes(e, self.firsts(e)) + self.index_cost(e) for e in ends)

    def index_cost(self, end: int) -> int:
        """Bytes of bookkeeping for a snapshot, in memory or not."""
        return SNAPSHOT_OVERHEAD + TOKEN_OVERHEAD * (end // self.page_size + end % self.page_size)

    @property
    def page_index_cost(self) -> int:
        """Bytes of bookkeeping for a page, in memory or not."""
        return PAGE_OVERHEAD + self.page_size * TOKEN_OVERHEAD


@dataclass(eq=False)
class Page:
    """A whole page of tokens with the rows of all full layers. `data` is None while only a file holds them.

    `refs` counts the snapshots that need it, `held` those of them whose rows are in memory.
    """

    key: bytes
    index: int
    tokens: bytes = field(repr=False)
    data: Any = field(default=None, repr=False)
    refs: int = 0
    held: int = 0


@dataclass(eq=False)
class Snapshot:
    """A point that a prompt can be continued at.

    `data` holds own_pieces, `own_bytes` of them, while `in_memory`. `count` and `used` (clock of the last use) order
    eviction; while `pins` is above 0 it is not evicted. `mark`: lineage.py.
    """

    key: bytes
    root: bytes
    end: int
    firsts: tuple[int, ...]
    lowest: int
    pages: list[Page] = field(repr=False)
    node: Node = field(repr=False)
    data: Any = field(default=None, repr=False)
    own_bytes: int = 0
    in_memory: bool = False
    on_disk: bool = False
    count: float = 0.0
    used: int = 0
    pins: int = 0
    mark: bool = False
