"""A cache folder in rough company: pipes, sockets, links and folders among its files, a disk with little room."""

import logging
import os
import signal
import socket
from types import SimpleNamespace

import pytest
from tiers import DAY, is_right, open_tier, put, tokens

from mimo_edge.kv import folder
from mimo_edge.kv.tiers import DiskTier


@pytest.fixture
def impatient():
    """Opening a pipe waits for ever; here it waits five seconds."""

    def too_long(*args):
        raise AssertionError("something that is no file was opened")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(5)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_strange(path, what):
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "link to a device":
        path.symlink_to("/dev/zero")
    elif what == "folder":
        path.mkdir()
    else:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path may have some hundred characters only
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
        os.chdir(here)


STRANGE = ["pipe", "link to a device", "socket", "folder"]


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("suffix", [".page", ".snapshot"])
def test_what_is_no_file_is_skipped_and_counted_and_never_opened(tmp_path, what, suffix, impatient, caplog):
    tier = open_tier(tmp_path)
    victim, other = put(tier, tokens(20)), put(tier, tokens(20, seed=1))
    place = tmp_path / tier._model / (victim.name if suffix == ".snapshot" else victim.pages[0])
    make_strange(place, what)
    assert tier.load(victim) is None and is_right(tier, other)  # while it is open
    make_strange(place.with_name("0" * 32 + suffix), what)
    with caplog.at_level(logging.INFO, "mimo_edge"):
        again = open_tier(tmp_path)
    skipped = again.counters["skipped: not a regular file"]
    assert skipped == len(again.folder.strange) >= 1
    assert f"{skipped} skipped: not a regular file" in caplog.text
    assert victim.name not in again.snapshots and is_right(again, other)
    assert again.verify() == (1, 0) and again.folder.used == sum(again.folder.sizes.values())
    with again.folder.locked():
        again.folder.clear()
    assert os.path.lexists(place.with_name("0" * 32 + suffix))


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("name", [folder.LOCK, folder.USAGE])
def test_a_lock_or_a_list_of_uses_that_is_no_file_stops_nobody(tmp_path, what, name, impatient):
    stored = put(open_tier(tmp_path), tokens(20))
    make_strange(tmp_path / name, what)
    tier = open_tier(tmp_path)
    assert tier.usage.clock == 0 and (name == folder.USAGE) == (stored.name in tier.snapshots)
    tier.save_usage(3, {})
    put(tier, tokens(5))


@pytest.mark.parametrize("free", [0, 50_000, 10**6])
def test_a_budget_beyond_what_the_disk_has_is_lowered_and_said_once(tmp_path, monkeypatch, free, caplog):
    put(open_tier(tmp_path), tokens(20))
    disk = os.statvfs(tmp_path)
    told = SimpleNamespace(f_bavail=free // disk.f_frsize, f_frsize=disk.f_frsize)
    monkeypatch.setattr(os, "statvfs", lambda path: told)
    tier = DiskTier(tmp_path, "a" * 32, 300_000, DAY)
    with caplog.at_level(logging.WARNING, "mimo_edge"):
        tier.fit()
        tier.scan()
    most = (free // disk.f_frsize * disk.f_frsize + 32_768) * 9 // 10
    assert tier.budget == min(300_000, most) and tier.folder.used <= tier.budget
    assert len(caplog.records) == (most < 300_000)
    assert f"of 300,000 bytes only {most:,} are used" in caplog.text or most > 300_000
