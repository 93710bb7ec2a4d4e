"""Everything that may happen to sequences, the prefix cache and its folder, in random order.

A row stands for all tokens up to it and for the weights that made it, and what was never written is poison: whatever
a step could see is compared before it runs. tests/kv/test_prefix_machine.py compares promises with brute force.
MIMO_EDGE_STEPS sets the number of steps: 2,000 by default.
"""

import tempfile
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import random_order
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from specs import mimo_spec

from mimo_edge.cache import CacheOptions, EngineCache
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.lineage import Lineage
from mimo_edge.kv.pools import KvPools
from mimo_edge.kv.sequence import Sequence
from mimo_edge.kv.snapshots import Geometry
from mimo_edge.kv.windows import first_visible
from mimo_edge.request import Request
from mimo_edge.spec import MAX_DRAFTS, AttentionSpec, LayerSpec

CONTEXT, POISON = 64, -1
SEEDS = st.integers(0, 2**32)
GEOMETRIES = {  # windows of the layers, None for a full one; page size
    "page does not divide the window": ((None, 4), 3),
    "window of one": ((None, 1), 4),
    "two windows": ((3, None, 7), 5),
    "no full layers": ((5,), 4),
    "only full layers": ((None,), 4),
    "page larger than the window": ((None, 2), 8),
    "window larger than the context": ((None, 80), 3),
}


def layout_of(windows, page_size):
    kinds = {f"kind {w}": AttentionSpec(1, 1, 2, 2, 2, 1e4, 1.0, window=w) for w in windows}
    layers = tuple(LayerSpec(kind, "dense") for kind in kinds)
    spec = replace(mimo_spec(), attention=kinds, layers=layers)
    return plan_layout(spec, CONTEXT, sequences=3, page_size=page_size)


def hashes(weights, tokens):
    """One number a row: of the weights and all tokens up to it."""
    rows, h = [], weights
    for t in tokens:
        h = (h * 1_000_003 + t + 1) % (1 << 61)
        rows.append(h)
    return rows


