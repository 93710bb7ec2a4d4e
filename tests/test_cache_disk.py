"""The prefix cache with a folder: other processes, damage while it is in use, kill -9."""

import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from cached import engine, expected, prompt, reused
from fakes import assert_nothing_is_taken, fake_engine, reply
from specs import ALL
from tiny_bundle import write_bundle

from mimo_edge import Engine
from mimo_edge.cache import CacheOptions
from mimo_edge.errors import BadInputError


def test_a_folder_that_cannot_be_used_costs_the_files_and_nothing_else(tmp_path, caplog):
    taken = tmp_path / "taken"
    taken.write_text("a file")
    for folder in (taken, taken / "below", Path("/dev/null")):
        with engine(folder) as e:
            first = reply(e, prompt(150), max_tokens=5).tokens
            assert reused(e, [*prompt(150), *first, 1]) == 154, "memory serves"
        assert f"cache folder {folder} is not used" in caplog.text
    assert taken.read_text() == "a file"


def test_without_room_in_memory_files_serve_every_request(tmp_path):
    least = engine(tmp_path).cache._geometry.most_bytes(512)
    with engine(tmp_path, bytes=least + 8 * 20_000) as e:  # bookkeeping of eight, rows of hardly more than one
        for seed in range(8):
            assert reused(e, prompt(400, seed)) == 0
            e.cache.flush()  # what waits to be written is pinned, and memory holds one of these
        for _ in range(2):
            for seed in range(8):
                answered = [*prompt(400, seed), *expected(prompt(400, seed)), 1]
                assert reused(e, answered) == 404
                e.cache.prefix.check_integrity()
        assert e.cache.disk.counters["loaded"] >= 8


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_a_folder_without_a_name_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInputError, match=r"cache folder '.*' is not a name: give --cache-dir a folder, `\.` for"):
        engine(name)
    assert not list(tmp_path.iterdir())
    with engine(".") as e:
        assert e.cache.disk.folder is not None


def test_another_process_s_entries_are_found_without_a_restart(tmp_path):
    with engine(tmp_path) as a, engine(tmp_path) as b:
        answered = [*prompt(150), *reply(a, prompt(150), max_tokens=5).tokens, 1]
        a.cache.flush()
        assert reused(b, answered) == 154
        with b.cache.disk.folder.locked():
            b.cache.disk.folder.clear()
        assert reused(a, answered) == 154  # memory has it still
        a.cache.flush()
        with b.cache.disk.folder.locked():
            b.cache.disk.folder.clear()
        a.cache.prefix.clear()
        assert reused(a, answered) == 0


