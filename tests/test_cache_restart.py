"""The prefix cache over restarts: what files serve afterwards, and what is written for it."""

import random
from pathlib import Path

import pytest
from cached import engine, expected, prompt, reused
from fakes import fake_engine, reply

from mimo_edge import Engine
from mimo_edge.cache import CacheOptions


def test_a_conversation_goes_on_after_a_restart(tmp_path):
    with engine(tmp_path) as e:
        first = reply(e, prompt(150), max_tokens=5).tokens
    longer = [*prompt(150), *first, *prompt(20, seed=1)]
    with engine(tmp_path) as e:
        assert reused(e, longer) == 154
        assert reused(e, longer) == len(longer) - 1  # loaded rows are in memory again, and so are the new ones
        assert e.cache.disk.counters["loaded"] == 1
    with engine(tmp_path) as e:
        assert reused(e, [*prompt(150)[:100], 1]) == 0  # no snapshot there
    with fake_engine(context=512) as e:
        assert reused(e, longer) == 0


@pytest.mark.parametrize("replied", [1, 4, 5, 60])
def test_a_prompt_sent_again_after_a_restart_evaluates_its_last_token_only(tmp_path, replied):
    """Behind a reply that outgrew the ring nothing but the prompt's own end serves it (window 5)."""
    with engine(tmp_path) as e:
        reused(e, prompt(150), replied)
    for _ in range(2):
        with engine(tmp_path) as e:
            assert reused(e, prompt(150), replied) == 149


def test_an_edited_last_message_after_a_restart_goes_on_behind_the_reply_before_it(tmp_path):
    with engine(tmp_path) as e:
        history = [*prompt(150), *reply(e, prompt(150), max_tokens=50).tokens]
        reused(e, [*history, *prompt(40, seed=1)], 20)
    with engine(tmp_path) as e:
        assert reused(e, [*history, *prompt(35, seed=1), *prompt(9, seed=2)], 20) == 199


def test_the_end_of_a_prompt_is_written_if_it_spares_more_than_a_window(tmp_path):
    with engine(tmp_path, window=30) as e:
        answered = prompt(100)
        for new, written in [(0, 2), (30, 1), (31, 2), (29, 1)]:
            before = e.cache.disk.counters["stored"]
            asked = [*answered, *prompt(new, seed=new)]
            rows = reply(e, asked, max_tokens=8)
            e.cache.flush()
            assert e.cache.disk.counters["stored"] - before == written, new
            assert len(asked) - rows.cache.reused_tokens == (new or 100)
            answered = [*asked, *rows.tokens[:-1]]


def test_with_all_of_it_reserved_rows_from_files_are_kept_there_too(tmp_path, monkeypatch):
    with engine(tmp_path) as e:
        asked = []
        for seed in range(8):
            asked.append([*prompt(200, seed), *reply(e, prompt(200, seed), max_tokens=5).tokens, 1])
            e.cache.flush()
    with engine(tmp_path, reserve=1 << 20) as e:
        monkeypatch.setattr("mimo_edge.kv.buffers.np.empty", lambda *a: pytest.fail("allocated"))
        for a in asked:
            assert reused(e, a) == 204
        assert e.cache.disk.counters["loaded"] == 8
        block, held = e.cache._buffers._block, e.cache.prefix.have
        rows = [s.data for s in held.snapshots.values() if s.in_memory]
        rows += [p.data for p in held.pages.values() if p.held]
        assert rows and all(r.base is block for r in rows)


def test_a_new_model_misses_and_old_entries_make_room_for_it(tmp_path):
    with engine(tmp_path) as e:
        reused(e, prompt(150))
    other = CacheOptions(bytes=1 << 20, folder=tmp_path, disk_bytes=3 * 4096)
    e = fake_engine(context=512)
    with Engine(e.spec, e.text, e.backend, cache=other, fingerprint="retrained") as new:
        assert reply(new, prompt(150), max_tokens=5).cache.reused_tokens == 0
        new.cache.flush()
        assert new.cache.disk.folder.used <= 3 * 4096
        assert {Path(n).parent.name for n in new.cache.disk.folder.sizes} == {new.cache.disk._model}


def test_other_rings_are_another_model(tmp_path):
    with engine(tmp_path) as e:
        reused(e, prompt(150))
    with engine(tmp_path, window=6) as e:
        assert reply(e, prompt(150), max_tokens=1).cache.reused_tokens == 0
    with engine(tmp_path, context=256) as e:  # a shorter context with the same rings shares
        assert reply(e, [*prompt(150), *expected(prompt(150)), 1], max_tokens=1).cache.reused_tokens == 154


def test_uses_and_the_clock_survive_a_restart(tmp_path):
    with engine(tmp_path) as e:
        asked = prompt(100)
        for _ in range(4):
            asked = [*asked, *reply(e, asked, max_tokens=5).tokens, 1]
        clock = e.cache.prefix.clock
    with engine(tmp_path) as e:
        assert e.cache.prefix.clock == clock == 4
        tip = max(e.cache.prefix.have.snapshots.values(), key=lambda s: s.end)
        assert tip.count >= 3 and tip.used == 4
        assert min(s.count for s in e.cache.prefix.have.snapshots.values()) == 0


def test_random_conversations_over_restarts_are_the_same_as_without_a_cache(tmp_path):
    r, prompts, total = random.Random(11), [prompt(20)], 0
    for _ in range(6):
        with engine(tmp_path, bytes=200_000, disk_bytes=400_000, sessions=2, chunk=40) as e:
            for _ in range(25):
                earlier = r.choice(prompts[-12:])
                kept = earlier if r.random() < 0.6 else earlier[: r.randint(0, len(earlier))]
                asked = [*kept, *r.choices(range(97, 123), k=r.randint(1, 60))][:400]
                n = r.randint(1, 9)
                total += reused(e, asked, n)
                prompts.append([*asked, *expected(asked, n)])
                e.cache.prefix.check_integrity()
                assert e.cache.disk.folder.used <= 400_000
    assert total > 5000
