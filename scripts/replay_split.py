"""Replays the generated traces with one budget for all rows, and with one for pages and one for snapshots.

    python scripts/replay_split.py --budgets 256 400

Decisions are those of the runtime; with two budgets, pressure on one evicts what frees most of that one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import _trace
from replay_trace import BUILT_IN, UNBOUNDED, geometry_of, replay

from mimo_edge.kv.eviction import PathFrequency
from mimo_edge.kv.prefix import PrefixCache
from mimo_edge.kv.snapshots import Geometry, Snapshot

SHARES = (0.2, 0.35, 0.5, 0.65, 0.8)


class TwoBudgets(PrefixCache):
    """`share` of the budget is for the pages of full layers, the rest for rows of snapshots. Each holds at the end of
    an insertion."""

    def __init__(self, geometry: Geometry, budget: int, share: float):
        super().__init__(geometry, UNBOUNDED, PathFrequency())
        self._pages, self._own = int(share * budget), int((1 - share) * budget)

    def insert(self, *args, **options) -> Snapshot | None:
        snapshot = super().insert(*args, **options)
        with self._kept(snapshot):
            self._press(lambda: self.have.page_bytes > self._pages, self._frees_pages)
            self._press(lambda: self.have.own_bytes > self._own, lambda s: s.own_bytes)
        return snapshot

    def _press(self, over: Callable[[], bool], frees: Callable[[Snapshot], int]) -> None:
        while over():
            victims = [s for s in self.have.snapshots.values() if not s.pins]
            if not victims:
                return
            useful = [s for s in victims if frees(s)] or victims
            self.evict(min(useful, key=lambda s: self.policy.rank(s, self.clock, frees(s))), "memory")

    def _frees_pages(self, snapshot: Snapshot) -> int:
        return sum(p.held == 1 for p in snapshot.pages) * self.geometry.page_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=BUILT_IN, help="whose KV sizes to use")
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 400], help="in MB")
    parser.add_argument("--forms", nargs="+", default=_trace.FORMS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    geometry = geometry_of(options.bundle)
    for form in options.forms:
        requests = _trace.generate(form, options.seed)
        print(f"\n{form}: {len(requests)} requests", flush=True)
        for mb in options.budgets:
            one = replay(requests, geometry, PrefixCache(geometry, mb * 10**6, PathFrequency()))
            line = [f"one {one.all:.1%}"]
            for share in SHARES:
                two = replay(requests, geometry, TwoBudgets(geometry, mb * 10**6, share))
                line.append(f"{share:.0%} pages {two.all:.1%}")
            print(f"  {mb} MB: {', '.join(line)}", flush=True)


if __name__ == "__main__":
    main()
