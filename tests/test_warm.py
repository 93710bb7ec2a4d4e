"""Requests with a session id: rows that stay in place, two at once, room for others."""

import random
import threading

from fakes import fake_engine, reply

from mimo_edge.cache import CacheOptions


def prompt(n, seed=0):
    return random.Random(seed).choices(range(97, 123), k=n)


def test_the_next_request_of_a_session_finds_its_rows_in_place():
    engine = fake_engine(context=256)
    first = reply(engine, prompt(50), max_tokens=5, session_id="a")
    longer = [*prompt(50), *first.tokens, *prompt(5, seed=1)]
    second = reply(engine, longer, max_tokens=5, session_id="a")
    assert second.cache.reused_tokens == 54
    assert second.tokens == reply(fake_engine(context=256), longer, max_tokens=5).tokens
    assert engine.pools.rings.used == 1


def test_sessions_of_two_tenants_are_two():
    engine = fake_engine(context=256, sessions=2)
    for tenant in ("a", "b"):
        assert reply(engine, prompt(50), max_tokens=5, session_id="x", tenant=tenant).cache.reused_tokens == 0


def test_room_is_given_up_for_others_the_longest_unused_first():
    engine = fake_engine(context=256, sessions=2)
    for name in ("a", "b", "a", "c"):
        reply(engine, prompt(50, seed=ord(name)), max_tokens=2, session_id=name)
    assert reply(engine, prompt(50, seed=ord("a")), max_tokens=2, session_id="a").cache.reused_tokens == 49
    reply(engine, prompt(20), max_tokens=2)
    with engine.session(), engine.session():
        engine.pools.check_integrity()
    assert reply(engine, prompt(50, seed=ord("a")), max_tokens=2, session_id="a").cache.reused_tokens == 0


def test_two_at_once_with_one_id_are_right_and_the_last_to_finish_stays():
    engine = fake_engine(context=256, sessions=2, cache=CacheOptions(bytes=1 << 20))
    start = reply(engine, prompt(50), max_tokens=5, session_id="a")
    asked = [[*prompt(50), *start.tokens, *prompt(30, seed=s)] for s in (1, 2)]
    running = [engine.generate(a, max_tokens=n, session_id="a") for a, n in zip(asked, (4, 8), strict=True)]
    assert [g._reused for g in running] == [54, 54]  # the second restores into a ring of its own
    while any(g.finish_reason is None for g in running):
        for g in running:
            next(g, None)
    for g, a, n in zip(running, asked, (4, 8), strict=True):
        assert g.result.tokens == reply(fake_engine(context=256), a, max_tokens=n).tokens
    assert engine.pools.rings.used == 1
    engine.cache.prefix.clear()
    assert (
        reply(engine, [*asked[1], *running[1].result.tokens, 1], max_tokens=1, session_id="a").cache.reused_tokens == 92
    )


def test_threads_that_share_ids_get_what_each_gets_alone():
    engine = fake_engine(context=256, sessions=3, chunk=7, cache=CacheOptions(bytes=200_000))
    wrong = []

    def work(seed):
        r, history = random.Random(seed), prompt(5, seed)
        for _ in range(12):
            result = reply(engine, history, max_tokens=4, session_id=r.choice("ab"))
            if result.tokens != reply(fake_engine(context=256), history, max_tokens=4).tokens:
                wrong.append(history)
            history = [*history, *result.tokens, *prompt(9, r.random())][-200:]

    threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    engine.cache.prefix.check_integrity()
    engine.pools.check_integrity()
