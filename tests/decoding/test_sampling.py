"""Sampling against exact distributions and against transformers' processors."""

import numpy as np
import pytest

from mimo_edge.decoding import sampling
from mimo_edge.decoding.sampling import Sampler, candidates, gumbel
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.request import SamplingParams


def fresh_logits(size, seed=None, spread=3.0):
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def distinct_logits(size):
    """No two are equal: which of equal ones a nucleus keeps is a matter of taste."""
    rng = np.random.default_rng()
    return rng.permutation(np.unique(rng.standard_normal(size + size // 8 + 8).astype(np.float32) * 3))[:size]


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def distribution(logits, params):
    """Processed probabilities over the whole vocabulary, float64."""
    out = np.zeros(logits.size)
    ids, scores = candidates(logits, params)
    out[ids] = softmax(scores)
    return out


def theirs(logits, params, seen=()):
    """The same through transformers."""
    import torch
    from transformers import generation

    scores = torch.from_numpy(logits.astype(np.float64))[None]
    if params.repetition_penalty != 1:
        ids = torch.tensor([list(seen)])
        scores = generation.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    scores = generation.TemperatureLogitsWarper(float(params.temperature))(None, scores)
    if params.top_k:
        scores = generation.TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = generation.TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0:
        scores = generation.MinPLogitsWarper(params.min_p)(None, scores)
    return torch.softmax(scores, -1)[0].numpy()


def chi_square(counts, expected):
    """Pearson's statistic over cells of 5 or more expected draws, the others joined, and its 0.99999 quantile
    (Wilson-Hilferty)."""
    big = expected >= 5
    counts = np.append(counts[big], counts[~big].sum())
    expected = np.append(expected[big], expected[~big].sum())
    if expected[-1] < 1e-9:
        assert counts[-1] == 0, "an impossible token was drawn"
        counts, expected = counts[:-1], expected[:-1]
    degrees = expected.size - 1
    if degrees == 0:
        return 0.0, 0.0
    limit = degrees * (1 - 2 / (9 * degrees) + 4.265 * np.sqrt(2 / (9 * degrees))) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), limit


def draws(logits, params, number, start=0):
    sampler = Sampler(params, ())
    return np.array([sampler.sample(logits, position) for position in range(start, start + number)])


CASES = [
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=2.5),
    SamplingParams(temperature=1, top_k=7),
    SamplingParams(temperature=1, top_k=1),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(temperature=1, top_p=1e-6),
    SamplingParams(temperature=1, top_p=0.999),
    SamplingParams(temperature=1, min_p=0.05),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.3, top_k=1000, top_p=0.5, min_p=0.3),
]


def name(params):
    return f"t{params.temperature}-k{params.top_k}-p{params.top_p}-m{params.min_p}"


@pytest.mark.parametrize("params", CASES, ids=name)
@pytest.mark.parametrize("size", [5, 97, 4001, 262_147])
def test_the_distribution_is_that_of_transformers(params, size):
    if params.top_k >= size:
        params = SamplingParams(params.temperature, size - 1, params.top_p, params.min_p)
    logits = distinct_logits(size)
    ours, expected = distribution(logits, params), theirs(logits, params)
    assert np.array_equal(ours > 0, expected > 0)
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_the_repetition_penalty_is_that_of_transformers(penalty):
    logits, seen = fresh_logits(301), [5, 5, 17, 300, 0]
    params = SamplingParams(temperature=1, repetition_penalty=penalty)
    ours = distribution(sampling.penalise(logits, np.array(sorted(set(seen))), penalty), params)
    np.testing.assert_allclose(ours, theirs(logits, params, seen), rtol=1e-5)
    assert not np.allclose(ours, theirs(logits, SamplingParams(temperature=1)), rtol=1e-2)


def test_a_flat_distribution_needs_more_than_the_first_candidates():
    """90 % of 20,000 nearly equal tokens: the nucleus is larger than every partial sort."""
    logits = distinct_logits(20_000) / 300
    kept = distribution(logits, SamplingParams(temperature=1, top_p=0.9)) > 0
    assert 17_500 < kept.sum() < 18_500
    assert np.array_equal(kept, theirs(logits, SamplingParams(temperature=1, top_p=0.9)) > 0)


