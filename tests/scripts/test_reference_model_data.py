"""The generated data: splits that do not touch, answers right by construction, one format with the template."""

from __future__ import annotations

import json
import re
from collections import Counter
from random import Random

import numpy as np
import pytest

from mimo_edge.text import render
from scripts.reference_model import long_replies
from scripts.reference_model.chat import SPECIAL, TEMPLATE, messages, prompt
from scripts.reference_model.collect import SEPARATOR, without_boilerplate
from scripts.reference_model.dialogue import make_sample
from scripts.reference_model.extract import html_text
from scripts.reference_model.intents import META, frequencies, held_out_sentences, intents, plain, sentences
from scripts.reference_model.noise import typo
from scripts.reference_model.packing import (
    ACTION,
    GENERAL,
    LOOKAHEAD,
    PROMPT,
    REPLY,
    Packer,
    encode_sample,
    sample_rows,
)
from scripts.reference_model.tokenizer import train


@pytest.fixture(scope="module")
def tokenizer():
    """Trained on a little text; 300 merges and more are enough to join words."""
    texts = [prompt(s) + s.answer for s in (make_sample(Random(f"t{i}"), "train") for i in range(80))]
    return train(re.sub("|".join(map(re.escape, SPECIAL)), "\n", t) for t in texts)


def samples(split, count=300, name=None):
    return [make_sample(Random(f"{split}:{i}"), split, name) for i in range(count)]


def test_intents_are_many_and_zipf_like():
    names, shares = frequencies()
    assert len(intents()) >= 60 and set(names) == set(intents()) | set(META) and len(set(names)) == len(names)
    found = Counter(s.intent for s in samples("train", 2000))
    weights = np.diff([0, *shares]) / shares[-1]
    assert found[names[0]] / 2000 == pytest.approx(weights[0], abs=0.04)
    assert sum(found[n] for n in names[-30:]) < found[names[0]]


@pytest.mark.parametrize("name", sorted(intents()))
def test_templates_are_whole_and_splits_do_not_share_sentences(name):
    intent, held = intents()[name], held_out_sentences()
    keys = sorted(key for key, _ in intent.args)
    for language in ("en", "zh"):
        assert intent.train[language] and intent.test[language]
        for template in (*intent.train[language], *intent.test[language]):
            for sentence in sentences(template):
                assert sorted(re.findall(r"\{(\w+)\}", sentence)) == keys, sentence
                assert not re.search(r"[()|?]", sentence.replace("?", "", sentence.endswith("?"))), sentence
        for template in intent.train[language]:
            assert any(plain(s) not in held for s in sentences(template)), f"{template}: only held-out sentences"


def test_training_uses_no_held_out_sentence_or_combination():
    held = {re.sub(r"\\\{\w+\\\}", ".+", re.escape(s)) for s in held_out_sentences() if "{" in s}
    long_ones = [re.compile(h) for h in held if len(h) > 40]
    for s in samples("train"):
        if s.language == "en" and s.variant == "plain":
            assert not any(p.fullmatch(plain(s.user)) for p in long_ones), s.user


def test_held_out_combinations_differ_between_splits():
    intent = intents()["bring"]
    for split, expected in (("train", {False}), ("test", {False, True})):
        found = set()
        for s in samples(split, 150, "bring"):
            action = json.loads(s.action)
            thing = re.search(rf"^{action['object']} (\w+) ", s.state, re.M)
            if thing:
                found.add(intent.held_out([f"{action['object'][:-2]}/{thing[1]}", action["person"]]))
        assert found == expected


def test_actions_name_what_the_state_and_tools_hold():
    for s in samples("train") + samples("test"):
        action = json.loads(s.action)
        steps = action.get("steps", [action])
        for step in steps:
            if "object" in step and s.state:
                assert f"\n{step['object']} " in s.state
            if s.tools and step["action"] in intents():
                assert intents()[step["action"]].signature in s.tools
            if step["action"] in intents():
                assert set(step) == {"action"} | {key for key, _ in intents()[step["action"]].args}
        if s.intent == "unsupported":
            assert s.tools and s.action == '{"action":"unsupported"}'
        assert s.reply and "{" not in s.reply and "{" not in s.user


def test_a_question_back_lists_every_object_of_the_name():
    for s in samples("test", 40, "ask"):
        options = json.loads(s.action)["options"]
        assert len(options) > 1
        assert options == re.findall(rf"^({options[0][:-2]}_\d) ", s.state, re.M)


