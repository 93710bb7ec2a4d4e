"""The prefix cache in the engine: what is reused, that it is right, that it is told truthfully."""

import os
import random

import pytest
from fakes import BOS, assert_nothing_is_taken, fake_engine, reply

from mimo_edge.cache import CacheOptions
from mimo_edge.device.system import Limit, System
from mimo_edge.engine import Engine
from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.kv.lineage import LEAST_GAIN

ROOM = CacheOptions(bytes=1 << 20)
PAGE = 64


def engine(**options):
    return fake_engine(**{"context": 512, "cache": ROOM} | options)


def rows_run(e):
    return sum(rows for [rows] in e.backend.runs)


def prompt(n, seed=0):
    return random.Random(seed).choices(range(97, 123), k=n)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 8, 63, 64, 65, 128, 129, 200])
def test_the_same_prompt_again_evaluates_one_row(n):
    e = engine()
    first, again = (reply(e, prompt(n), max_tokens=7) for _ in range(2))
    assert (first.cache.reused_tokens, again.cache.reused_tokens) == (0, n - 1)
    assert again.tokens == first.tokens == reply(fake_engine(context=512), prompt(n), max_tokens=7).tokens
    assert rows_run(e) == n + 6 + 1 + 6
    assert_nothing_is_taken(e)


@pytest.mark.parametrize("n", [1, 5, 60, 64, 131])
@pytest.mark.parametrize("replied", [1, 2, 9, 70])
def test_a_conversation_continues_where_its_reply_was_evaluated(n, replied):
    e = engine()
    first = reply(e, prompt(n), max_tokens=replied)
    longer = [*prompt(n), *first.tokens, *prompt(9, seed=1)]
    second = reply(e, longer, max_tokens=3)
    assert second.cache.reused_tokens == n + replied - 1  # the last token was sampled, not evaluated
    assert second.tokens == reply(fake_engine(context=512), longer, max_tokens=3).tokens


@pytest.mark.parametrize("back", range(9))
def test_a_prompt_that_parts_near_the_end_of_a_stored_one_goes_back_as_far_as_rings_reach(back):
    """Window 5 has a ring of 8 slots: 4 rows back, as sessions do."""
    e = engine()
    reply(e, prompt(100), max_tokens=1)
    other = [*prompt(100)[: 100 - back], 1, 2, 3]
    result = reply(e, other, max_tokens=9)
    assert result.cache.reused_tokens == (100 - back if back <= 4 else 0)
    assert result.tokens == reply(fake_engine(context=512), other, max_tokens=9).tokens


def test_where_prompts_part_the_second_one_leaves_a_snapshot_for_the_third():
    e = engine(chunk=16)
    shared = prompt(150)
    ends = [prompt(40, seed=s) for s in (1, 2, 3)]
    reused = [reply(e, shared + end, max_tokens=2).cache.reused_tokens for end in ends]
    assert reused == [0, 0, 150]


def test_prompts_that_share_too_little_leave_none():
    e = engine()
    for s in range(4):
        assert reply(e, [BOS, *prompt(40, seed=s)], max_tokens=1).cache.reused_tokens == 0
    assert [s.end for s in e.cache.prefix.have.snapshots.values()] == [41] * 4
    assert LEAST_GAIN > 1


def test_behind_a_mark_a_client_that_rewrites_its_prompts_finds_its_rows():
    """[history][world state][question], the state and the question being new each time."""
    e, history, reused = engine(), prompt(100), []
    for turn in range(4):
        asked = [*history, *prompt(50, seed=turn)]
        reused.append(reply(e, asked, max_tokens=2, marks=[len(history)]).cache.reused_tokens)
        history += prompt(30, seed=100 + turn)
    assert reused == [0, 0, 130, 160]  # the first turn cannot know; the second leaves a snapshot at its mark


