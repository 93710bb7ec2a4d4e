"""Which differences between replies are ties."""

import numpy as np
import pytest

from mimo_edge.decoding.sampling import Sampler
from mimo_edge.evaluation.ties import first_difference, margin
from mimo_edge.request import SamplingParams

SETTINGS = [
    SamplingParams(),
    SamplingParams(0.7, seed=1),
    SamplingParams(1.0, top_k=5, seed=2),
    SamplingParams(1.0, top_p=0.5, seed=3),
    SamplingParams(1.0, min_p=0.2, seed=4),
    SamplingParams(0.9, repetition_penalty=1.4, seed=5),
]


def test_the_first_difference_is_found_also_where_one_reply_is_longer():
    assert first_difference((1, 2), (1, 2)) is None
    assert first_difference((1, 2, 3), (1, 5, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2


@pytest.mark.parametrize("params", SETTINGS)
def test_a_token_that_noise_turned_into_another_is_within_twice_the_noise(params):
    """Whatever a small change of the logits leads to has a small margin, and most other tokens have a large one."""
    rng = np.random.default_rng(7)
    turned, size = 0, 5e-2
    seen = (3, 5)
    for position in range(1500):
        logits = rng.normal(0, 1, 12).astype(np.float32)
        moved = logits + rng.uniform(-size, size, 12).astype(np.float32)
        ours, theirs = (Sampler(params, seen).sample(x, position) for x in (logits, moved))
        if ours != theirs:
            turned += 1
            by = margin(logits, (ours, theirs), position, params, seen)
            temperature = params.temperature or 1
            assert by <= 2.6 * size * max(1, params.repetition_penalty) / temperature
    assert turned > 5


@pytest.mark.parametrize("params", SETTINGS[:3])
def test_a_wrong_token_has_a_wide_margin(params):
    rng = np.random.default_rng(8)
    wide = []
    for position in range(300):
        logits = rng.normal(0, 1, 12).astype(np.float32)
        ours = Sampler(params, ()).sample(logits, position)
        wide.append(margin(logits, (ours, (ours + 1) % 12), position, params) > 0.02)
    assert np.mean(wide) > 0.9


def test_choosing_behind_drafts_is_sampling_behind_them():
    params = SamplingParams(1.0, repetition_penalty=2.0, seed=9)
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 1, (3, 12)).astype(np.float32)
    plain, drafting = Sampler(params, (1,)), Sampler(params, (1,))
    drafts: list[int] = []
    for i, row in enumerate(logits):
        drafts.append(drafting.choose(row, 10 + i, drafts))
    assert drafts == [plain.sample(row, 10 + i) for i, row in enumerate(logits)]
    assert drafting.choose(logits[0], 10) == drafts[0], "nothing is remembered"
