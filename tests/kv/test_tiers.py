"""The folder of cached rows: what damage, other processes, full disks and wrong clocks do to it."""

import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading

import pytest
from tiers import DAY, is_right, open_tier, put, tokens

from mimo_edge.kv import files, folder, usage
from mimo_edge.kv.keys import root_key


@pytest.mark.parametrize("n", [1, 7, 8, 9, 30])
def test_what_was_stored_is_there_after_a_start(tmp_path, n):
    put(open_tier(tmp_path), tokens(n))
    tier = open_tier(tmp_path)
    [stored] = tier.snapshots.values()
    assert stored.tokens.tolist() == tokens(n) and stored.firsts == (0, 3) and stored.root == b"root"
    assert is_right(tier, stored)


def test_snapshots_share_the_files_of_their_common_pages(tmp_path):
    tier = open_tier(tmp_path)
    put(tier, tokens(20))
    before = tier.counters["written bytes"]
    put(tier, [*tokens(17), 1, 2, 3])
    assert len(list(tmp_path.rglob("*.page"))) == 2
    assert tier.counters["written bytes"] - before == 8192  # the new snapshot alone


def damage(path, how, rng):
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif how == "zeroed":
        path.write_bytes(bytes(len(data)))
    elif how == "flipped":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif how == "longer":
        path.write_bytes(data + b"x")
    elif how == "another":
        others = [p for p in path.parent.iterdir() if p != path and p.suffix == path.suffix]
        shutil.copy(others[0], path)
    elif how == "deleted":
        path.unlink()
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("how", ["truncated", "zeroed", "flipped", "longer", "another", "deleted", "a folder"])
@pytest.mark.parametrize("suffix", [".page", ".snapshot"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_damaged_file_is_a_miss_and_goes_and_the_rest_stays(tmp_path, how, suffix, restart, caplog):
    rng = random.Random(f"{how}{suffix}{restart}")
    tier = open_tier(tmp_path)
    victim, other = put(tier, tokens(20)), put(tier, tokens(20, seed=1))
    for attempt in range(5 if how in ("truncated", "flipped") else 1):
        victim = put(tier, tokens(20)) or victim
        path = tmp_path / tier._model / (victim.name if suffix == ".snapshot" else victim.pages[attempt % 2])
        damage(path, how, rng)
        reader = open_tier(tmp_path) if restart else tier
        if victim.name in reader.snapshots:
            assert reader.load(victim) is None
        assert victim.name not in reader.snapshots
        assert is_right(reader, other)
        if how != "a folder":
            assert victim.name not in open_tier(tmp_path).snapshots
            tier = open_tier(tmp_path)
            assert put(tier, tokens(20)) is not None and is_right(tier, victim)


def test_every_single_flipped_byte_of_a_small_entry_is_noticed(tmp_path):
    tier = open_tier(tmp_path)
    stored = put(tier, tokens(3), own=40)
    path = tmp_path / tier._model / stored.name
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(files.Damaged):
            files.read(path)


def test_the_budget_holds_after_every_store_and_the_least_useful_goes(tmp_path):
    tier, rng = open_tier(tmp_path, budget=120_000), random.Random(3)
    favourite = put(tier, tokens(9, seed=99))
    for clock in range(60):
        tier.save_usage(clock, {favourite.name.split(".")[0]: (5.0, clock)})
        put(tier, tokens(rng.randint(1, 30), seed=clock))
        on_disk = sum(files.on_disk(p.stat().st_size) for p in (tmp_path / tier._model).iterdir())
        assert on_disk == tier.folder.used <= 120_000
        assert favourite.name in tier.snapshots
    assert tier.counters["evicted: no room"] > 20
    assert open_tier(tmp_path, budget=50_000).folder.used <= 50_000


def test_an_entry_larger_than_the_budget_is_refused_and_evicts_nothing(tmp_path):
    tier = open_tier(tmp_path, budget=60_000)
    kept = put(tier, tokens(3))
    assert put(tier, tokens(64, seed=1)) is None
    assert tier.counters["refused: no room"] == 1 and is_right(tier, kept)


def test_another_models_entries_are_never_read_and_go_first(tmp_path):
    old = put(open_tier(tmp_path, "b" * 32), tokens(20))
    tier = open_tier(tmp_path, "c" * 32, budget=70_000)
    assert not tier.snapshots and tier.load(old) is None
    kept = put(tier, tokens(20, seed=1))
    put(tier, tokens(20, seed=2))
    assert kept.name in tier.snapshots and tier.counters["evicted: another model's file"] == 3
    assert not open_tier(tmp_path, "b" * 32).snapshots


def test_what_another_process_stores_and_removes_is_seen(tmp_path):
    a, b = open_tier(tmp_path), open_tier(tmp_path)
    assert not a.refresh()
    stored = put(b, tokens(20))
    assert a.refresh() and not a.refresh() and is_right(a, stored)
    with b.folder.locked():
        b.folder.clear()
    assert a.load(stored) is None and not a.snapshots


def test_two_writers_and_a_reader_at_once_see_whole_entries_only(tmp_path):
    errors = []

    def work(seed):
        try:
            tier, rng = open_tier(tmp_path, budget=200_000), random.Random(seed)
            for i in range(40):
                put(tier, tokens(rng.randint(1, 20), seed=i % 7))
                tier.refresh()
                for stored in list(tier.snapshots.values())[:3]:
                    assert tier.load(stored) is None or is_right(tier, stored) or stored.name not in tier.snapshots
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    tier = open_tier(tmp_path, budget=200_000)
    assert tier.verify() == (len(tier.snapshots), 0) and tier.folder.used <= 200_000


@pytest.mark.parametrize("fails", ["fsync", "write", "replace"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_disk_that_fails_leaves_no_entry_behind(tmp_path, monkeypatch, fails, after, caplog):
    tier = open_tier(tmp_path)
    kept = put(tier, tokens(20))
    calls, real = [], getattr(os, fails)

    def failing(*args):
        calls.append(args)
        if len(calls) > after:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, fails, failing)
    with caplog.at_level(logging.WARNING, "mimo_edge"):
        assert put(tier, tokens(20, seed=1)) is None and put(tier, tokens(20, seed=2)) is None
    monkeypatch.undo()
    assert [r.message for r in caplog.records].count(
        f"cache folder {tmp_path} cannot be written: {os.strerror(28)}"
    ) == 1
    assert {p.name for p in (tmp_path / tier._model).iterdir()} == {kept.name, *kept.pages}
    assert list(tier.snapshots) == [kept.name] and is_right(tier, kept)
    assert put(tier, tokens(20, seed=1)) is not None  # and the disk works again


def test_what_a_killed_writer_left_is_removed_by_the_next_change(tmp_path):
    tier = open_tier(tmp_path)
    tier.folder.changing()
    (tmp_path / tier._model / f"{'d' * 32}.page.77.partial").write_bytes(b"x" * 9999)
    (tmp_path / "usage.json.77.partial").write_bytes(b"x")
    put(open_tier(tmp_path), tokens(3))
    assert not list(tmp_path.rglob("*.partial"))


def test_a_read_only_disk_still_answers(tmp_path, monkeypatch):
    stored = put(open_tier(tmp_path), tokens(20))

    def read_only(path, flags, *mode):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system")
        return real(path, flags, *mode)

    real = os.open
    monkeypatch.setattr(os, "open", read_only)
    tier = open_tier(tmp_path)
    assert is_right(tier, stored) and put(tier, tokens(5)) is None


@pytest.mark.parametrize("what", ["a file", "someone else's"])
def test_a_folder_that_cannot_be_used_is_a_miss_and_one_line(tmp_path, monkeypatch, what, caplog):
    path = tmp_path / "cache"
    if what == "a file":
        path.write_text("x")
    else:
        path.mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with caplog.at_level(logging.WARNING, "mimo_edge"):
        tier = open_tier(path)
        assert put(tier, tokens(5)) is None and not tier.refresh() and not tier.snapshots
    assert len(caplog.records) == 1 and "is not used" in caplog.text


def test_a_day_s_allowance_of_writes_is_kept_across_starts_and_no_clock_refills_it(tmp_path, monkeypatch):
    daily = 200_000
    tier, stored = open_tier(tmp_path, daily=daily), 0
    while put(tier, tokens(20, seed=stored)):
        stored += 1
    assert stored == daily // 32_768 == 6 and tier.counters["refused: the day's writes are used up"] == 1
    monkeypatch.setattr("time.time", lambda: 4e9)
    assert put(open_tier(tmp_path, daily=daily), tokens(20, seed=50)) is None
    monkeypatch.setattr(usage.time, "clock_gettime", lambda clock: usage.time.monotonic() + usage.DAY / 2)
    assert put(open_tier(tmp_path, daily=daily), tokens(20, seed=50)) is not None
    monkeypatch.setattr(usage.time, "clock_gettime", lambda clock: -1e6)  # backward
    assert 0 < open_tier(tmp_path, daily=daily).usage.allowance < daily


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"clock": "x"}', '{"clock":1,"allowance":NaN,"boot":"","at":0,"entries":{}}', "[" * 99999]
)
def test_damaged_usage_costs_order_and_no_entry(tmp_path, text):
    stored = put(open_tier(tmp_path), tokens(20))
    (tmp_path / folder.USAGE).write_text(text)
    tier = open_tier(tmp_path)
    assert is_right(tier, stored) and tier.usage.clock == 0 and tier.usage.allowance == DAY


def test_uses_survive_a_start_and_the_later_of_two_processes_counts(tmp_path):
    tier = open_tier(tmp_path)
    a, b = (put(tier, tokens(5, seed=s)).name.split(".")[0] for s in (1, 2))
    other = open_tier(tmp_path)
    tier.save_usage(10, {a: (3.0, 9), "gone": (1.0, 1)})
    other.save_usage(7, {a: (2.0, 5), b: (1.0, 6)})
    again = open_tier(tmp_path).usage
    assert again.clock == 10 and again.entries == {a: (3.0, 9), b: (1.0, 6)}
    assert set(json.loads((tmp_path / folder.USAGE).read_text())["entries"]) == {a, b}


def test_a_process_that_holds_the_lock_for_ever_stops_nobody(tmp_path, monkeypatch):
    tier = open_tier(tmp_path)
    monkeypatch.setattr(folder, "PATIENCE_S", 0.05)
    hold = "import fcntl,sys,time;f=open(sys.argv[1]);fcntl.flock(f,fcntl.LOCK_EX);print(1,flush=True);time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", hold, tmp_path / folder.LOCK], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        assert put(tier, tokens(5)) is None
    finally:
        holder.kill()
        holder.wait()
    assert put(tier, tokens(5)) is not None


def test_what_is_not_ours_in_a_folder_is_neither_counted_nor_removed(tmp_path):
    tier = open_tier(tmp_path)
    put(tier, tokens(5))
    others = [tmp_path / "notes.txt", tmp_path / "photos" / "a.page", tmp_path / tier._model / "b.page"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 10_000)
    tier = open_tier(tmp_path, budget=1)
    assert tier.folder.used == 0 and not tier.snapshots
    with tier.folder.locked():
        tier.folder.clear()
    assert all(path.stat().st_size == 10_000 for path in others)


def test_files_are_their_owners_alone(tmp_path):
    path = tmp_path / "new" / "cache"
    put(open_tier(path), tokens(20))
    assert all(p.stat().st_mode & 0o077 == 0 for p in path.rglob("*") if p.name != folder.USAGE)


def test_every_part_of_a_key_matters():
    parts = [("m", "f", b""), ("n", "f", b""), ("m", "g", b""), ("m", "f", b"t"), ("mf", "", b"")]
    assert len({root_key(*p) for p in parts}) == len(parts)