def test_chunk_edges_move_to_where_a_snapshot_is_due():
    e = engine(chunk=16)
    reply(e, prompt(100), max_tokens=1)
    e.backend.runs.clear()
    reply(e, [*prompt(100)[:70], *prompt(40, seed=1)], max_tokens=1)
    assert [rows for [rows] in e.backend.runs] == [16, 16, 16, 16, 6, 16, 16, 8]


@pytest.mark.parametrize("stop", ["xyz", "z", "xyzzy", "w", "xyzzy w"])
def test_after_a_stop_string_the_conversation_goes_on_before_it(stop):
    """Rings go back over the four tokens of it that were evaluated; behind a longer one the prompt's end serves."""
    text = "a reply that ends xyzzy w"
    e = engine(rule=lambda tokens: (text.encode() * 9)[len(tokens) - 101] if len(tokens) > 100 else 0)
    first = reply(e, [BOS, *prompt(100)], max_tokens=60, stop=stop)
    assert first.text == text.split(stop)[0]
    kept = [BOS, *prompt(100), *first.text.encode()]
    second = reply(e, [*kept, *b"\nnext"], max_tokens=2)
    assert second.cache.reused_tokens == (len(kept) if len(stop) <= 5 else 101)


def test_tenants_share_nothing():
    e = engine()
    for tenant, reused in [("a", 0), ("b", 0), ("a", 99), ("b", 99), ("", 0)]:
        assert reply(e, prompt(100), max_tokens=2, tenant=tenant).cache.reused_tokens == reused


def test_a_session_takes_the_longer_of_its_own_rows_and_the_cached_ones():
    e = engine(sessions=2)
    with e.session() as session:
        reply(session, prompt(50), max_tokens=1)
        reply(e, prompt(120), max_tokens=1)
        assert reply(session, [*prompt(120), 1], max_tokens=1).cache.reused_tokens == 120
        assert reply(session, [*prompt(120), 1, 2], max_tokens=1).cache.reused_tokens == 121
        back = reply(session, [*prompt(50), 9, 9], max_tokens=4)
        assert back.cache.reused_tokens == 50
        assert back.tokens == reply(fake_engine(context=512), [*prompt(50), 9, 9], max_tokens=4).tokens


def test_what_a_ring_lacked_when_it_was_copied_the_copy_lacks_too():
    """A session goes back three rows and is stored; whoever goes on there and goes back himself may not go as far."""
    e, edited = engine(sessions=2), [*prompt(100)[:97], 1]
    with e.session() as a, e.session() as b:
        reply(a, prompt(100), max_tokens=1)
        assert reply(a, edited, max_tokens=1).cache.reused_tokens == 97
        assert reply(b, [*edited, 2], max_tokens=1).cache.reused_tokens == 98
        for back, reused in ((96, 96), (95, 0)):
            asked = [*prompt(100)[:back], 9, 9]
            result = reply(b, asked, max_tokens=3)
            assert result.tokens == reply(fake_engine(context=512), asked, max_tokens=3).tokens
            assert result.cache.reused_tokens == reused


def test_random_conversations_are_the_same_with_and_without_a_cache():
    """Edits, rewinds, branches and resends, in a budget that evicts, interleaved on two sequences."""
    r = random.Random(7)
    e, plain = engine(sessions=2, cache=CacheOptions(bytes=200_000), chunk=32), fake_engine(context=512, chunk=50)
    prompts = [prompt(20)]
    for _ in range(150):
        earlier = r.choice(prompts[-12:])
        kept = earlier if r.random() < 0.5 else earlier[: r.randint(0, len(earlier))]
        asked = [*kept, *r.choices(range(97, 123), k=r.randint(1, 60))][:400]
        n = r.randint(1, 12)
        result = reply(e, asked, max_tokens=n)
        assert result.tokens == reply(plain, asked, max_tokens=n).tokens
        prompts.append([*asked, *result.tokens])
        e.cache.prefix.check_integrity()
        assert result.cache.reused_tokens <= len(asked) - 1
    books = e.cache.prefix.books
    assert books.requests == 150 and books.hits > 50 and books.evicted["memory"] > 20
    assert rows_run(plain) - rows_run(e) == books.reused_tokens  # what it says is what was not evaluated