@pytest.mark.parametrize("what", ["snapshot", "page"])
@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
@pytest.mark.parametrize("when", ["before a start", "while open"])
def test_damage_is_a_miss_or_a_shorter_hit_and_never_a_wrong_answer(tmp_path, what, how, when, caplog):
    caplog.set_level(logging.INFO, "mimo_edge")
    with engine(tmp_path) as e:
        first = reply(e, prompt(150), max_tokens=5).tokens
        second = [*prompt(150), *first, *prompt(60, seed=1)]
        third = [*second, *reply(e, second, max_tokens=5).tokens, 1]
    e = engine(tmp_path) if when == "while open" else None
    for path in tmp_path.rglob(f"*.{what}"):
        if what == "page" or path.stat().st_size > 700:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.unlink()
            if how != "delete":
                path.write_bytes(data if how == "flip" else data[: len(data) // 2])
    with e or engine(tmp_path) as e:
        assert reused(e, third) == 0
        told = [r.message for r in caplog.records if str(tmp_path) in r.message]
        assert told and len(set(told)) == len(told)  # said, and not again and again
        assert sum(n for k, n in e.cache.stats()["counters"].items() if "trouble: lost" in k or "dropped" in k) > 0
        e.cache.prefix.check_integrity()
        e.cache.flush()
        assert reused(e, third) == len(third) - 1
    with engine(tmp_path) as e:
        assert e.cache.disk.verify()[1] == 0 and reused(e, [*third, *expected(third), 2]) == len(third) + 4


def test_a_file_is_kept_while_its_copy_in_memory_is_hot(tmp_path):
    with engine(tmp_path, disk_bytes=60_000) as e:
        hot = [*prompt(150), *reply(e, prompt(150), max_tokens=5).tokens, 1]
        for seed in range(1, 30):
            reply(e, prompt(150, seed), max_tokens=5)
            assert reply(e, hot, max_tokens=1).cache.reused_tokens >= 154
            e.cache.flush()
        assert e.cache.stats()["counters"]["disk, evicted: no room"] > 10
    with engine(tmp_path) as e:
        assert reused(e, hot) >= 154


def test_more_than_the_disk_has_is_not_used_and_said_once(tmp_path, caplog):
    with engine(tmp_path, disk_bytes=1 << 59) as e:
        reused(e, prompt(150))
        free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
        assert e.cache.stats()["tiers"]["disk"]["budget"] < free * 1.5 + (1 << 30)
    [told] = [r.message for r in caplog.records]
    assert f"cache folder {tmp_path}: of {1 << 59:,} bytes only {e.cache.disk.budget:,} are used" in told


def test_requests_are_not_recorded_in_a_pipe(tmp_path, caplog):
    os.mkfifo(tmp_path / "trace.jsonl")
    with fake_engine(context=512, cache=CacheOptions(bytes=1 << 20, folder=tmp_path, record=True)) as e:
        assert reused(e, prompt(150)) == 0
    assert [r.message for r in caplog.records] == [
        f"requests are not recorded in {tmp_path}: No such device or address"
    ]


def test_a_failing_disk_costs_nothing_but_the_files(tmp_path, monkeypatch):
    with engine(tmp_path) as e:
        monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        for _ in range(3):
            answered = [*prompt(150), *reply(e, prompt(150), max_tokens=5).tokens, 1]
            e.cache.flush()
        assert reused(e, answered) == 154
        assert not e.cache.disk.snapshots and e.cache.disk.counters["trouble: cannot be written"] >= 1
    assert_nothing_is_taken(e)


def test_threads_that_share_memory_for_one_prompt_and_a_folder_get_what_each_gets_alone(tmp_path):
    least = engine(None).cache._geometry.most_bytes(512)
    wrong = []

    def work(e, seed):
        try:
            converse(e, random.Random(seed), prompt(5, seed))
        except BaseException as error:
            wrong.append(error)

    def converse(e, r, history):
        for _ in range(12):
            result = reply(e, history, max_tokens=4)
            if result.tokens != expected(history, 4):
                wrong.append(history)
            history = [*history, *result.tokens, *prompt(r.randint(1, 60), r.random())][:400]

    with engine(tmp_path, bytes=4 * least, disk_bytes=200_000, sessions=3, chunk=16) as e:
        threads = [threading.Thread(target=work, args=(e, s)) for s in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        e.cache.flush()
        e.cache.prefix.check_integrity()
        assert not any(s.pins for s in e.cache.prefix.have.snapshots.values())
        assert e.cache.disk.folder.used <= 200_000
    assert not wrong
    assert_nothing_is_taken(e)


KILLED = """
    import random, sys
    from pathlib import Path
    from mimo_edge import Engine
    from mimo_edge.cache import CacheOptions
    bundle, folder, seed = sys.argv[1:]
    r = random.Random(int(seed))
    cache = CacheOptions(bytes=4 << 20, folder=Path(folder), disk_bytes=4 << 20)
    with Engine.open(bundle, "onnxruntime-float", threads=1, cache=cache) as engine:
        while True:
            history = r.choices(range(256), k=30)
            for turn in range(4):
                reply = engine.generate(history, max_tokens=6)
                list(reply)
                if turn < 2:
                    engine.cache.flush()
                history = [*history, *reply.result.tokens, *r.choices(range(256), k=12)]
                print(*history[:-12], flush=True)
"""


def test_after_kill_9_in_the_middle_of_writing_answers_are_right_and_rows_are_reused(tmp_path):
    bundle, folder = tmp_path / "bundle", tmp_path / "cache"
    write_bundle(bundle, ALL["two-windows"])
    asked = []
    for seed in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(KILLED), bundle, folder, str(seed)],
            stdout=subprocess.PIPE,
            text=True,
        )
        lines = [child.stdout.readline() for _ in range(12)]
        time.sleep(random.Random(seed).random() * 0.1)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        asked += [list(map(int, line.split())) for line in lines[3::4]]
    cache = CacheOptions(bytes=4 << 20, folder=folder, disk_bytes=4 << 20)
    with (
        Engine.open(bundle, "onnxruntime-float", threads=1) as plain,
        Engine.open(bundle, "onnxruntime-float", threads=1, cache=cache) as cached,
    ):
        assert cached.cache.disk.verify()[1] == 0
        assert cached.cache.disk.folder.used <= 4 << 20
        total = 0
        for history in asked:
            results = [reply(e, [*history, 1, 2], max_tokens=8) for e in (plain, cached)]
            assert results[0].tokens == results[1].tokens
            total += results[1].cache.reused_tokens
        assert total > 0.4 * sum(map(len, asked))  # the turns that were flushed, at least
