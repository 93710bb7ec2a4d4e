"""Who owns which memory: pages of the full layers, rings of the window layers. Metadata only; backends hold the bytes.

Two pools with separate accounting. Whoever takes from both asks both first (`can_*`), so that nothing fails half way.
"""

from __future__ import annotations

from mimo_edge.errors import MimoEdgeError
from mimo_edge.kv.layout import KvLayout, SequenceSlots


class PagePool:
    """Pages 0..capacity-1, handed out as contiguous runs (the CPU backends bind a run as one view).

    A run begins at a multiple of `longest`, the most pages that anybody takes, so that gaps never get too short.
    """

    def __init__(self, capacity: int, longest: int):
        self.capacity, self.longest = capacity, longest
        self._owned: dict[int, tuple[int, ...]] = {}  # first page -> run

    @property
    def used(self) -> int:
        return sum(len(run) for run in self._owned.values())

    def _gap(self, count: int) -> int | None:
        """First page of the lowest free run of `count` pages."""
        starts = range(0, self.capacity - self.longest + 1, self.longest)
        return next((s for s in starts if s not in self._owned), None) if count <= self.longest else None

    def can_take(self, count: int) -> bool:
        return count >= 1 and self._gap(count) is not None

    def take(self, count: int) -> tuple[int, ...]:
        """Raises MimoEdgeError when can_take(count) is false."""
        first = self._gap(count) if count >= 1 else None
        if first is None:
            raise MimoEdgeError(f"no run of {count} free pages ({self.used} of {self.capacity} pages are in use)")
        run = tuple(range(first, first + count))
        self._owned[first] = run
        return run

    def give(self, run: tuple[int, ...]) -> None:
        if self._owned.get(run[0] if run else -1) != run:
            raise MimoEdgeError(f"pages {run[:1]}.. were not taken from this pool")
        del self._owned[run[0]]

    def check_integrity(self) -> None:
        """Raises AssertionError with all terms of the violated equation."""
        end = 0
        for first, run in sorted(self._owned.items()):
            assert run == tuple(range(first, first + len(run))), f"run {run} is not contiguous from {first}"
            assert first >= end, f"page {first} is owned twice (previous run ends at {end})"
            end = first + len(run)
        assert end <= self.capacity, f"last page {end} > capacity {self.capacity}"


class RingPool:
    """Ring sets 0..capacity-1; one set holds a ring for every window layer of one sequence."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def used(self) -> int:
        return self.capacity - len(self._free)

    def can_take(self) -> bool:
        return bool(self._free)

    def take(self) -> int:
        """Raises MimoEdgeError when can_take() is false."""
        if not self._free:
            raise MimoEdgeError(f"no free ring ({self.used} of {self.capacity} are in use)")
        return self._free.pop()

    def give(self, ring: int) -> None:
        if not 0 <= ring < self.capacity or ring in self._free:
            raise MimoEdgeError(f"ring {ring} was not taken from this pool")
        self._free.append(ring)

    def check_integrity(self) -> None:
        assert len(set(self._free)) == len(self._free) <= self.capacity, f"free {self._free} of {self.capacity}"
        assert all(0 <= r < self.capacity for r in self._free), f"free {self._free} of {self.capacity}"


class KvPools:
    """Both pools of one engine. A sequence takes its whole capacity at once, so it cannot run out later."""

    def __init__(self, layout: KvLayout):
        self.layout = layout
        self.pages = PagePool(layout.pages, layout.pages_for(layout.context))
        self.rings = RingPool(layout.sequences)

    def can_admit(self, tokens: int) -> bool:
        """Whether a sequence of up to `tokens` tokens fits into both pools now."""
        return self.rings.can_take() and self.pages.can_take(self.layout.pages_for(tokens))

    def admit(self, tokens: int) -> SequenceSlots:
        """Raises MimoEdgeError, with nothing taken, when can_admit(tokens) is false."""
        if not self.can_admit(tokens):
            raise MimoEdgeError(
                f"no room for a sequence of {tokens} tokens: {self.pages.used} of {self.pages.capacity} pages of "
                f"{self.layout.page_size} tokens and {self.rings.used} of {self.rings.capacity} rings are in use; "
                "close a session or open the engine with more sessions"
            )
        return SequenceSlots(self.pages.take(self.layout.pages_for(tokens)), self.rings.take())

    def release(self, slots: SequenceSlots) -> None:
        self.pages.give(slots.pages)
        self.rings.give(slots.ring)

    def check_integrity(self) -> None:
        self.pages.check_integrity()
        self.rings.check_integrity()
        assert len(self.pages._owned) == self.rings.used, f"{len(self.pages._owned)} runs, {self.rings.used} rings"
