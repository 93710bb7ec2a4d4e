"""Replays the generated traces with a restart now and then: what files are worth, and what is written for it.

    python scripts/replay_restarts.py --budget 400 --every 20

After a restart memory is empty, and the last request is sent again: as it was, and with the end of its last message
replaced. Decisions are those of the runtime, bytes those of --bundle; files are not bounded, no rows are copied.
Compared: when the end of a prompt is written, beside those of replies, junctions and marks (kv/lineage.py).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import _trace
import numpy as np
from _trace import Asked
from replay_trace import geometry_of

from mimo_edge.bundle import BUILT_IN
from mimo_edge.cache import CacheOptions
from mimo_edge.kv.keys import as_tokens
from mimo_edge.kv.lineage import Lineage
from mimo_edge.kv.prefix import PrefixCache
from mimo_edge.kv.snapshots import Geometry, Snapshot

RULES: dict[str, Callable[[Lineage, int], bool]] = {  # whether the end of a prompt is written
    "never": lambda lineage, end: False,
    "always": lambda lineage, end: True,
    "behind a window": Lineage.lasts,  # the runtime's
}
SHORT = " (young)"  # of a conversation of less than twice the system prompt
EDITED = 8  # tokens at the end of a prompt that somebody says otherwise


class Replay:
    """One cache whose memory is lost at restarts."""

    def __init__(self, geometry: Geometry, budget: int, rule: str):
        self.geometry, self._rule = geometry, RULES[rule]
        self.cache = PrefixCache(geometry, budget)
        self.written = 0  # bytes
        self._pages: set[bytes] = set()

    def ask(self, asked: Asked) -> int:
        """Tokens of the prompt that were reused."""
        match = self.cache.match(b"", asked.prompt)
        if match.snapshot is not None:
            self._load(match.snapshot)
            self.cache.record(match.snapshot, match.tokens, len(asked.prompt))
            self.cache.release(match.snapshot)
        lineage = Lineage(self.cache, b"", match, match.tokens, len(asked.prompt), asked.marks)
        rows = _trace.whole(asked)
        for end in [*lineage.stops, len(rows)]:
            snapshot = lineage.save(rows[:end], self.geometry.firsts(end), lambda pieces: None)
            if snapshot is not None and (end != len(asked.prompt) or self._rule(lineage, end)):
                self._write(snapshot)
        return match.tokens

    def _load(self, snapshot: Snapshot) -> None:
        self.cache.load(snapshot, None, dict.fromkeys(range(len(snapshot.pages))))

    def _write(self, snapshot: Snapshot) -> None:
        if snapshot.on_disk:
            return
        fresh = {p.key for p in snapshot.pages} - self._pages
        self._pages |= fresh
        self.written += snapshot.own_bytes + len(fresh) * self.geometry.page_bytes
        snapshot.on_disk = True

    def restart(self) -> None:
        for snapshot in [s for s in self.cache.have.snapshots.values() if s.in_memory]:
            self.cache.evict(snapshot, "memory")


def edited(asked: Asked) -> Asked:
    """The same conversation; the last message ends otherwise."""
    return replace(asked, prompt=np.concatenate([asked.prompt[:-EDITED], as_tokens([1] * EDITED)]))


def table(name: str, requests: Sequence[Asked], geometry: Geometry, budget: int, every: int) -> None:
    print(f"\n{name}: {len(requests)} requests, a restart every {every}, {budget / 1e6:,.0f} MB of memory")
    daily = CacheOptions().disk_writes
    for rule in RULES:
        replay, shares = Replay(geometry, budget, rule), defaultdict[str, list[tuple[int, int]]](list)
        for i, asked in enumerate(requests):
            if i and i % every == 0:
                alone = SHORT if len(requests[i - 1].prompt) < 2 * _trace.SYSTEM else ""
                for kind, again in (("sent again", requests[i - 1]), ("edited", edited(requests[i - 1]))):
                    replay.restart()
                    shares[kind + alone].append((replay.ask(again), len(again.prompt)))
                replay.restart()
            shares["all"].append((replay.ask(asked), len(asked.prompt)))
        told = ", ".join(f"{kind} {sum(a for a, _ in s) / sum(b for _, b in s):.1%}" for kind, s in shares.items())
        each = replay.written / sum(map(len, shares.values()))
        print(f"  {rule:16s} reused: {told}; {each / 1e6:.2f} MB written a request, {daily / each:,.0f} requests a day")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=BUILT_IN, help="whose KV sizes to use")
    parser.add_argument("--budget", type=int, default=400, help="of memory, in MB")
    parser.add_argument("--every", type=int, default=20, help="requests between restarts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    geometry = geometry_of(options.bundle)
    for form in _trace.FORMS:
        table(form, _trace.generate(form, options.seed), geometry, options.budget * 10**6, options.every)


if __name__ == "__main__":
    main()
