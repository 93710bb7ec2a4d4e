"""Replays a trace of requests against policies and budgets: which share of prompt tokens is reused.

    python scripts/replay_trace.py --plot docs/cache_curves.png
    python scripts/replay_trace.py --trace trace.jsonl --budgets 64 256

Decisions are those of the runtime (mimo_edge/kv), bytes those of the built-in model or of --bundle; no rows are copied.
The ceiling is a cache without a budget that can stop at every token.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import _trace
from _trace import Asked

from mimo_edge.bundle import BUILT_IN, Bundle
from mimo_edge.kv.eviction import LeastRecent, PathFrequency, PlainFrequency, Policy
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.lineage import Lineage
from mimo_edge.kv.prefix import PrefixCache
from mimo_edge.kv.snapshots import Geometry, Snapshot


class KnownKind(PathFrequency):
    """Told what kind of request it sees, better than a fingerprint of its text could tell: what is stored for a kind
    starts with the share of that kind that came back."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = 0
        self._of: dict[bytes, int] = {}
        self._born: Counter[int] = Counter()
        self._came_back: Counter[int] = Counter()

    def hit(self, snapshot: Snapshot, now: int) -> None:
        if (kind := self._of.pop(snapshot.key, None)) is not None:
            self._came_back[kind] += 1
        super().hit(snapshot, now)

    def born(self, snapshot: Snapshot, parent: Snapshot | None, now: int, expected: bool) -> None:
        super().born(snapshot, parent, now, expected)
        self._of[snapshot.key] = self.kind
        self._born[self.kind] += 1
        if self._born[self.kind] > 10:
            snapshot.count *= self._came_back[self.kind] / self._born[self.kind]


POLICIES: dict[str, Callable[[], Policy]] = {
    "path frequency": PathFrequency,
    "  and the kind of request": KnownKind,
    "LRU": LeastRecent,
    "LFU, floor 5 uses / 30 min": PlainFrequency,
}
BUDGETS = (64, 128, 256, 400, 600, 800, 1000)  # MB
UNBOUNDED = 1 << 50


@dataclass(frozen=True)
class Shares:
    """Reused share of the prompt tokens: of all requests, of all but the burst, of the busiest tenth of sessions."""

    all: float
    steady: float
    busiest: float
    most_bytes: int


def replay(requests: Sequence[Asked], geometry: Geometry, cache: PrefixCache) -> Shares:
    root = b""
    reused, most = [], 0
    for asked in requests:
        if isinstance(cache.policy, KnownKind):
            cache.policy.kind = asked.kind
        match = cache.match(root, asked.prompt)
        reused.append(match.tokens)
        cache.record(match.snapshot, match.tokens, len(asked.prompt))
        if match.snapshot is not None:
            cache.release(match.snapshot)
        lineage = Lineage(cache, root, match, match.tokens, len(asked.prompt), asked.marks)
        rows = _trace.whole(asked)
        for end in [*lineage.stops, len(rows)]:
            lineage.save(rows[:end], geometry.firsts(end), lambda pieces: None)
        most = max(most, cache.have.bytes_used)
    return _shares(requests, reused, most)


def _shares(requests: Sequence[Asked], reused: Sequence[int], most: int) -> Shares:
    def share(keep: Callable[[Asked], bool]) -> float:
        pairs = [(n, len(a.prompt)) for n, a in zip(reused, requests, strict=True) if keep(a)]
        return sum(n for n, _ in pairs) / max(1, sum(m for _, m in pairs))

    tenth = max(1, len({a.session for a in requests}) // 10)
    return Shares(share(lambda a: True), share(lambda a: a.kind >= 0), share(lambda a: 0 <= a.session < tenth), most)


def ceiling(requests: Sequence[Asked], geometry: Geometry) -> Shares:
    """Without window layers every token is a point to continue at."""
    full = replace(geometry, kinds=tuple(replace(k, window=None, slots=None) for k in geometry.kinds))
    return replay(requests, full, PrefixCache(full, UNBOUNDED, LeastRecent()))


def geometry_of(bundle: Path) -> Geometry:
    return Geometry.of(plan_layout(Bundle.open(bundle, verify=False).spec, _trace.LONGEST + 500))


def table(name: str, requests: Sequence[Asked], geometry: Geometry, budgets: Sequence[int]) -> dict[str, list[Shares]]:
    """Prints and returns one row a policy and budget."""
    best = ceiling(requests, geometry)
    free = replay(requests, geometry, PrefixCache(geometry, UNBOUNDED))
    tokens = sum(len(a.prompt) for a in requests)
    print(f"\n{name}: {len(requests)} requests, {tokens:,} prompt tokens")
    print(f"  stops anywhere, no budget: {_line(best, best)}")
    print(f"  ours, no budget:           {_line(free, best)}, {free.most_bytes / 1e6:,.0f} MB")
    curves = {}
    for policy, make in POLICIES.items():
        curves[policy] = [replay(requests, geometry, PrefixCache(geometry, mb * 10**6, make())) for mb in budgets]
        for mb, shares in zip(budgets, curves[policy], strict=True):
            print(f"  {policy:27s}{mb:6d} MB: {_line(shares, best)}", flush=True)
    return {"ceiling": [best], **curves}


def _line(s: Shares, best: Shares) -> str:
    of_best = s.all / best.all if best.all else 0.0
    return f"{s.all:6.1%} of tokens ({of_best:6.1%} of ceiling), steady {s.steady:6.1%}, busiest tenth {s.busiest:6.1%}"


def plot(path: Path, results: dict[str, dict[str, list[Shares]]], budgets: Sequence[int]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(5 * len(results), 4), sharey=True, squeeze=False)
    for ax, (name, curves) in zip(axes[0], results.items(), strict=True):
        ax.axhline(curves["ceiling"][0].all, color="black", linestyle=":", label="no budget, stops anywhere")
        for policy in POLICIES:
            ax.plot(budgets, [s.all for s in curves[policy]], marker="o", markersize=3, label=policy)
        ax.set(title=name, xlabel="MB of cache", xscale="log")
        ax.set_xticks(budgets, [str(b) for b in budgets], fontsize=7)
        ax.minorticks_off()
    axes[0][0].set_ylabel("share of prompt tokens reused")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a recorded trace; without it, three forms of one are generated")
    parser.add_argument("--bundle", type=Path, default=BUILT_IN, help="whose KV sizes to use")
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="in MB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    traces = {f: _trace.generate(f, options.seed) for f in _trace.FORMS} if options.trace is None else {}
    if options.trace is not None:
        traces[options.trace.name] = _trace.read(options.trace)
    geometry = geometry_of(options.bundle)
    results = {name: table(name, requests, geometry, options.budgets) for name, requests in traces.items()}
    if options.plot is not None:
        plot(options.plot, results, options.budgets)


if __name__ == "__main__":
    main()
