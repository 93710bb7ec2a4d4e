"""Prefix cache on the command line: run's options, and what `cache` does with a folder."""

import json
import os
from pathlib import Path

import pytest
from fakes import FakeBackend, fake_bundle

from mimo_edge.backends import registry
from mimo_edge.cli.caching import Conversation
from mimo_edge.cli.main import main

TEXT = "a prompt of sixty tokens or so, which is more than a single page"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle without weights."""
    return fake_bundle(tmp_path_factory.mktemp("cli") / "fake", context=512)


@pytest.fixture
def command(monkeypatch, capsysbinary):
    """Runs the command line in this process with the fake backend: (exit code, stdout, stderr)."""
    monkeypatch.setitem(registry.LOADERS, "onnxruntime", lambda bundle, threads: FakeBackend())

    def run(*args):
        with pytest.raises(SystemExit) as exit:
            main([str(a) for a in args])
        out, err = capsysbinary.readouterr()
        return exit.value.code or 0, out.decode(), err.decode()

    return run


def ask(command, bundle, *options, prompt=TEXT):
    code, out, err = command("run", bundle, "-p", prompt, "--max-tokens", 3, "--json", *options)
    assert code == 0, err
    return json.loads(out)


def test_a_folder_serves_the_next_run_and_json_says_so(command, bundle, tmp_path):
    first, second = (ask(command, bundle, "--cache-dir", tmp_path / "cache") for _ in range(2))
    plain = ask(command, bundle)
    assert first["text"] == second["text"] == plain["text"]
    n = 1 + len(TEXT)
    assert [r["cache"] for r in (first, second, plain)] == [
        {"prompt_tokens": n, "reused_tokens": reused} for reused in (0, n - 1, 0)
    ]


def test_a_named_conversation_goes_on_in_the_next_run(command, bundle, tmp_path):
    options = ("--chat", "--cache-dir", tmp_path, "--session", "kitchen")
    first = ask(command, bundle, *options, prompt="hello")
    second = ask(command, bundle, *options, prompt="again")
    told = f"user: hello\nassistant: {first['text']}\nuser: again\nassistant: "
    assert second["cache"]["prompt_tokens"] == 1 + len(told)
    assert second["cache"]["reused_tokens"] >= len("user: hello\nassistant: ")
    assert ask(command, bundle, *options[:-1], "garage", prompt="again")["cache"]["prompt_tokens"] < len(told)
    code, _, err = command("run", bundle, *options[:-1], "../x", "-p", "x")
    assert code == 2 and "session name '../x' (allowed: up to 64 letters" in err
    (tmp_path / "sessions" / "kitchen.json").write_text("[1]")
    code, _, err = command("run", bundle, *options, "-p", "x")
    assert code == 2 and "does not hold a conversation: remove it to start anew" in err


def test_a_conversation_is_on_the_disk_before_its_name_is(command, bundle, tmp_path, monkeypatch):
    """The file, its name in the folder, the folder's own name: in this order, or a power cut loses an answered turn."""
    events, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(Path(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("rename"), replace(a, b)))
    Conversation(tmp_path, "kitchen").save([{"role": "user", "content": "hello"}])
    assert events[0].parent == tmp_path / "sessions" and events[0].suffix == ".partial"
    assert events[1:] == ["rename", tmp_path / "sessions", tmp_path]


def test_a_conversation_that_is_no_file_is_one_line(command, bundle, tmp_path):
    (tmp_path / "sessions").mkdir()
    os.mkfifo(tmp_path / "sessions" / "kitchen.json")
    code, _, err = command("run", bundle, "--chat", "--cache-dir", tmp_path, "--session", "kitchen", "-p", "x")
    assert code == 2 and "kitchen.json ([Errno 22] not a regular file): remove it to start anew" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cache-bytes", "0"], "'0' is not a size (allowed: 1 or more bytes"),
        (["--cache-bytes", "12 apples"], "'12 apples' is not a size"),
        (["--cache-bytes", "nan"], "'nan' is not a size"),
        (["--cache-bytes", "900T"], "989,560,464,998,400 bytes is more than this machine's memory of "),
        (["--cache-dir", ""], "'' is not a folder: name one, or `.` for the current folder"),
        (["--cache-bytes", "9K"], "a cache of 9,216 bytes cannot hold one request of 512 tokens"),
        (["--cache-record"], "--cache-record and --cache-disk-bytes need --cache-dir DIR"),
        (["--session", "a", "--chat"], "--session NAME needs --cache-dir DIR"),
        (["--session", "a", "--cache-dir", "x"], "--session NAME keeps a conversation: give --chat as well"),
    ],
)
def test_bad_options_are_one_line(command, bundle, options, message):
    code, out, err = command("run", bundle, "-p", "x", *options)
    assert (code, out) == (2, "") and message in err and err.count("mimo-edge: error") == 1


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("64K", 65536), ("1.5m", 3 << 19), ("2G", 2 << 30), ("3GiB", 3 << 30)]
)
def test_sizes_are_read_as_people_write_them(text, size):
    from mimo_edge.cli.caching import Size

    assert Size().convert(text, None, None) == size


