"""The sampling kernels in Triton's interpreter against the host's sampler."""

import numpy as np
import pytest
import torch
from launching import run

from mimo_edge.decoding.sampling import candidates
from mimo_edge.kernels.sampling import reference, variants
from mimo_edge.request import SamplingParams

GREEDY = SamplingParams()
VOCAB = 3001  # three chunks, the last one ragged


def logits_of(rows, seed, spread=4.0, vocab=VOCAB):
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def sample(logits, params, positions, sequences=None):
    """Tokens chosen by the kernels; params of each sequence. Also the limits that `threshold` found."""
    rows, vocab = logits.shape
    count = variants.parts(vocab)
    words = [(p.top_k, p.seed & 0xFFFFFFFF, p.seed >> 32) for p in params]
    tensors = {
        "logits": logits.contiguous(),
        "positions": torch.tensor([-9, -9, *positions], dtype=torch.int32),  # two that are others'
        "sequences": torch.tensor(sequences or [0] * rows, dtype=torch.int32),
        "floats": torch.tensor([(p.temperature, p.top_p, p.min_p) for p in params], dtype=torch.float32),
        "integers": torch.from_numpy(np.array(words, dtype=np.int64).astype(np.uint32).view(np.int32)),
        "limits": torch.full((rows, 2), torch.nan),
        "tokens": torch.full((3 + rows,), -7, dtype=torch.int32),
    }
    for name, shape in (("tops", (rows, count, variants.KEPT)), ("masses", (rows, count)), ("scores", (rows, count))):
        tensors[name] = torch.full(shape, torch.nan)
    tensors["ids"] = torch.full((rows, count), -7, dtype=torch.int32)
    of = {"sequences": "sequences", "floats": "floats", "logits": "logits"}
    more = {"integers": "integers", "limits": "limits"}
    kept, scores = {"tops": "tops", "masses": "masses"}, {"values": "scores", "ids": "ids"}
    run(
        tensors,
        variants.chunk_top(rows, vocab, **of, **kept),
        variants.threshold(rows, vocab, **of, **kept, **more),
        variants.perturb(rows, vocab, **of, **more, positions="positions", first=2, **scores),
        variants.best(rows, count, **scores, tokens="tokens", first=3),
    )
    assert tensors["tokens"][:3].tolist() == [-7] * 3
    return tensors["tokens"][3:].tolist(), tensors["limits"]


def greedy(logits):
    rows, vocab = logits.shape
    count = variants.parts(vocab)
    tensors = {"logits": logits, "values": torch.full((rows, count), torch.nan)}
    tensors |= {n: torch.full(s, -7, dtype=torch.int32) for n, s in (("ids", (rows, count)), ("tokens", (rows,)))}
    run(
        tensors,
        variants.chunk_best(rows, vocab, logits="logits", values="values", ids="ids"),
        variants.best(rows, count, values="values", ids="ids", tokens="tokens"),
    )
    return tensors["tokens"].tolist()


@pytest.mark.parametrize("vocab", [5, 1024, 1025, VOCAB])
def test_greedy_takes_the_best(vocab):
    logits = logits_of(3, vocab, vocab=vocab)
    assert greedy(logits) == logits.argmax(-1).tolist()


