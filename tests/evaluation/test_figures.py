"""The arithmetic under an evaluation: accepted drafts, loops, intervals, closeness of texts."""

from __future__ import annotations

import numpy as np
import pytest

from mimo_edge.evaluation.drafts import LONGEST_PERIOD, TAIL, acceptance, agreements, loops
from mimo_edge.evaluation.intervals import interval
from mimo_edge.evaluation.texts import bleu, chrf, rouge_l


def test_acceptance_by_hand():
    # pending token 0: both drafts right (tokens 1, 2), token 3 comes with the step; pending 3: first draft wrong
    agree = np.array([[1, 0, 0, 0, 1, 0], [1, 0, 0, 1, 0, 0]], bool)
    got = acceptance([agree])
    assert (got.tokens, got.steps, got.accepted) == (5, 3, (2, 1))
    assert got.length == pytest.approx(5 / 3) and got.by_position == pytest.approx((2 / 3, 1 / 3))
    assert acceptance([agree], heads=1).accepted == (2,) and acceptance([agree], heads=1).steps == 4


@pytest.mark.parametrize("heads", [1, 3], ids=lambda n: f"{n} heads")
def test_every_token_comes_from_a_step_or_a_draft(heads):
    rng = np.random.default_rng(heads)
    texts = []
    for n in rng.integers(1, 40, 50):
        tokens = rng.integers(0, 3, n).tolist()
        texts.append(agreements(tokens, rng.integers(0, 3, (heads, n))))
    got = acceptance(texts)
    assert got.tokens == sum(t.shape[1] - 1 for t in texts)
    # a step whose last token is an accepted draft at the very end has none of its own
    assert 0 <= got.steps + sum(got.accepted) - got.tokens <= len(texts)
    assert list(got.accepted) == sorted(got.accepted, reverse=True)


def test_no_texts_and_one_token_texts_have_no_length():
    assert acceptance([]).accepted == () and np.isnan(acceptance([]).length)
    assert np.isnan(acceptance([np.ones((3, 1), bool)]).length)


def test_drafts_behind_the_end_never_agree():
    np.testing.assert_array_equal(
        agreements([5, 6, 7], np.array([[6, 7, 7], [7, 7, 7], [7, 7, 7], [7, 7, 7]])),
        [[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]],
    )


@pytest.mark.parametrize("period", [1, 2, 7, LONGEST_PERIOD])
def test_loops_are_found_behind_any_beginning(period):
    rng = np.random.default_rng(period)
    tail = rng.permutation(period).tolist() * TAIL
    text = [*rng.integers(100, 200, 30).tolist(), *tail[:TAIL]]
    assert loops(text)
    text[-3] = 999
    assert not loops(text)


def test_short_and_fresh_texts_do_not_loop():
    assert not loops([1] * (TAIL - 1))
    assert not loops(list(range(200)))
    assert not loops(list(range(LONGEST_PERIOD + 1)) * 4)


def test_an_interval_is_the_normal_one_for_many_samples():
    x = np.random.default_rng(3).random(900) < 0.9
    low, high = interval(x)
    error = 1.96 * np.sqrt(x.mean() * (1 - x.mean()) / len(x))
    assert low == pytest.approx(x.mean() - error, abs=0.004) and high == pytest.approx(x.mean() + error, abs=0.004)
    assert interval(x) == (low, high) != interval(x, seed=1)


def test_equal_samples_are_a_shortcut_to_the_same_interval():
    x = np.random.default_rng(5).integers(0, 3, 700)
    apart = x + 1e-9 * np.arange(700)  # all different
    np.testing.assert_allclose(interval(x), interval(apart), atol=0.012)
    assert interval(x) != pytest.approx((x.mean(), x.mean()), abs=0.04)


def test_a_ratio_is_resampled_as_a_whole():
    """Numerator and denominator of a sample stay together: a constant ratio has no spread."""
    for most in (5, 5000):  # many equal ones, and few
        size = np.random.default_rng(4).integers(1, most, 200)
        assert interval(3 * size, size) == pytest.approx((3, 3))


@pytest.mark.parametrize(
    ("reply", "reference", "f1"),
    [
        ("a c d", "a b c d", 2 * 1 * 0.75 / 1.75),
        ("Sure, the light is ON!", "sure the light is on", 1.0),
        ("打开灯", "打开餐厅灯", 2 * 1 * 0.6 / 1.6),
        ("", "yes", 0.0),
        ("ünïcode straße", "ünïcode straße 2", 0.8),
    ],
)
def test_rouge_l_knows_words_of_any_language(reply, reference, f1):
    assert rouge_l([reply, reference], [reference, reference]) == pytest.approx([f1, 1.0])


def test_bleu_and_chrf_of_a_corpus():
    references = ["turning on the light in the kitchen", "没问题 我来打开餐厅的灯"]
    assert bleu(references, references) == pytest.approx(100) and chrf(references, references) == pytest.approx(100)
    worse = ["turning on the light in the bathroom", "没问题 我来打开客厅的灯"]
    assert 40 < bleu(worse, references) < 95 and 40 < chrf(worse, references) < 95