def test_ties_at_the_edge_of_top_k_are_all_kept():
    logits = np.array([3, 1, 2, 2, 2, 0], np.float32)
    assert candidates(logits, SamplingParams(temperature=1, top_k=2))[0].tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize("size", [64, 100, 6_400, 70_001])
@pytest.mark.parametrize("spread", ["random", "equal", "ascending", "minus infinity"])
def test_the_kth_largest_is_exact(size, spread):
    values = fresh_logits(size)
    if spread == "equal":
        values[:] = 1
    elif spread == "ascending":
        values = np.sort(values)
    elif spread == "minus infinity":
        values[: size // 2] = -np.inf
    ordered = np.sort(values)[::-1]
    for k in {1, 2, size // 64, size // 64 + 1, size // 3, size}:
        assert sampling._kth_largest(values, k) == ordered[k - 1]


@pytest.mark.parametrize("params", CASES, ids=name)
def test_draws_follow_the_distribution(params):
    logits = fresh_logits(60, seed=1, spread=1.5)
    if params.top_k > 60:
        params = SamplingParams(params.temperature, 59, params.top_p, params.min_p)
    number = 12_000
    counts = np.bincount(draws(logits, params, number), minlength=60)
    statistic, limit = chi_square(counts, theirs(logits, params) * number)
    assert statistic <= limit


@pytest.mark.parametrize("bias", ["temperature", "noise", "one token"])
def test_the_chi_square_notices_a_biased_rule(bias, monkeypatch):
    logits, params, number = fresh_logits(60, seed=1, spread=1.5), SamplingParams(temperature=1), 20_000
    expected = theirs(logits, params) * number
    if bias == "temperature":
        params = SamplingParams(temperature=1.06)
    elif bias == "noise":  # a normal of the same mean and variance as Gumbel's
        normal = np.random.default_rng(0)
        monkeypatch.setattr(sampling, "gumbel", lambda s, p, ids: normal.normal(0.577, 1.283, len(ids)))
    else:
        logits = logits.copy()
        logits[logits.argmax()] += 0.2
    statistic, limit = chi_square(np.bincount(draws(logits, params, number), minlength=60), expected)
    assert statistic > limit


@pytest.mark.parametrize("lag", [1, 2, 64])
def test_draws_at_different_positions_are_independent(lag):
    logits, number = fresh_logits(8, seed=2, spread=1.0), 20_000
    tokens = draws(logits, SamplingParams(temperature=1, seed=9), number + lag)
    pairs = np.bincount(tokens[:number] * 8 + tokens[lag : number + lag], minlength=64)
    p = softmax(logits.astype(np.float64))
    statistic, limit = chi_square(pairs, np.outer(p, p).ravel() * number)
    assert statistic <= limit


def test_draws_with_neighbouring_seeds_are_independent():
    logits, number = fresh_logits(8, seed=2, spread=1.0), 10_000
    tokens = [draws(logits, SamplingParams(temperature=1, seed=s), number) for s in (0, 1)]
    pairs = np.bincount(tokens[0] * 8 + tokens[1], minlength=64)
    p = softmax(logits.astype(np.float64))
    statistic, limit = chi_square(pairs, np.outer(p, p).ravel() * number)
    assert statistic <= limit


def test_noise_is_a_function_of_seed_position_and_token_alone():
    ids = np.arange(1000)
    noise = gumbel(3, 17, ids)
    assert np.array_equal(gumbel(3, 17, ids[::7]), noise[::7])
    assert np.isfinite(gumbel(2**63 - 1, 2**31, np.arange(262_144))).all()
    for other in (gumbel(4, 17, ids), gumbel(3, 18, ids)):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.15


def test_noise_is_gumbel_distributed():
    noise = np.sort(gumbel(1, 1, np.arange(200_000)))
    uniform = np.exp(-np.exp(-noise))
    distance = np.abs(uniform - (np.arange(noise.size) + 0.5) / noise.size).max()
    assert distance < 1.95 / np.sqrt(noise.size)  # Kolmogorov-Smirnov, 0.999


def test_filtering_does_not_change_the_sample_when_it_survives():
    logits = fresh_logits(5_000, seed=4)
    for position in range(50):
        free = Sampler(SamplingParams(temperature=1, seed=8), ()).sample(logits, position)
        filtered = SamplingParams(temperature=1, seed=8, top_k=300)
        if free in candidates(logits, filtered)[0]:
            assert Sampler(filtered, ()).sample(logits, position) == free


def test_greedy_takes_the_first_of_the_best_and_ignores_the_filters():
    logits = np.array([0, 7, 7, 1], np.float32)
    assert Sampler(SamplingParams(top_k=1, top_p=0.1, min_p=0.9, seed=5), ()).sample(logits, 0) == 1


def test_the_penalty_covers_prompt_and_generated_tokens():
    sampler = Sampler(SamplingParams(repetition_penalty=10), [0])
    logits = np.array([5, 4, 3, -1], np.float32)
    assert [sampler.sample(logits, p) for p in range(4)] == [1, 2, 0, 0]
    assert logits.tolist() == [5, 4, 3, -1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 100])
def test_extreme_temperatures_stay_finite(temperature):
    logits = fresh_logits(500, seed=6)
    tokens = draws(logits, SamplingParams(temperature=temperature), 20)
    assert (set(tokens) == {int(logits.argmax())}) == (temperature < 1)


def test_masked_tokens_are_never_drawn():
    logits = np.full(300, -np.inf, np.float32)
    logits[[3, 299]] = 0
    assert set(draws(logits, SamplingParams(temperature=100), 50)) == {3, 299}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_single_bad_logit_is_an_error(bad, temperature):
    logits = fresh_logits(500)
    logits[321] = bad
    with pytest.raises(MimoEdgeError, match="position 7"):
        Sampler(SamplingParams(temperature=temperature), ()).sample(logits, 7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 101),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", True),
    ],
)
def test_values_out_of_range_are_named(field, value):
    with pytest.raises(BadInputError, match=rf"^{field} .* is out of range \(allowed: .*\)$"):
        SamplingParams(**{field: value})


