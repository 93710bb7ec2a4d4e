"""All operations of the prefix cache in random order, against brute force.

A row of position p stands for everything that it depends on, tokens[:p+1], so a promise that mixes up prefixes,
windows or tenants cannot pass. MIMO_EDGE_STEPS sets the number of steps: 2,000 by default, 200,000 in a slow run.
"""

from random import Random

import random_order
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from mimo_edge.kv.eviction import LeastRecent, PathFrequency, PlainFrequency
from mimo_edge.kv.keys import as_tokens
from mimo_edge.kv.layout import RowKind
from mimo_edge.kv.prefix import PrefixCache
from mimo_edge.kv.snapshots import Geometry
from mimo_edge.kv.windows import first_visible

SEEDS = st.integers(0, 2**32)
ROOT = st.sampled_from([b"tenant a", b"tenant a", b"tenant b"])

FULL = RowKind("full", None, None, 40)


def window(w, name="window", drafts=3):
    return RowKind(name, w, w + drafts, 24)


GEOMETRIES = {
    "page-does-not-divide-window": Geometry(3, (FULL, window(4))),
    "window-of-one": Geometry(4, (FULL, window(1))),
    "two-windows": Geometry(5, (window(3), FULL, window(7, "wide"))),
    "no-full-layers": Geometry(4, (window(5),)),
    "only-full-layers": Geometry(4, (FULL,)),
    "page-larger-than-window": Geometry(8, (FULL, window(2))),
    "window-larger-than-prompts": Geometry(3, (FULL, window(40))),
    "no-slack": Geometry(3, (FULL, window(4, drafts=-1))),
}


def rows_of(tokens):
    """fill() over a sequence that holds `tokens`."""
    return lambda pieces: {(p.kind, i): tuple(tokens[: i + 1]) for p in pieces for i in range(p.first, p.last)}


