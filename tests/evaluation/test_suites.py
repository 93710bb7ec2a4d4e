"""Suites of the package, and files of other people."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from mimo_edge.errors import BadInputError
from mimo_edge.evaluation.suites import SUITES, load_suite

CHAT = [{"role": "user", "content": "hi"}]


def test_the_commands_that_are_shipped_are_spread_over_all_intents():
    suite = load_suite("commands")
    per_intent = Counter(c.group for c in suite.commands)
    assert len(per_intent) == 91 and set(per_intent.values()) == {10} and not suite.texts
    assert len({c.group for c in load_suite("commands", 91).commands}) == 91
    assert all(json.loads(c.action) and c.reply and c.messages[-1]["role"] in ("user", "state") for c in suite.commands)


def test_the_texts_that_are_shipped_are_short():
    suite = load_suite("perplexity")
    assert len(suite.texts) > 10 and 50_000 < sum(map(len, suite.texts)) < 150_000 and not suite.commands
    assert SUITES["perplexity"].stat().st_size <= 60_000 and SUITES["commands"].stat().st_size <= 400_000


def test_a_file_may_mix_samples_and_hold_blank_lines(tmp_path):
    lines = [
        json.dumps({"text": "one\u2028line"}, ensure_ascii=False),
        "",
        json.dumps({"messages": CHAT, "reply": "hello"}),
        json.dumps({"messages": CHAT, "action": "{}", "intent": "greet", "language": "en"}),
        json.dumps({"text": "two"}),
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\r\n".join(lines), "utf-8")
    suite = load_suite(str(path))
    assert suite.texts == ("one\u2028line", "two")
    assert [(c.action, c.reply, c.group) for c in suite.commands] == [(None, "hello", ""), ("{}", None, "greet")]
    assert len(load_suite(str(path), 1).commands) == len(load_suite(str(path), 1).texts) == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "holds no samples"),
        (b"\n \n", "holds no samples"),
        (b'{"text": "a"}\nhello', "line 2: not JSON"),
        (b"[" * 100_000, "line 1: not JSON"),
        (b'"text"', "line 1: not a sample"),
        (b'{"text": ""}', "line 1: not a sample"),
        (b'{"text": 3}', "line 1: not a sample"),
        (b'{"messages": [], "reply": "x"}', "line 1: not a sample"),
        (b'{"messages": [{"role": "user"}], "reply": "x"}', "line 1: not a sample"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "line 1: not a sample"),
        (b'{"messages": [{"role": "user", "content": "x"}], "reply": 3}', "line 1: not a sample"),
        (b'{"messages": [{"role": "user", "content": "x"}], "reply": ""}', "line 1: not a sample"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
    ],
)
def test_a_bad_file_is_named_with_the_line(content, told, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadInputError) as error:
        load_suite(str(path))
    assert told in str(error.value) and "bad.jsonl" in str(error.value) and '{"text": "..."}' in str(error.value)


def test_an_unknown_suite_and_a_limit_of_nothing():
    with pytest.raises(BadInputError, match=r"no such suite: 'comands' \(allowed: commands, perplexity, or a file"):
        load_suite("comands")
    with pytest.raises(BadInputError, match="limit 0 is out of range"):
        load_suite("commands", 0)
