"""Where a gate's block that is turned around explains another token."""

import numpy as np
from _gate_ties import GateTies

from mimo_edge.bundle import BUILT_IN
from mimo_edge.evaluation.ties import margin
from mimo_edge.request import SamplingParams

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
    order = np.argsort(logits)[::-1]
    pairs = list(zip(order[:-1].tolist(), order[1:].tolist(), strict=True))
    swapped = [p for p in pairs if margin(logits, p, 0, greedy) > EPSILON and margin(turned, p, 0, greedy) < 0]
    assert swapped, "the block decides between no two neighbours"
    assert ties.explain(TEXT, swapped[0], greedy, EPSILON)