class Rows:
    """Pools of such rows."""

    row_format = "hashes"

    def __init__(self, layout):
        self._layout = layout
        sizes = {
            k.name: layout.sequences * k.slots if k.slots else layout.pages * layout.page_size for k in layout.row_kinds
        }
        self._pools = {name: np.full(n, POISON, np.int64) for name, n in sizes.items()}

    def at(self, slots, kind, first, last):
        p, ring, size = np.arange(first, last), self._layout.rings.get(kind), self._layout.page_size
        return slots.ring * ring + p % ring if ring else np.array(slots.pages)[p // size] * size + p % size

    def get(self, slots, kind, first, last):
        return self._pools[kind][self.at(slots, kind, first, last)]

    def put(self, slots, kind, first, rows):
        for p, row in enumerate(rows, first):
            self._pools[kind][self.at(slots, kind, p, p + 1)] = row

    def read_rows(self, slots, kind, first, last, out):
        rows = self.get(slots, kind, first, last)
        assert (rows != POISON).all(), "a row was stored that was never written"
        out.view(np.int64).reshape(last - first, -1)[:] = rows[:, None]

    def write_rows(self, slots, kind, first, last, rows):
        rows = rows.view(np.int64).reshape(last - first, -1)
        assert (rows == rows[:, :1]).all(), "parts of different rows"
        self.put(slots, kind, first, rows[:, 0])


@dataclass
class Live:
    """A sequence that is admitted; `prompt` of the request that it answers, if any."""

    sequence: Sequence
    tenant: str
    prompt: list[int] = field(default_factory=list)
    lineage: Lineage | None = None

    @property
    def left(self) -> int:
        return len(self.prompt) - len(self.sequence.tokens)


class Machine(RuleBasedStateMachine):
    @initialize(
        geometry=st.sampled_from(sorted(GEOMETRIES)),
        budget=st.sampled_from([1, 3, 30]),
        disk=st.sampled_from([None, 60_000, 1 << 20]),
        reserve=st.booleans(),
    )
    def start(self, geometry, budget, disk, reserve):
        self.folder = tempfile.TemporaryDirectory()
        self.layout, self.lock, self.weights = layout_of(*GEOMETRIES[geometry]), threading.RLock(), 0
        size = budget * Geometry.of(self.layout).most_bytes(CONTEXT)
        folder = None if disk is None else self.folder.name
        self.options = CacheOptions(size, size if reserve else 0, folder, disk or 0)
        self.prompts, self.committed = [[0, 1, 2]], set()
        self.open()

    def open(self):
        self.rows, self.pools, self.live = Rows(self.layout), KvPools(self.layout), []
        self.cache = EngineCache(self.rows, self.layout, f"weights {self.weights}", self.options, self.lock)

    @rule(seed=SEEDS)
    def converse(self, seed):
        """Several requests, as far as they get before something else happens."""
        r = Random(seed)
        for _ in range(4):
            self.ask(r)
            while r.random() < 0.9:
                r.choice([self.prefill, self.verify, self.finish])(r)

    def ask(self, r):
        """A prompt that is new, sent again, longer, edited or taken back; on a sequence of its own or a warm one."""
        idle = [x for x in self.live if x.lineage is None]
        if idle and r.random() < 0.6:
            live = r.choice(idle)
        elif self.pools.can_admit(CONTEXT):
            live = Live(Sequence(self.layout, self.pools.admit(CONTEXT)), r.choice(["a", "a", "b"]))
            self.live.append(live)
        else:
            return
        earlier = r.choice(self.prompts[-6:])
        kept = r.choice(
            [len(earlier), len(earlier), max(0, len(earlier) - r.randint(1, 9)), r.randint(0, len(earlier))]
        )
        live.prompt = (earlier[:kept] + r.choices([0, 1, 2], k=r.randint(0, 12)) or [0])[: CONTEXT - 6]
        marks = tuple(r.sample(range(1, CONTEXT), 2))
        live.lineage = self.cache.begin(live.sequence, Request(tuple(live.prompt), tenant=live.tenant, marks=marks))
        reused = live.lineage.reused
        assert reused < len(live.prompt) and live.sequence.tokens == live.prompt[:reused]
        if reused:
            assert (live.tenant, hashes(self.weights, live.prompt[:reused])[-1]) in self.committed

    def pick(self, r, condition):
        found = [x for x in self.live if x.lineage is not None and condition(x)]
        return [r.choice(found)] if found else []

    def prefill(self, r):
        for live in self.pick(r, lambda x: x.left > 0):
            n = min(live.left, live.lineage.rows(len(live.sequence.tokens), r.choice([1, 2, 5, 13, 64])))
            at = len(live.sequence.tokens)
            self.commit(live, live.prompt[at : at + n])

    def verify(self, r):
        """A step of 1 to K+1 rows, of which any number is accepted; none is an abort."""
        for live in self.pick(r, lambda x: x.left <= 0):
            room = min(r.randint(1, MAX_DRAFTS + 1), CONTEXT - len(live.sequence.tokens))
            self.commit(live, r.choices([0, 1, 2], k=r.randint(0, room)))

    def commit(self, live, tokens):
        start = len(live.sequence.tokens)
        rows = hashes(self.weights, live.sequence.tokens + tokens)
        for kind in self.layout.row_kinds:
            self.rows.put(live.sequence.slots, kind.name, start, rows[start:])
        live.sequence.append(tokens)
        self.committed |= {(live.tenant, h) for h in rows}
        if tokens and live.lineage.due(end := len(live.sequence.tokens)):
            self.cache.save(live.lineage, live.sequence, live.lineage.lasts(end))

    def finish(self, r):
        """The end of a reply, or a cancel anywhere; the sequence stays warm or goes."""
        for live in self.pick(r, lambda x: x.left <= 0 or r.random() < 0.2):
            self.cache.save(live.lineage, live.sequence, lasting=True)
            self.prompts.append(list(live.sequence.tokens) or [0])
            live.lineage = None
            if r.random() < 0.6:
                self.live.remove(live)
                self.pools.release(live.sequence.slots)

    @rule(
        seed=SEEDS, work=st.sampled_from(["evict", "press", "clear", "flush", "damage", "restart", "retrain", "clock"])
    )
    def upkeep(self, seed, work):
        with self.lock if work in ("evict", "press", "clear", "clock") else threading.Lock():
            getattr(self, work)(Random(seed))

    def evict(self, r):
        found = sorted((s for s in self.cache.prefix.have.snapshots.values() if not s.pins), key=lambda s: s.key)
        for s in r.sample(found, k=len(found) // 2):
            self.cache.prefix.evict(s, "memory")

    def press(self, r):
        self.cache.prefix.make_room(r.randint(0, 2 * self.cache.prefix.budget))

    def clear(self, r):
        self.cache.prefix.clear()

    def clock(self, r):
        self.cache.prefix.clock = r.choice([0, 10**6])

    def flush(self, r):
        self.cache.flush()
        if self.cache.disk is not None:
            on_disk = sum(-(-p.stat().st_size // 4096) * 4096 for p in self.files())
            assert on_disk <= self.cache.disk.folder.used <= self.cache.disk.budget  # damage() removes some unseen

    def files(self):
        return sorted(p for p in Path(self.folder.name).glob("*/*.*") if p.is_file())

    def damage(self, r):
        """Behind the cache's back; what memory holds goes, so that files are read."""
        self.cache.flush()
        for path in r.sample(self.files(), k=min(r.randint(0, 3), len(self.files()))):
            data = bytearray(path.read_bytes())
            data[r.randrange(len(data))] ^= 1 << r.randrange(8)
            path.unlink()
            if r.random() < 0.7:
                path.write_bytes(data[: r.choice([len(data), len(data), r.randrange(len(data))])])
        with self.lock:
            for s in [s for s in self.cache.prefix.have.snapshots.values() if s.in_memory and not s.pins]:
                self.cache.prefix.evict(s, "memory")

    def restart(self, r):
        self.cache.close()
        self.open()

    def retrain(self, r):
        """Other weights, or earlier ones again."""
        self.weights = r.randint(0, 2)
        self.restart(r)

    @invariant()
    def what_the_next_step_sees_is_right(self):
        for live in getattr(self, "live", []):
            n = len(live.sequence.tokens)
            rows = hashes(self.weights, live.sequence.tokens)
            for kind in self.layout.row_kinds:
                first = first_visible(n, kind.window)
                assert self.rows.get(live.sequence.slots, kind.name, first, n).tolist() == rows[first:], kind

    @invariant()
    def books_agree(self):
        if hasattr(self, "cache"):
            with self.lock:
                self.cache.prefix.check_integrity()
            self.pools.check_integrity()

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.close()
            assert not any(s.pins for s in self.cache.prefix.have.snapshots.values())
            self.folder.cleanup()


def test_all_operations_in_random_order():
    random_order.run(Machine, phases=(Phase.generate,))  # nothing to shrink: steps are made of seeds
