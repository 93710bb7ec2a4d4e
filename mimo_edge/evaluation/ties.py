"""When two replies that should be equal may differ: where rounding alone decides between two tokens.

Logits of the same row differ in their last bits with the number of rows of a step. A token may turn into another one if
these two, with their noise, are closer than an epsilon, or if one of them is that close to the edge of top-k, top-p or
min-p. Of two replies the first position where they differ is judged; what follows is another text.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mimo_edge.decoding.sampling import gumbel, penalise
from mimo_edge.request import SamplingParams


def first_difference(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    """Index of the first token that differs; None if the replies are equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def margin(
    logits: NDArray[np.float32], tokens: tuple[int, int], position: int, params: SamplingParams, seen=()
) -> float:
    """By how much scores (logits over temperature) have to move to turn the first token into the second.

    `logits` float32 [vocab] behind the text before; `seen` is what the repetition penalty applies to.
    """
    ours, theirs = tokens
    if params.repetition_penalty != 1:
        logits = penalise(logits, np.array(sorted(set(seen)), np.int64), params.repetition_penalty)
    if params.temperature == 0:
        return float(logits[ours] - logits[theirs])
    scores = np.subtract(logits, logits.max(), dtype=np.float64) / params.temperature
    pair = np.array(tokens)
    noisy = scores[pair] + gumbel(params.seed, position, pair)
    leaves, enters = _inside(scores, ours, params), -_inside(scores, theirs, params)
    return max(0.0, enters, min(leaves, float(noisy[0] - noisy[1])))


def _inside(scores: NDArray[np.float64], token: int, params: SamplingParams) -> float:
    """By how much scores have to move for top-k, top-p or min-p to drop a token; negative where one does."""
    score, distance = scores[token], np.inf
    if 0 < params.top_k < scores.size:
        ordered = np.sort(scores)[::-1]
        kth, next_one = ordered[params.top_k - 1], ordered[params.top_k]
        distance = min(distance, score - (next_one if score >= kth else kth))
        scores = scores[scores >= kth]
    if params.top_p < 1:
        shares = np.exp(scores) / np.exp(scores).sum()
        above = shares[scores > score].sum()  # moves by above * (1 - above) as its scores move apart from the others
        by_mass = (params.top_p - above) / max(above * (1 - above), 1e-9)
        below, over = scores[scores < score], scores[scores > score]
        near = (
            score - below.max(initial=-np.inf) if by_mass > 0 else score - over.min(initial=np.inf)
        )  # changing places
        distance = min(distance, by_mass if abs(by_mass) < abs(near) else near)
    if params.min_p > 0:
        distance = min(distance, score - np.log(params.min_p))
    return float(distance)
