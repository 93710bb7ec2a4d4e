"""The measurement of the reference model: its shortcuts agree with plain decoding, and its bookkeeping adds up."""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path

import numpy as np
import pytest
import torch

from mimo_edge.evaluation.drafts import acceptance, agreements
from scripts.reference_model import checkpoint, evaluate
from scripts.reference_model.packing import ACTION, GENERAL, PROMPT, REPLY, Rows, general_rows, sample_rows
from scripts.reference_model.quality import measure as measuring
from scripts.reference_model.quality.decode import drafts, generate, greedy, sampled
from scripts.reference_model.quality.subject import SORTS, Subject
from scripts.reference_model.quality.texts import find_answers, loss_chunks
from scripts.reference_model.shape import tiny_spec

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other
VOCAB, LENGTH = 300, 96
SPEC = tiny_spec(VOCAB)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    from scripts.reference_model.model import Model

    torch.manual_seed(5)
    out = {k: v.clone() for k, v in Model(SPEC).state_dict().items()}
    for name, value in out.items():  # o and down start at 0, gates open: nothing would depend on them
        if name.endswith((".o", ".down")):
            value.copy_(torch.randn_like(value) * value.shape[1] ** -0.5)
        if name.endswith("gate.bias"):
            value.copy_(torch.randn_like(value) * 0.3)
    return out


@pytest.fixture(scope="module")
def subject(weights) -> Subject:
    made = Subject(SPEC, torch.device("cpu"), batch=2, length=LENGTH)
    made.load(weights)
    return made


def samples(rng: np.random.Generator, count: int) -> list[tuple[list[int], list[int]]]:
    out = []
    for _ in range(count):
        sizes = rng.integers(3, 9, 3)
        kinds = [k for k, n in zip((PROMPT, ACTION, REPLY), sizes, strict=True) for _ in range(n)]
        out.append((rng.integers(3, VOCAB, len(kinds)).tolist(), kinds))
    return out


def twice(rows: Rows) -> Rows:
    return Rows(*(np.repeat(x, 2, 0) for x in (rows.tokens, rows.document, rows.kinds, rows.position)))


def pick(rows: Rows, n: int) -> Rows:
    return Rows(*(x[:n] for x in (rows.tokens, rows.document, rows.kinds, rows.position)))


def test_gate_counts_are_those_of_the_masks(subject):
    rng = np.random.default_rng(1)
    rows = sample_rows(samples(rng, 9), LENGTH)  # 2 rows in one batch
    masks = []
    hooks = [
        layer.gate.register_forward_hook(lambda _, __, out: masks.append(out[0].numpy() > 0))
        for layer in subject.model.layers
    ]
    found = subject.run(pick(rows, 2), dense=False)
    for hook in hooks:
        hook.remove()
    rows = pick(rows, 2)
    for keep, counts in zip(masks, found.counts, strict=True):
        for s, kinds in enumerate(((PROMPT,), (ACTION, REPLY), (GENERAL,))):
            sums = np.zeros(6)
            for r, p in zip(
                *np.nonzero(np.isin(rows.kinds[:, :LENGTH], kinds) & (rows.tokens[:, :LENGTH] > 0)), strict=True
            ):
                for i, back in enumerate((0, 1, 3)):
                    if p >= back and rows.document[r, p] == rows.document[r, p - back]:
                        sums[2 * i : 2 * i + 2] += keep[r, p - back : p + 1].any(0).mean(), 1
            np.testing.assert_allclose(counts[s], sums, rtol=1e-5, err_msg=SORTS[s])
    assert 0.1 < found.counts[:, 0, 0].sum() / found.counts[:, 0, 1].sum() < 0.9