def test_greedy_takes_the_lowest_of_equal_logits():
    logits = torch.zeros(3, VOCAB)
    logits[0, [70, 69, 2000]] = 5.0
    logits[1, [1024, 2999]] = 5.0
    assert greedy(logits) == [69, 1024, 0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_give_no_token(value):
    logits = logits_of(2, 1)
    if value == -torch.inf:
        logits[1] = value
    else:
        logits[1, 1500] = value
    assert greedy(logits) == [int(logits[0].argmax()), -1]
    for params in (SamplingParams(temperature=1.0, top_k=5, top_p=0.9), GREEDY):
        assert sample(logits, [params], [3, 4])[0][1] == -1


SETTINGS = {
    "plain": SamplingParams(temperature=1.0, seed=3),
    "hot": SamplingParams(temperature=3.0, seed=2**63 - 1),
    "cold": SamplingParams(temperature=0.05, seed=2**31),
    "top-k": SamplingParams(temperature=1.5, top_k=7, seed=1),
    "top-1": SamplingParams(temperature=1.5, top_k=1, seed=1),
    "top-p": SamplingParams(temperature=2.0, top_p=0.8, seed=2**32 + 5),
    "min-p": SamplingParams(temperature=2.0, min_p=0.02, seed=9),
    "few": SamplingParams(temperature=0.7, top_k=20, top_p=0.95, seed=5),
    "all": SamplingParams(temperature=1.2, top_k=200, top_p=0.93, min_p=0.01, seed=77),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_sample_is_the_hosts(name):
    """With these seeds no two candidates are near a tie, so every token is equal."""
    params, logits, positions = SETTINGS[name], logits_of(4, 5), [0, 1, 17, 2_000_000]
    got, limits = sample(logits, [params], positions)
    assert got == [reference.sample(x, params, p + 1) for x, p in zip(logits, positions, strict=True)]
    for x, (highest, limit) in zip(logits, limits.tolist(), strict=True):
        kept = np.sort(candidates(x.numpy(), params)[0])
        assert highest == float(x.max())
        assert np.array_equal(np.flatnonzero(x.numpy() >= limit), kept)


def test_rows_of_several_sequences_use_their_own_parameters():
    logits, params = logits_of(4, 6), [SETTINGS["all"], GREEDY, SETTINGS["hot"]]
    positions, sequences = [9, 9, 4, 10], [2, 0, 1, 2]
    got, _ = sample(logits, params, positions, sequences)
    rows = zip(logits, sequences, positions, strict=True)
    assert got == [reference.sample(x, params[s], p + 1) for x, s, p in rows]


def test_all_ties_at_the_edge_of_top_k_are_kept():
    logits = torch.full((1, VOCAB), -3.0)
    logits[0, [5, 900, 2500]] = 1.0
    logits[0, 40] = 2.0
    _, limits = sample(logits, [SamplingParams(temperature=1.0, top_k=2)], [0])
    assert limits.tolist() == [[2.0, 1.0]]


def test_samples_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    logits = probabilities.log().repeat(100, 1)
    got, _ = sample(logits, [SamplingParams(temperature=1.0, seed=11)], list(range(100)))
    share = torch.bincount(torch.tensor(got), minlength=4) / 100
    assert (share - probabilities).abs().max() < 0.15  # three standard deviations


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_accepted_while_they_equal_the_samples(seed):
    rng = np.random.default_rng(seed)
    for _ in range(6):
        sequences = rng.permutation(np.repeat([0, 2, 1], [4, 3, 1]))  # sequence 3 has no rows
        positions = np.zeros(8, dtype=np.int64)
        for s in range(3):
            positions[sequences == s] = 50 * s + np.arange((sequences == s).sum())
        padding = rng.random(8) < 0.1
        positions[padding] = -1
        tokens, sampled = rng.integers(0, 2, 8), rng.integers(0, 2, 8)
        first, at = (3, 2) if seed % 2 else (0, 0)
        padded = (("tokens", np.append(np.full(first, 5), tokens)), ("sampled", np.append(np.full(at, 5), sampled)))
        tensors = {n: torch.from_numpy(v.astype(np.int32)) for n, v in padded}
        tensors |= {"positions": torch.from_numpy(positions.astype(np.int32))}
        tensors |= {"sequences": torch.from_numpy(sequences.astype(np.int32))}
        tensors["out"] = torch.full((4, 2), -7, dtype=torch.int32)
        names = {n: n for n in tensors}
        run(tensors, variants.accept(8, 4, first=first, at=at, **names))
        for s, got in enumerate(tensors["out"].tolist()):
            mine = (sequences == s) & ~padding
            want = (
                reference.accept(torch.from_numpy(tokens[mine]), torch.from_numpy(sampled[mine]))
                if mine.any()
                else (0, -1)
            )
            assert tuple(got) == want