def test_stats_say_what_is_there_and_how_much_it_helped(command, bundle, tmp_path):
    for _ in range(3):
        ask(command, bundle, "--cache-dir", tmp_path)
    code, out, _ = command("cache", "stats", tmp_path, "--json")
    facts, n = json.loads(out), 1 + len(TEXT)
    [held] = facts["models"].values()
    files = [p.stat().st_size for p in tmp_path.glob("*/*") if p.suffix in (".page", ".snapshot")]
    assert held == {"snapshots": 2, "pages": 1, "bytes": facts["bytes"]} and facts["bytes"] >= sum(files)
    assert facts["requests"] == 3 and facts["hit_rate"] == pytest.approx(2 * (n - 1) / (3 * n))
    assert facts["totals"]["disk, stored"] == 2 and facts["totals"]["disk, loaded"] == 2
    code, out, _ = command("cache", "stats", tmp_path)
    assert code == 0 and "65.6% of prompt tokens reused" in out and "2 snapshots, 1 pages" in out


def test_verify_removes_what_is_damaged_and_says_so_with_its_exit_code(command, bundle, tmp_path):
    ask(command, bundle, "--cache-dir", tmp_path)
    assert command("cache", "verify", tmp_path)[:2] == (
        0,
        "2 snapshots are whole, 0 files or snapshots were not and were removed\n",
    )
    [page] = tmp_path.glob("*/*.page")
    page.write_bytes(page.read_bytes()[:-1] + b"?")
    code, out, _ = command("cache", "verify", tmp_path)
    assert code == 1 and out.startswith("0 snapshots are whole, 2 ") and not list(tmp_path.glob("*/*.*"))


def test_clear_removes_entries_and_nothing_else(command, bundle, tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    ask(command, bundle, "--cache-dir", tmp_path)
    assert command("cache", "clear", tmp_path)[:2] == (0, "removed 3 files\n")
    assert (tmp_path / "mine.txt").exists() and not list(tmp_path.glob("*/*.*"))
    assert ask(command, bundle, "--cache-dir", tmp_path)["cache"]["reused_tokens"] == 0


def test_a_recorded_trace_tells_which_prompts_are_alike_and_not_what_they_say(command, bundle, tmp_path):
    for prompt in ("secret", "secret agent"):
        ask(command, bundle, "--cache-dir", tmp_path, "--cache-record", prompt=prompt)
    _, out, _ = command("cache", "export-trace", tmp_path)
    a, b = map(json.loads, out.splitlines())
    assert a["prompt"] == [0, 1, 2, 3, 4, 2, 5] == b["prompt"][:7] and len(b["prompt"]) == 13
    assert len(a["reply"]) == 3 and a["marks"] == []


@pytest.mark.parametrize("what", ["stats", "verify", "clear", "export-trace"])
def test_a_folder_that_is_none_is_one_line(command, tmp_path, what):
    code, _, err = command("cache", what, tmp_path / "missing")
    assert code == 2 and "is not a folder: name the one given to `mimo-edge run --cache-dir`" in err
    code, _, err = command("cache", what, "")
    assert code == 2 and "'' is not a folder: name one, or `.` for the current folder" in err


def test_a_folder_without_recorded_requests_says_how_to_record_some(command, tmp_path):
    code, _, err = command("cache", "export-trace", tmp_path)
    assert code == 2 and "record some with `mimo-edge run --cache-record`" in err
    os.mkfifo(tmp_path / "trace.jsonl")
    assert command("cache", "export-trace", tmp_path)[::2] == (code, err)