def test_output_biases_of_a_calibrated_bundle_take_part(subject, weights):
    from dataclasses import replace

    from mimo_edge.backends import oracle
    from mimo_edge.params import parameters

    spec = replace(SPEC, output_bias=True)
    torch.manual_seed(9)
    biased = {p.name: weights.get(p.name, torch.randn(p.shape) * 0.3) for p in parameters(spec)}
    assert sum(n.endswith(("o.bias", "down.bias")) for n in biased) == 2 * (4 + 3)

    class Held:
        get = staticmethod(biased.__getitem__)

        @staticmethod
        def rows(name, index):
            return biased[name][index]

    tokens = np.random.default_rng(10).integers(3, VOCAB, 40)
    rows = sample_rows([(tokens.tolist(), [GENERAL] * 40)], LENGTH)
    subject.load(biased)
    hidden, _, _ = subject.hidden(twice(rows), False)
    with torch.no_grad():
        told = oracle.forward(spec, Held(), torch.from_numpy(tokens), torch.arange(40), [None] * 4).logits
        head, *_ = oracle.mtp(
            spec,
            Held(),
            1,
            oracle.forward(spec, Held(), torch.from_numpy(tokens), torch.arange(40), [None] * 4).hidden[:-2],
            torch.from_numpy(tokens[2:]),
            torch.arange(38),
            None,
        )
    for ours, theirs in ((hidden[0][0, :40], told), (hidden[2][0, :38], head)):
        ours = subject.logits(ours)
        assert (ours - theirs).norm() / theirs.norm() < 1e-4
    made = generate(subject, [tokens.tolist()] * 2, 1, False, greedy)
    assert made[0, 0] == int(told[-1].argmax())
    subject.load(weights)  # and they are gone again
    hidden, _, _ = subject.hidden(twice(rows), False)
    assert (subject.logits(hidden[0][0, :40]) - told).norm() / told.norm() > 1e-2