def test_long_replies_follow_the_state():
    s = make_sample(Random(3), "train", "report")
    while s.language != "en":
        s = make_sample(Random(s.user), "train", "report")
    things = re.findall(r"^(\w+)_\d (\w+) (\w+) (\w+)$", s.state, re.M)
    assert len(things) >= 9
    for name, color, place, room in things:
        assert f"{color} {name} is on the {place} in the {room.replace('_', ' ')}" in s.reply
    assert s.reply.count(".") > 20
    assert long_replies._recipe("soup", 3, "en").startswith("Step 1: You need 3 carrots, 6 potatoes")


def test_samples_depend_on_the_seed_alone():
    assert samples("train", 20) == samples("train", 20)
    assert make_sample(Random("train:1"), "train") != make_sample(Random("train:2"), "train")


def test_typos_change_one_word_by_one_key():
    rng = Random(4)
    for _ in range(200):
        new = typo("kitchen", rng)
        assert new[0] == "k" and abs(len(new) - 7) <= 1


def test_template_renders_the_training_format():
    source = TEMPLATE.read_text("utf-8")
    for s in samples("train", 60):
        assert render(source, messages(s)) == prompt(s)
    only = render(source, [{"role": "user", "content": "pick up the red cup"}])
    assert only.startswith("<|bos|><|system|>You are") and only.endswith(
        "<|user|>pick up the red cup<|end|><|assistant|>"
    )


def test_parts_encode_as_the_whole(tokenizer):
    for s in samples("train", 40):
        ids, kinds = encode_sample(s, tokenizer)
        whole = tokenizer.encode(prompt(s) + s.answer + "<|end|>", add_special_tokens=False).ids
        assert ids == whole
        assert tokenizer.decode([i for i, k in zip(ids, kinds, strict=True) if k == ACTION]) == s.action + "\n"
    assert tokenizer.encode("hello").ids[0] == SPECIAL.index("<|bos|>")


def test_rows_hold_whole_conversations_and_resume_anywhere(tokenizer):
    general = np.random.default_rng(0).integers(len(SPECIAL), 400, 5000).astype(np.uint16)
    general[::97] = SPECIAL.index("<|bos|>")
    packer = Packer(tokenizer, general, 2048, seed=5)
    rows = packer.rows(0, 6)
    again = packer.rows(4, 2)
    assert all((a[4:] == b).all() for a, b in zip(vars(rows).values(), vars(again).values(), strict=True))
    assert set(np.unique(rows.kinds)) == {PROMPT, ACTION, REPLY, GENERAL}
    for r in range(6):
        for d in np.unique(rows.document[r]):
            at = np.flatnonzero(rows.document[r] == d)
            assert (np.diff(at) == 1).all()
            assert (rows.position[r, at] == np.arange(len(at))).all()
            if rows.kinds[r, at[0]] == PROMPT:
                text = tokenizer.decode(rows.tokens[r, at].tolist(), skip_special_tokens=False)
                assert text.startswith("<|bos|><|system|>") and text.endswith("<|end|>") and "<|assistant|>" in text


def test_evaluation_rows_keep_every_sample(tokenizer):
    encoded = [encode_sample(s, tokenizer) for s in samples("test", 12)]
    length = max(len(ids) for ids, _ in encoded) + 30
    rows = sample_rows(encoded, length)
    assert rows.tokens.shape[1] == length + LOOKAHEAD
    found = []
    for r in range(len(rows.tokens)):
        for d in np.unique(rows.document[r]):
            at = rows.document[r] == d
            if rows.kinds[r, at].any():
                found.append((rows.tokens[r, at].tolist(), rows.kinds[r, at].tolist()))
    assert found == encoded


def test_text_extraction_drops_markup_and_repeated_lines():
    page = (
        "<html><head><title>x</title></head><body><nav>menu</nav><p>One &amp; two</p><script>s</script><pre>a = 1</pre>"
    )
    assert html_text(page).split() == ["One", "&", "two", "a", "=", "1"]
    pages = [f"Menu line\nfact {i} " + "word " * 100 for i in range(12)]
    kept = list(without_boilerplate(iter(pages)))
    assert "Menu" in kept[0] and "Menu" not in kept[-1] and "fact 11" in kept[-1]
    assert all(SEPARATOR not in d for d in kept)
