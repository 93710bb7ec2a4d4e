"""What the prefix cache keeps and what goes; the state machine beside this file proves that it is right."""

import random
import tracemalloc

import pytest

from mimo_edge.kv.eviction import HALF_LIFE, LeastRecent, PathFrequency, PlainFrequency, aged
from mimo_edge.kv.keys import as_tokens
from mimo_edge.kv.layout import RowKind
from mimo_edge.kv.lineage import LEAST_GAIN, Lineage
from mimo_edge.kv.prefix import PrefixCache
from mimo_edge.kv.snapshots import Geometry

GEOMETRY = Geometry(16, (RowKind("full", None, None, 2000), RowKind("window", 8, 11, 9000)))
ROOT = b"root"


def prompt(n, seed=0):
    return random.Random(seed).choices(range(50_000), k=n)


def request(cache, tokens, reply=5, marks=()):
    """One request as the engine makes it; (reused tokens, the rows behind its reply)."""
    match = cache.match(ROOT, as_tokens(tokens))
    cache.record(match.snapshot, match.tokens, len(tokens))
    if match.snapshot is not None:
        cache.release(match.snapshot)
    lineage = Lineage(cache, ROOT, match, match.tokens, len(tokens), marks)
    rows = as_tokens([*tokens, *prompt(reply, seed=tokens[-1])])
    for end in [*lineage.stops, len(rows)]:
        lineage.save(rows[:end], GEOMETRY.firsts(end), lambda pieces: None)
        cache.check_integrity()
    return match.tokens, rows.tolist()


def counts(cache):
    return {s.end: s.count for s in cache.have.snapshots.values()}


def test_a_tip_inherits_the_uses_of_its_path_and_the_one_before_drops_to_zero():
    cache = PrefixCache(GEOMETRY, 1 << 30)
    _, rows = request(cache, prompt(40))
    for turn in range(3):
        _, rows = request(cache, [*rows, *prompt(20, seed=turn)])
    by_end = counts(cache)
    tip = max(by_end)
    assert by_end.pop(tip) == pytest.approx(4, rel=0.15) and set(by_end.values()) == {0.0}


def test_a_junction_keeps_its_uses_and_each_way_on_starts_anew():
    cache = PrefixCache(GEOMETRY, 1 << 30)
    for seed in range(6):
        request(cache, [*prompt(100), *prompt(30, seed=100 + seed)])
    assert counts(cache)[100] == pytest.approx(5, rel=0.2)
    assert {c for end, c in counts(cache).items() if end != 100} <= {0.0, 1.0}


def test_where_a_client_rewrites_its_prompts_the_mark_supersedes_the_one_before():
    cache, history = PrefixCache(GEOMETRY, 1 << 30), prompt(100)
    for turn in range(5):
        request(cache, [*history, *prompt(40, seed=turn)], marks=[len(history)])
        history += prompt(30, seed=100 + turn)
    live = {end for end, c in counts(cache).items() if c > 0}
    assert 220 in live and not live & {130, 160, 190}


def test_a_burst_of_one_kind_does_not_push_out_what_is_used_steadily():
    """Requests of which none comes back, three times the cache, between those of two conversations."""
    share = {}
    for policy in (PathFrequency, LeastRecent):
        one = 60 * 2000 + 2 * 11 * 9000
        cache, reused, total = PrefixCache(GEOMETRY, 12 * one, policy()), 0, 0
        rows = [request(cache, prompt(200, seed=s))[1] for s in (1, 2)]
        for i in range(60):
            for steady in (0, 1) if i % 20 == 19 else ():
                n, rows[steady] = request(cache, [*rows[steady], *prompt(5, seed=i)])
                reused, total = reused + n, total + len(rows[steady])
            request(cache, prompt(60, seed=1000 + i))
        share[policy] = reused / total
    assert share[PathFrequency] > 0.9 > 0.1 > share[LeastRecent]


def test_the_published_rule_shields_five_uses_until_they_idle():
    cache = PrefixCache(GEOMETRY, 1 << 30, PlainFrequency(floor=5, idle=300))
    request(cache, prompt(40), reply=1)
    for _ in range(5):
        request(cache, prompt(40), reply=1)
    request(cache, prompt(50, seed=1), reply=1)
    used, fresh = sorted(cache.have.snapshots.values(), key=lambda s: s.end)[::3][:2]
    assert cache.rank(used) > cache.rank(fresh)
    cache.clock += 301
    assert cache.rank(used)[0] < 1e6


def test_counts_age_and_a_clock_that_goes_backward_changes_nothing():
    assert aged(8.0, 2 * HALF_LIFE) == 2.0 and aged(8.0, 0) == aged(8.0, -5) == 8.0


def test_what_is_promised_stays_and_a_full_cache_refuses():
    cache = PrefixCache(GEOMETRY, GEOMETRY.most_bytes(64))
    request(cache, prompt(60), reply=1)
    match, refused = cache.match(ROOT, as_tokens(prompt(60))), cache.books.refused
    for seed in range(3):
        assert request(cache, prompt(60, seed=10 + seed))[0] == 0
    assert cache.books.refused == refused + 6 and match.snapshot.in_memory
    cache.release(match.snapshot)
    request(cache, prompt(60, seed=20), reply=1)
    assert not match.snapshot.in_memory


def test_an_entry_larger_than_the_budget_is_refused_and_evicts_nothing():
    cache = PrefixCache(GEOMETRY, GEOMETRY.most_bytes(64))
    request(cache, prompt(60), reply=1)
    before = set(cache.have.snapshots)
    request(cache, prompt(900, seed=1))
    assert set(cache.have.snapshots) == before and not cache.books.evicted


def test_a_copy_that_fails_changes_nothing():
    cache = PrefixCache(GEOMETRY, 1 << 30)
    with pytest.raises(OSError):
        cache.insert(ROOT, as_tokens(prompt(40)), GEOMETRY.firsts(40), lambda pieces: (_ for _ in ()).throw(OSError))
    cache.check_integrity()
    assert cache.have.bytes_used == 0 and cache.match(ROOT, as_tokens(prompt(40))).tokens == 0


def test_short_gains_get_no_snapshot_of_their_own():
    cache = PrefixCache(GEOMETRY, 1 << 30)
    for seed in range(3):
        request(cache, [*prompt(LEAST_GAIN - 1), *prompt(30, seed=50 + seed)], reply=1)
    assert LEAST_GAIN - 1 not in counts(cache)
    for seed in range(3):
        request(cache, [*prompt(LEAST_GAIN, seed=9), *prompt(30, seed=70 + seed)], reply=1)
    assert LEAST_GAIN in counts(cache)


@pytest.mark.parametrize("page_size", [16, 64])
def test_the_budget_counts_the_bookkeeping_too(page_size):
    """What Python really takes for it is at most what is accounted, and not wildly less."""
    cache = PrefixCache(Geometry(page_size, (RowKind("full", None, None, 1),)), 1 << 30)
    cache.insert(ROOT, as_tokens(prompt(50, seed=77)), (0,), lambda pieces: None)
    tracemalloc.start()
    before, accounted = tracemalloc.get_traced_memory()[0], cache.have.index_bytes
    for seed in range(60):
        tokens = as_tokens([*prompt(300), *prompt(500, seed=seed + 1)])
        cache.insert(ROOT, tokens, (0,), lambda pieces: None)
    took = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert took <= cache.have.index_bytes - accounted <= 4 * took