def test_matches_count_what_the_training_code_counts(subject):
    rows = sample_rows(samples(np.random.default_rng(2), 12), LENGTH)
    found = subject.run(rows, dense=True)
    best = found.best.copy()
    rng = np.random.default_rng(3)
    for j in range(len(best)):  # a random model is never right: let it be, often
        right = np.stack([rows.tokens[:, 1 + j : 1 + j + LENGTH]] * 1)[0].astype(np.int16)
        best[j] = np.where(rng.random(right.shape) < 0.8, right[:, :LENGTH], best[j])
    told = evaluate.commands(rows, evaluate.Predictions(best.astype(np.int64), found.nll, (0.0, 0.0, 0.0)))
    answers = find_answers(rows, LENGTH)
    matches = np.split(answers.matches(rows, best), (answers.last - answers.first + 1).cumsum()[:-1], axis=1)
    assert len(told) == len(matches) == 12
    for command, match, action in zip(told, matches, answers.action, strict=True):
        assert command.action == match[0, :action].all() and command.reply == match[0, action:].all()
        got = acceptance([match[1:]])
        assert (got.tokens, got.steps, got.accepted) == (command.tokens, command.steps, command.accepted)


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "gated"])
def test_decoding_many_is_decoding_one(subject, dense):
    """With the cache, unequal prompts and padding, against whole forward passes of one sequence at a time."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(3, VOCAB, n).tolist() for n in (5, 17, 11)]
    made = generate(subject, prompts, 12, dense, greedy)
    for prompt, tokens in zip(prompts, made, strict=True):
        known = list(prompt)
        for token in tokens:
            rows = sample_rows([(known, [GENERAL] * len(known))], LENGTH)
            hidden, _, _ = subject.hidden(twice(rows), dense)
            assert int(subject.logits(hidden[0][0, len(known) - 1]).argmax()) == token
            known.append(int(token))


def test_drafts_are_the_heads_own_and_use_the_positions_noise(subject):
    rng = np.random.default_rng(6)
    prompts = rng.integers(3, VOCAB, (5, 9))
    made = generate(subject, prompts.tolist(), 10, True, sampled)
    found = drafts(subject, prompts, made, True, sampled)
    whole = np.concatenate([prompts, made], 1)
    for n, text in enumerate(whole):
        rows = sample_rows([(text.tolist(), [GENERAL] * len(text))], LENGTH)
        hidden, _, _ = subject.hidden(twice(rows), True)
        for i in range(3):
            for r in range(10 - 1 - i):
                logits = torch.zeros(5, VOCAB)
                logits[n] = subject.logits(hidden[1 + i][0, 8 + r])
                assert int(sampled(logits, r + 1 + i)[n]) == found[i, n, r]
    assert not np.array_equal(sampled(torch.zeros(5, VOCAB), 1), sampled(torch.zeros(5, VOCAB), 2))


def test_sampling_follows_the_distribution():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2])).expand(40_000, 3)
    counts = np.bincount(sampled(logits, 3).numpy(), minlength=3) / 40_000
    np.testing.assert_allclose(counts, [0.5, 0.3, 0.2], atol=0.01)


def test_shifted_thresholds_skip_the_share_asked_for(subject, weights):
    rows = general_rows(np.random.default_rng(7).integers(3, VOCAB, 20 * (LENGTH + 4)).astype(np.uint16), 1, 20, LENGTH)
    values = subject.run(rows, False).values
    for rule in ("all", "layer"):
        for share in (0.0, 0.6):
            subject.shift(measuring.shifts(values, share)[rule])
            counts = subject.run(rows, False).counts[:, SORTS.index("general")]
            kept = counts[:, 0] / counts[:, 1]
            first = kept[0] if rule == "layer" else kept.mean()
            assert first == pytest.approx(1 - share, abs=0.12), (rule, share)
    subject.load(weights)


def test_measure_from_end_to_end(tmp_path: Path, weights, monkeypatch):
    monkeypatch.setattr(measuring, "CONTINUATION", 20)
    monkeypatch.setattr(measuring, "LONGEST_REPLY", 15)
    monkeypatch.setattr(measuring, "SHARES", (0.0, 0.5))
    rng = np.random.default_rng(8)
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint.write(tmp_path / "float", SPEC, weights, "{}", "")
    encoded = samples(rng, 10)
    ids, kinds = (np.concatenate([e[i] for e in encoded]) for i in (0, 1))
    groups = {g: np.array(["a"] * 10) for g in ("intent", "variant", "language")}
    np.savez(
        tmp_path / "commands.npz",
        ids=ids.astype(np.uint16),
        kinds=kinds.astype(np.uint8),
        lengths=[len(e[0]) for e in encoded],
        **groups,
    )
    text = rng.integers(3, VOCAB, 4000).astype("<u2")
    text[::700] = 1
    (tmp_path / "heldout.u16.xz").write_bytes(lzma.compress(text.tobytes()))
    out = tmp_path / "out" / "a.npz"
    args = argparse.Namespace(
        data=tmp_path,
        float=tmp_path / "float",
        curve=["float"],
        heads=["float"],
        out=out,
        limit=8,
        length=256,
        batch=2,
        minutes=8.0,
        eager=False,
        brief=False,
    )
    measuring.measure(args, {})
    with np.load(out) as f:
        names = {k.rsplit("|", 1)[0] for k in f.files if "|" in k}
        assert names == {
            f"float|{v}" for v in ("dense", "gated", "shared", "all:0.0", "all:0.5", "layer:0.0", "layer:0.5")
        }
        dense, full = f["float|dense|matches"], f["float|all:0.0|matches"]
        np.testing.assert_array_equal(dense, full)  # nothing skipped is dense
        assert f["float|dense|greedy_drafts"].shape == (3, 8, 20)
        assert len(f["float|gated|reply_tokens"]) == f["float|gated|reply_lengths"].sum()
        losses = f["float|dense|losses"].sum(0)
        assert losses[1] > 1000 and 4 < losses[0] / losses[1] < 9
        shared = f["float|shared|sampled_drafts"][1:], f["float|gated|sampled_drafts"][1:]
        assert not np.array_equal(*shared)


def test_agreements_are_aligned_with_the_text():
    tokens = [5, 6, 7, 8]
    drafts_made = np.array([[6, 7, 0, -1], [7, 0, -1, -1]])
    agree = agreements(tokens, drafts_made)
    np.testing.assert_array_equal(agree, [[1, 1, 0, 0], [1, 0, 0, 0]])
    got = acceptance([agree])
    assert (got.tokens, got.steps, got.accepted) == (3, 1, (1, 1))


def test_losses_leave_first_tokens_out():
    rows = general_rows(np.array([1, 7, 8, 9, 1, 7, 8, 9, 9, 9, 9, 9], np.uint16), 1, 1, 8)
    nll = np.arange(8, dtype=np.float32)[None]
    np.testing.assert_array_equal(loss_chunks(rows, nll), [[28 - 3, 7]])  # position 3 predicts the next text's begin


def test_a_report_compares_command_by_command(tmp_path: Path, monkeypatch, capsys):
    """From made-up bits: three commands of which the second is wrong in float and the third in INT4."""
    from scripts.reference_model.quality import report as reporting

    rng = np.random.default_rng(11)
    length, action = np.array([4, 5, 6]), np.array([2, 2, 2])
    ref = reporting.Reference(["a", "b", "c"], ["x y", "y", "z"], length, action, np.array([False, True, False]), None)
    monkeypatch.setattr(reporting, "reference", lambda *_: ref)
    monkeypatch.setattr(reporting.Tokenizer, "from_file", lambda _: None)
    counts = np.tile([30.0, 40, 20, 30, 15, 20], (2, 3, 1))

    def arrays(model: str, wrong: int, loss: float) -> dict:
        bits = np.ones((4, 15), bool)
        bits[0, np.cumsum([0, *length])[wrong]] = False
        made = rng.integers(3, VOCAB, (6, 70)).astype(np.uint16)
        made[0] = 7  # loops
        found = {"matches": np.packbits(bits, axis=1), "losses": np.array([[loss * 50, 50], [loss * 70, 70]])}
        found |= {"greedy": made, "greedy_drafts": np.tile(np.roll(made, -1, 1), (3, 1, 1)).astype(np.int16)}
        return {f"{model}|dense|{k}": v for k, v in (found | {"counts": counts}).items()}

    np.savez(tmp_path / "a.npz", answers=[3, 15], **arrays("float", 1, 2.0))
    np.savez(tmp_path / "b.npz", answers=[3, 15], **arrays("rtn", 2, 2.1))
    reporting.report(
        argparse.Namespace(
            files=[tmp_path / "a.npz", tmp_path / "b.npz"],
            data=tmp_path,
            checkpoint=tmp_path,
            baseline="float",
            out=tmp_path / "out",
        )
    )
    found = json.loads((tmp_path / "out" / "quality.json").read_text())["rtn|dense"]
    assert found["commands"]["all"]["action"][0] == pytest.approx(200 / 3)
    assert found["commands"]["all"]["action_to_baseline"][0] == 0  # one better, one worse
    assert found["commands"]["rare"]["action_to_baseline"][0] == 100
    assert found["general"]["loss_to_baseline_percent"] == pytest.approx([100 * (np.exp(0.1) - 1)] * 3)
    assert found["skipped"]["commands"] == pytest.approx({"one": 25, "union2": 100 / 3, "union4": 25})
    drafts = found["drafts"]
    assert drafts["looping"] == pytest.approx(1 / 6)
    assert drafts["general_greedy"]["with_heads"][0] == pytest.approx(2, abs=0.1)  # only the first head is right
    assert drafts["general_greedy"]["length"][0] == pytest.approx(2, abs=0.1)
    assert (tmp_path / "out" / "quality_against_skipping.png").stat().st_size > 1000
    assert "rtn|dense" in capsys.readouterr().out