def test_values_at_the_edges_are_allowed():
    SamplingParams(100, 0, 1, 0, 0.01, 2**63 - 1)
    SamplingParams(0, 10**9, 1e-9, 0.999, 100, 0)


@pytest.mark.parametrize("params", CASES, ids=name)
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_what_a_mask_forbids_is_out_before_everything_else(params, share):
    """As if those logits were minus infinity, and the allowed ones alone share the probability."""
    logits, rng = fresh_logits(4001, seed=3), np.random.default_rng(5)
    mask = rng.random(logits.size) < share
    masked = np.where(mask, logits, np.float32(-np.inf))
    for position in range(20):
        token = Sampler(params, ()).choose(logits, position, mask=mask)
        assert mask[token] and token == Sampler(params, ()).choose(masked, position)
    assert np.array_equal(logits, fresh_logits(4001, seed=3))
    kept = distribution(masked, params)
    assert not kept[~mask].any() and abs(kept.sum() - 1) < 1e-9


def test_a_mask_of_one_leaves_no_choice_whatever_the_logits_and_the_seed():
    mask = np.zeros(300, bool)
    mask[17] = True
    logits = fresh_logits(300)
    logits[17] = logits.min() - 30
    for params in (*CASES, SamplingParams(), SamplingParams(temperature=1, repetition_penalty=1.5)):
        assert Sampler(params, [17, 3]).sample(logits, 5, mask) == 17


def test_the_best_allowed_token_is_taken_and_remembered():
    logits = np.array([5, 4, 3, 2], np.float32)
    mask = np.array([False, True, True, False])
    assert Sampler(SamplingParams(), ()).sample(logits, 0, mask) == 1
    sampler = Sampler(SamplingParams(repetition_penalty=10), ())
    assert [sampler.sample(logits, i, mask) for i in range(2)] == [1, 2]
    sampler = Sampler(SamplingParams(repetition_penalty=10), ())
    sampler.remember(1)
    assert sampler.sample(logits, 0, mask) == 2


def test_log_probabilities_are_those_of_the_logits():
    logits = fresh_logits(5000, spread=8.0)
    exact = np.log(softmax(logits.astype(np.float64)))
    got = [sampling.log_probability(logits, t) for t in range(0, 5000, 37)]
    np.testing.assert_allclose(got, exact[::37], rtol=1e-6, atol=1e-6)
    assert sampling.log_probability(np.array([0, -np.inf], np.float32), 0) == 0
