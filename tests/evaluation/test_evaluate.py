"""An evaluation against the long way round: drafting step by step, masks of every row, losses from the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specs import RandomWeights, mimo_spec
from tiny_bundle import write_bundle

from mimo_edge.backends import oracle
from mimo_edge.backends.oracle_text import TextReader
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.bundle import WEIGHTS, read_tensors
from mimo_edge.engine import Engine
from mimo_edge.errors import BadInputError
from mimo_edge.evaluation import evaluate as evaluating
from mimo_edge.evaluation.evaluate import _Heads, evaluate, judge
from mimo_edge.evaluation.score import losses, windows
from mimo_edge.evaluation.suites import Command, Suite
from mimo_edge.request import GREEDY, SamplingParams

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other
SPEC = mimo_spec(window=5, gate=True, mtp=3)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(tmp_path_factory.mktemp("evaluation") / "tiny", SPEC, seed=3)


@pytest.fixture(scope="module")
def engine(bundle):
    with Engine.open(bundle.path, "reference") as engine:
        yield engine


@pytest.fixture(scope="module")
def weights(bundle):
    return BundleWeights(bundle.spec, read_tensors(bundle.file(WEIGHTS)), keep=True)


def draft(spec, weights, known, noise):
    """What three heads draft while the last token of `known` is pending, each seeing the drafts before its own."""
    tokens = list(known)
    ids = torch.tensor(known[:-1])
    hidden = oracle.forward(spec, weights, ids, torch.arange(len(ids)), [None] * len(spec.layers)).hidden
    for m in range(3):
        ahead = torch.tensor(tokens[1 + m : 1 + m + len(ids)])
        logits, *_ = oracle.mtp(spec, weights, m, hidden, ahead, torch.arange(len(ids)), None)
        tokens.append(noise(logits[-1].numpy(), len(tokens)))
    return tokens[len(known) :]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=5)], ids=["greedy", "sampled"])
def test_acceptance_is_what_drafting_step_by_step_accepts(bundle, weights, sampling):
    """A text is grown from drafts of which a known number is right; the evaluation must find exactly these."""
    from mimo_edge.decoding.sampling import Sampler

    rng = np.random.default_rng(6)
    heads = _Heads(TextReader(bundle.spec, weights))
    accepted, steps = np.zeros(3, int), 0
    for _ in range(3):
        prompt = rng.integers(0, 256, 9).tolist()
        answer = [int(rng.integers(256))]
        sampler = Sampler(sampling, prompt)
        for taken in rng.permutation([0, 1, 2, 3, 3]):
            drafts = draft(bundle.spec, weights, [*prompt, *answer], sampler.sample)
            answer += drafts[:taken]
            wrong = drafts[taken] if taken < 3 else -1
            answer.append(next(int(t) for t in rng.permutation(256) if t != wrong))
            accepted[:taken] += 1
            steps += 1
        heads.add("greedy", prompt, answer, sampling)
    found = heads.drafts()["greedy"]
    assert found.by_position == pytest.approx(accepted / steps)
    assert found.length.value == pytest.approx(found.tokens / steps) and found.tokens == steps + accepted.sum()


def test_kept_shares_are_those_of_the_masks_that_the_forward_pass_applies(bundle, weights, monkeypatch):
    tokens = np.random.default_rng(7).integers(0, 256, 23).tolist()
    masks = []
    plain = oracle.block_mask
    monkeypatch.setattr(oracle, "block_mask", lambda *args: masks.append(plain(*args)) or masks[-1])
    oracle.forward(bundle.spec, weights, torch.tensor(tokens), torch.arange(23), [None] * 5)
    monkeypatch.setattr(oracle, "block_mask", plain)
    kept = TextReader(bundle.spec, weights).read(tokens, 3).kept
    np.testing.assert_allclose(kept, torch.stack(masks).mean(-1), rtol=1e-6)
    assert 0.05 < kept.mean() < 0.95


def test_losses_are_the_oracles_in_steps_of_any_size(engine, bundle, weights, monkeypatch):
    tokens = np.random.default_rng(8).integers(0, 256, 41).tolist()
    logits = oracle.forward(bundle.spec, weights, torch.tensor(tokens), torch.arange(41), [None] * 5).logits
    told = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")
    for rows in (7, 1 << 20):
        monkeypatch.setattr("mimo_edge.evaluation.score.LOGITS", rows * bundle.spec.vocab_size)
        np.testing.assert_allclose(losses(engine, tokens), told, rtol=1e-4)
    assert engine.pools.pages.used == engine.pools.rings.used == 0
    assert len(losses(engine, tokens[:2])) == 1


def test_windows_hold_every_token_once_behind_a_begin_token(engine, monkeypatch):
    monkeypatch.setattr("mimo_edge.evaluation.score.WINDOW", 8)
    text = "a text of some length"
    pieces = list(windows(engine, text))
    assert all(p[0] == engine.spec.bos_id and len(p) <= 8 for p in pieces)
    assert bytes(t for p in pieces for t in p[1:]).decode() == text


def test_answers_are_split_at_the_first_line_where_an_action_is_wanted():
    chat = ({"role": "user", "content": "x"},)
    commands = (
        Command(chat, '{"a":1}', "Here it is now.", "one"),
        Command(chat, '{"a":1}', "Here it is now.", "one"),
        Command(chat, '{"a":1}', None, "two"),
        Command(chat, None, "two\nlines"),
    )
    found = judge(commands, ['{"a":1}\nHere it is now.', '{"a":2}\nHere it is now.', '{"a":1}', "two\nlines"])
    assert found.action.value == pytest.approx(200 / 3) and found.reply.value == 100
    assert found.groups == {"one": (2, 50.0), "two": (1, 100.0)}
    assert found.bleu == pytest.approx(100) and found.rouge_l.value == 100
    assert judge(commands[2:3], ["no"]).reply is None and judge(commands[3:], ["no"]).action is None


def test_a_whole_evaluation(engine, bundle, monkeypatch):
    monkeypatch.setattr(evaluating, "LONGEST_REPLY", 12)
    monkeypatch.setattr(evaluating, "CONTINUATION", 10)
    prompt = ({"role": "user", "content": "go"},)
    said = "".join(engine.generate(engine.text.encode_chat(prompt), max_tokens=12))
    suite = Suite("mine", (Command(prompt, None, said), Command(prompt, None, "else")), ("Some text.", "More text!"))
    seen = []
    found = evaluate(engine, bundle, suite, lambda done, total, what: seen.append((what, done, total)))
    assert found.commands.reply.value == 50 and found.commands.action is None
    assert found.texts.tokens == 20 and 100 < found.texts.perplexity.value < 5000
    assert set(found.drafts) == {"commands", "greedy", "sampled"} and found.drafts["greedy"].texts == 2
    assert {k: len(v) for k, v in found.skipped.items()} == {"prompt": 5, "answer": 5, "text": 5}
    assert found.left_out == () and found.to_json()["texts"]["count"] == 2
    assert [w for w, done, total in seen if done == total] == ["commands", "texts", "continuations"]
    monkeypatch.setattr(evaluating, "LONGEST_READ", 1)
    assert evaluate(engine, bundle, suite, lambda *_: None).left_out == (
        "6 texts above 1 tokens are not in accepted drafts and skipped work",
    )
    monkeypatch.setattr(evaluating, "LONGEST_READ", 4096)
    again = evaluate(engine, bundle, suite, lambda *_: None)
    assert again == found


def test_a_plain_model_says_what_it_has_none_of(tmp_path):
    plain = write_bundle(tmp_path / "plain", mimo_spec())
    with Engine.open(plain.path, "reference") as engine:
        found = evaluate(engine, plain, Suite("mine", texts=("Some text.",)), lambda *_: None)
    assert not found.drafts and not found.skipped and "neither MTP heads nor gates" in found.left_out[0]


def test_commands_need_a_chat_template(tmp_path):
    bare = write_bundle(tmp_path / "bare", mimo_spec(), template=None)
    suite = Suite("mine", (Command(({"role": "user", "content": "x"},), None, "y"),))
    with Engine.open(bare.path, "reference") as engine, pytest.raises(BadInputError, match="no chat template, which"):
        evaluate(engine, bare, suite, lambda *_: None)


def test_random_weights_are_not_the_same_for_every_head():
    """Otherwise the tests above would not notice heads that are mixed up."""
    tensors = RandomWeights(SPEC, 3).tensors
    assert not torch.equal(tensors["mtp.0.proj"], tensors["mtp.1.proj"])