def shared(a, b):
    """Length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Machine(RuleBasedStateMachine):
    @initialize(
        geometry=st.sampled_from(sorted(GEOMETRIES)),
        budget=st.sampled_from([10_000, 60_000, 400_000]),
        policy=st.sampled_from([PathFrequency, LeastRecent, PlainFrequency]),
    )
    def start(self, geometry, budget, policy):
        self.g = GEOMETRIES[geometry]
        self.cache = PrefixCache(self.g, budget, policy())
        self.prompts = [[0, 1, 2]]
        self.promises = []
        self.files = {}  # snapshot key -> (root, tokens, firsts, own rows, page rows)

    def brute_force(self, root, prompt):
        best = 0
        for s in self.cache.have.snapshots.values():
            stored = s.node.tokens().tolist()
            p = min(shared(stored, prompt), len(prompt) - 1)
            if s.root == root and self.g.lowest(s.firsts) <= p:
                best = max(best, p)
        return best

    @rule(seed=SEEDS, root=ROOT)
    def sends_it_again(self, seed, root):
        self.request(root, Random(seed).choice(self.prompts[-4:]), Random(seed))

    @rule(seed=SEEDS, root=ROOT)
    def continues(self, seed, root):
        r = Random(seed)
        self.request(root, self.prompts[-1] + r.choices([0, 1], k=r.randint(1, 9)), r)

    @rule(seed=SEEDS, root=ROOT)
    def goes_back(self, seed, root):
        """A prompt that begins like an earlier one and parts from it near its end, or anywhere."""
        r = Random(seed)
        earlier = r.choice(self.prompts)
        kept = max(0, len(earlier) - r.randint(0, 9)) if r.random() < 0.7 else r.randint(0, len(earlier))
        self.request(root, earlier[:kept] + r.choices([0, 1, 2], k=r.randint(1, 9)), r)

    def request(self, root, prompt, r):
        """Matches, takes snapshots on the way as the engine does, and keeps the promise for a while."""
        prompt = prompt[:70]
        self.prompts = [*self.prompts[-20:], prompt]
        match = self.cache.match(root, as_tokens(prompt))
        assert match.tokens == self.brute_force(root, prompt)
        assert match.tokens <= len(prompt) - 1 and (match.snapshot is None) == (match.tokens == 0)
        if match.snapshot is not None:
            self.promises.append((root, prompt, match))
            self.check_promise(root, prompt, match)
        self.cache.record(match.snapshot, match.tokens, len(prompt))
        for end in sorted({match.parts_at, len(prompt)} - {0}):
            done, lost = prompt[:end], r.choice([0, 0, 1, 3, 50])
            firsts = tuple(min(end, max(0, end - k.slots + lost)) if k.slots else 0 for k in self.g.kinds)
            stored = self.cache.insert(root, as_tokens(done), firsts, rows_of(done), match.snapshot)
            if stored is not None:
                assert stored.in_memory and stored.end == end and stored.lowest <= self.g.lowest(firsts)
        if match.snapshot is not None and r.random() < 0.7:
            self.promises.pop()
            self.cache.release(match.snapshot)

    def check_promise(self, root, prompt, match):
        s, p = match.snapshot, match.tokens
        if not s.in_memory:
            assert s.on_disk
            return
        rows = dict(s.data)
        for page in s.pages:
            rows |= page.data
        assert s.root == root
        for k in self.g.kinds:
            need = 0 if k.window is None else first_visible(p, k.window)
            for i in range(need, p):
                assert rows[k.name, i] == tuple(prompt[: i + 1]), (k, i)

    @invariant()
    def promises_hold(self):
        for root, prompt, match in getattr(self, "promises", []):
            self.check_promise(root, prompt, match)

    @invariant()
    def books_agree(self):
        if hasattr(self, "cache"):
            self.cache.check_integrity()

    @precondition(lambda self: self.promises)
    @rule(data=st.data())
    def end_promise(self, data):
        i = data.draw(st.integers(0, len(self.promises) - 1))
        self.cache.release(self.promises.pop(i)[2].snapshot)

    @rule(
        seed=SEEDS,
        work=st.sampled_from(["store", "store", "load", "load", "lose", "evict", "press", "clear", "restart"]),
    )
    def upkeep(self, seed, work):
        getattr(self, work)(Random(seed))

    def pick(self, r, condition):
        keys = sorted(s.key for s in self.cache.have.snapshots.values() if condition(s))
        return [self.cache.have.snapshots[r.choice(keys)]] if keys else []

    def store(self, r):
        """Writes a snapshot to a file."""
        for s in self.pick(r, lambda s: s.in_memory and not s.on_disk):
            self.files[s.key] = (s.root, s.node.tokens(), s.firsts, s.data, {p.index: p.data for p in s.pages})
            s.on_disk = True

    def load(self, r):
        for s in self.pick(r, lambda s: s.on_disk and not s.in_memory and s.firsts == self.files[s.key][2]):
            assert self.cache.load(s, *self.files[s.key][3:]) == s.in_memory

    def lose(self, r):
        """A file is gone."""
        for s in self.pick(r, lambda s: s.on_disk and (s.in_memory or not s.pins)):
            del self.files[s.key]
            self.cache.unstore(s)

    def evict(self, r):
        for s in self.pick(r, lambda s: not s.pins):
            self.cache.evict(s, "memory")

    def press(self, r):
        cost = r.randint(0, 2 * self.cache.budget)
        if self.cache.make_room(cost):
            assert self.cache.have.bytes_used + cost <= self.cache.budget

    def clear(self, r):
        if r.random() < 0.2:
            self.cache.clear()
            pinned = {m.snapshot.key for _, _, m in self.promises}
            assert {s.key for s in self.cache.have.snapshots.values()} == pinned

    def restart(self, r):
        """Only files survive."""
        for _, _, match in self.promises:
            self.cache.release(match.snapshot)
        self.promises = []
        self.cache = PrefixCache(self.g, self.cache.budget, self.cache.policy, self.cache.clock)
        for root, tokens, firsts, _, _ in self.files.values():
            known = self.cache.index(root, tokens, firsts, 1.0, 0)
            assert known is None or (known.on_disk and not known.in_memory)

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for _, _, match in self.promises:
            self.cache.release(match.snapshot)
        self.cache.clear()
        have = self.cache.have
        assert not have.pages and not have.snapshots and have.bytes_used == 0 and not have._trees


def test_all_operations_in_random_order():
    random_order.run(Machine)
