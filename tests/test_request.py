"""Values of wrong types are errors of one line, like wrong values."""

import math

import numpy as np
import pytest

from mimo_edge.errors import BadInputError
from mimo_edge.request import Request, SamplingParams


@pytest.mark.parametrize(
    "options",
    [{"deadline": v} for v in ("x", True, math.nan, [], -1)]
    + [{"max_tokens": v} for v in ("x", True, 2.0, None)]
    + [{"sampling": v} for v in ("x", None, {})],
    ids=str,
)
def test_requests(options):
    [name] = options
    with pytest.raises(BadInputError, match=name):
        Request((1,), **options)


@pytest.mark.parametrize("value", ["x", True, math.nan, None])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "seed", "top_k"])
def test_sampling(name, value):
    with pytest.raises(BadInputError, match=name):
        SamplingParams(**{name: value})


def test_numbers_of_numpy_are_numbers():
    assert SamplingParams(temperature=np.float32(0.5)).temperature == 0.5
    assert Request((1,), deadline=np.float64(2)).deadline == 2
