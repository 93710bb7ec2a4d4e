"""Where a gate's block that is turned around explains another token."""

import numpy as np

from mimo_edge.bundle import BUILT_IN
from mimo_edge.request import SamplingParams
from scripts._gate_ties import GateTies

TEXT = list(range(300, 320))
EPSILON = 2e-4  # two blocks of this text are that close to their threshold


def test_a_block_near_its_threshold_explains_a_token_that_it_decides_on_and_no_other():
    ties, greedy = GateTies(BUILT_IN), SamplingParams()
    logits, near = ties.evaluate(TEXT, EPSILON)
    assert near
    turned = ties.evaluate(TEXT, EPSILON, near[0])[0]
    assert 0 < np.abs(turned - logits).max() < 1
    best, worst = int(logits.argmax()), int(logits.argmin())
    assert not ties.explain(TEXT, (best, worst), greedy, EPSILON)
    assert ties.explain(TEXT, (best, best), greedy, EPSILON)
    assert not ties.explain(TEXT, (best, best), greedy, 0.0)
