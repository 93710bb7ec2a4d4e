"""Calibration text: what is read, what is drawn, and one-line errors."""

import json
import logging
from collections import Counter

import pytest
from fakes import BOS, EOS, TEMPLATE, byte_tokenizer
from specs import mimo_spec

from mimo_edge.errors import BadInputError
from mimo_edge.export.quantize import calibration_data
from mimo_edge.export.quantize.calibration_data import Sample, draw, read_calibration
from mimo_edge.text import Text


@pytest.fixture
def read(tmp_path):
    """Reads lines (objects or raw text) with a tokenizer of bytes."""
    from dataclasses import replace

    spec = replace(mimo_spec(), vocab_size=258, bos_id=BOS, eos_ids=(EOS,))

    def run(lines, tokens=None, template=TEMPLATE, stratified=True):
        path = tmp_path / "calib.jsonl"
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), "utf-8")
        text = Text(byte_tokenizer(), spec, template)
        return read_calibration(path, text, spec.eos_ids, tokens, stratified=stratified)

    return run


LONG = {"text": "a" * 600}


def test_text_is_cut_into_sequences(read, monkeypatch):
    monkeypatch.setattr(calibration_data, "_LONGEST", 250)
    found = sorted(len(s) for s in read([{"text": "ä" * 300}]))
    assert sum(found) in (600, 601) and found[-1] == 250 and len(found) == 3


def test_conversations_are_rendered_and_answered(read):
    messages = [{"role": "user", "content": "turn on the light " * 40}]
    line = {"messages": messages, "action": '{"a":1}', "reply": "Done.", "intent": "light_on", "language": "en"}
    [ids] = read([line])
    ids = ids.tolist()
    answer = list(b'{"a":1}\nDone.')
    assert ids[-1] == EOS and [i for i in ids if i < 256][-len(answer) :] == answer
    [prompt] = read([{"messages": messages}])
    assert ids[: len(prompt)] == prompt.tolist() and len(ids) == len(prompt) + len(answer) + 1


def test_strings_may_hold_other_line_ends(read, tmp_path):
    """JSON allows U+2028 inside a string; only \\n ends a line."""
    line = json.dumps({"text": "a\u2028b " * 300}, ensure_ascii=False)
    [ids, *_] = read([line])
    assert "\u2028".encode() in bytes(i for i in ids.tolist() if i < 256)


def test_no_more_than_asked_for(read):
    found = read([LONG] * 20, tokens=1500)
    assert 1500 <= sum(map(len, found)) < 2200


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        (["", "  "], "is empty"),
        (["hello"], "line 1 is not JSON"),
        (["[" * 100_000], "line 1 is not JSON"),
        ([LONG, "{'text': 1}"], "line 2 is not JSON"),
        (["[1]"], 'line 1: expected an object with either "text" or "messages"'),
        ([{"intent": "x"}], 'either "text" or "messages"'),
        ([{"text": "a", "messages": []}], 'either "text" or "messages"'),
        ([{"text": 5}], "'text' must be a string"),
        ([{"text": "a", "intent": 5}], "'intent' must be a string"),
        ([{"messages": []}], '"messages" must be a list'),
        ([{"messages": [{"role": "user"}]}], '"messages" must be a list'),
        ([{"messages": "hello"}], '"messages" must be a list'),
        ([{"text": "short"}], "too few to calibrate on"),
        ([LONG, r'{"text": "\ud800"}'], "line 2: the prompt is not valid Unicode"),
    ],
)
def test_bad_files(read, lines, message):
    with pytest.raises(BadInputError) as error:
        read(lines)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_shorter_than_asked(read):
    with pytest.raises(BadInputError, match=r"holds 1[0-9]{3} tokens, fewer than --calib-tokens 5000"):
        read([LONG] * 3, tokens=5000)


def test_asked_for_too_little(read):
    with pytest.raises(BadInputError, match="10 tokens are too few"):
        read([LONG] * 3, tokens=10)


def test_messages_need_a_template(read):
    with pytest.raises(BadInputError, match="line 1: this bundle has no chat template"):
        read([{"messages": [{"role": "user", "content": "hi"}]}], template=None)


def test_files_that_cannot_be_read(read, tmp_path):
    text = Text(byte_tokenizer(), mimo_spec())
    with pytest.raises(BadInputError, match="cannot be read"):
        read_calibration(tmp_path / "none.jsonl", text, (), None, stratified=True)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInputError, match="not UTF-8 text at byte 0"):
        read_calibration(tmp_path / "binary", text, (), None, stratified=True)


def test_rare_intents_are_named(read, caplog):
    lines = [{"text": "x" * 100, "intent": "often"}] * 8 + [{"text": "x" * 100, "intent": "seldom"}] * 3
    with caplog.at_level(logging.WARNING):
        read(lines)
    assert len(caplog.records) == 1 and "fewer than 8 samples: seldom (3): add" in caplog.text


def zipf():
    """1,000 samples of 20 intents, the rarest of which has 4."""
    counts = [max(4, 700 // (i + 1) ** 2) for i in range(20)]
    return [Sample((0,) * 10, f"i{i}") for i, n in enumerate(counts) for _ in range(n)]


def test_rare_intents_get_their_share():
    samples = zipf()
    by_chance = Counter(s.intent for s in draw(samples, 1200, stratified=False, seed=1))
    stratified = Counter(s.intent for s in draw(samples, 1200, stratified=True, seed=1))
    assert sum(stratified.values()) == sum(by_chance.values()) == 120
    assert min(stratified[f"i{i}"] for i in range(20)) >= 3 and len(by_chance) < 20
    assert stratified["i0"] > 2 * stratified["i9"]  # the rest still goes by how often people say it


def test_general_text_keeps_its_share():
    samples = zipf() + [Sample((0,) * 10, None)] * len(zipf())
    drawn = draw(samples, 2000, stratified=True, seed=3)
    general = sum(s.intent is None for s in drawn)
    assert 60 <= general <= 140  # of 200: half, less what chance does
    assert Counter(s.intent for s in drawn).most_common()[-1][1] >= 2


def test_draws_depend_on_the_seed_alone():
    samples = zipf()
    first, again, other = (draw(samples, 900, stratified=True, seed=seed) for seed in (5, 5, 6))
    assert first == again and [id(s) for s in first] != [id(s) for s in other]
    assert len({id(s) for s in first}) == len(first)
    assert len(draw(samples, 10**9, stratified=True, seed=5)) == len(samples)