def test_with_all_of_it_reserved_nothing_is_allocated_later(monkeypatch):
    r, plain = random.Random(3), fake_engine(context=512)
    e = engine(cache=CacheOptions(bytes=300_000, reserve=300_000), chunk=40)
    monkeypatch.setattr("mimo_edge.kv.buffers.np.empty", lambda *a: pytest.fail("allocated"))
    for i in range(60):
        asked = [*prompt(r.choice([30, 150]), seed=i % 5), *prompt(r.randint(1, 90), seed=i)]
        assert reply(e, asked, max_tokens=4).tokens == reply(plain, asked, max_tokens=4).tokens
    books = e.cache.prefix.books
    assert books.evicted["memory"] > 10 and books.hits > 20
    e.cache.prefix.clear()
    assert e.cache._buffers.free_bytes == 300_000 // 64 * 64
    with pytest.raises(BadInputError, match="reserve 300,001 is out of range"):
        engine(cache=CacheOptions(bytes=300_000, reserve=300_001))


def test_an_error_in_a_step_leaves_nothing_that_a_later_request_could_reuse():
    e = engine(chunk=16)
    fail = e.backend.commit
    e.backend.commit = lambda accepted: (_ for _ in ()).throw(RuntimeError("half written"))
    with pytest.raises(RuntimeError):
        reply(e, prompt(100), max_tokens=1)
    e.backend.commit = fail
    assert not e.cache.prefix.have.snapshots
    assert reply(e, prompt(100), max_tokens=1).cache.reused_tokens == 0
    assert_nothing_is_taken(e)


def test_a_restore_that_fails_is_an_error_and_not_a_wrong_answer():
    e, expected = engine(sessions=2), reply(fake_engine(context=512), prompt(100), max_tokens=3).tokens
    with e.session() as session:
        reply(session, prompt(20), max_tokens=1)
        reply(e, prompt(100), max_tokens=1)
        write = e.backend.write_rows
        e.backend.write_rows = lambda *a: (_ for _ in ()).throw(RuntimeError("cut off"))
        with pytest.raises(RuntimeError):
            session.generate(prompt(100), max_tokens=1)
        assert session.sequence.tokens == []
        e.backend.write_rows = write
        assert reply(session, prompt(100), max_tokens=3).tokens == expected
        assert all(s.pins == 0 for s in e.cache.prefix.have.snapshots.values())


def test_a_budget_too_small_for_one_request_is_refused_with_the_numbers():
    with pytest.raises(BadInputError, match=r"cache of 9,000 bytes cannot hold one request of 512 tokens.*takes \d\d,"):
        engine(cache=CacheOptions(bytes=9_000))


@pytest.mark.parametrize("limit", [None, 300_000])
def test_a_budget_beyond_the_machine_s_memory_is_refused_with_the_numbers(monkeypatch, limit):
    monkeypatch.setattr(System, "cgroup_limit", lambda self: limit and Limit(limit, 0, "a container"))
    machine = limit or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with pytest.raises(BadInputError, match=rf"a cache of {machine + 1:,} bytes is more than .* memory of {machine:,}"):
        engine(cache=CacheOptions(bytes=machine + 1))
    engine(cache=CacheOptions(bytes=machine))


def test_the_least_budget_that_is_accepted_holds_a_whole_context():
    with pytest.raises(BadInputError) as refused:
        engine(cache=CacheOptions(bytes=1))
    need = int(str(refused.value).split("takes ")[1].split(":")[0].replace(",", ""))
    e = engine(cache=CacheOptions(bytes=need))
    reply(e, prompt(512), max_tokens=1)
    assert reply(e, prompt(512), max_tokens=1).cache.reused_tokens == 511


def test_a_backend_that_cannot_copy_rows_says_so():
    class Plain:
        name = "plain"

    e = engine()
    with pytest.raises(UnsupportedError, match="backend plain cannot use a prefix cache"):
        Engine(e.spec, e.text, Plain(), cache=ROOM)
