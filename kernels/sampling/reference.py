"""What the sampling kernels compute: the choice of mimo_edge.decoding.sampling, row by row, on PyTorch tensors.

Where the kernels may choose another token (in all cases by rounding or a tie of exactly equal logits):
- best: never; equal logits go to the lowest id, as numpy's argmax does.
- perturb: noise and scores are float32 where the host's are float64, so two candidates whose perturbed scores differ
  by less than 1e-5 may change places. The random bits are the same integers.
- threshold: of equal logits at the edge of top-p all are kept, the host keeps the first ones; a token stays or goes by
  rounding when the probabilities above it are within 1e-5 of p, or its own within 1e-5 (relative) of min_p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mimo_edge.decoding.sampling import candidates, gumbel
from mimo_edge.request import SamplingParams


def sample(logits: Tensor, params: SamplingParams, position: int) -> int:
    """The token for `position` given float32 logits [vocab]; -1 when they are not finite."""
    row = logits.float().numpy()
    best = int(row.argmax())
    if not torch.isfinite(logits[best]):
        return -1
    if params.temperature == 0:
        return best
    ids, scores = candidates(row, params)
    return int(ids[(scores + gumbel(params.seed, position, ids)).argmax()])


def accept(tokens: Tensor, sampled: Tensor) -> tuple[int, int]:
    """Of one sequence's rows, tokens [t] that were evaluated (the first is no draft) and what was sampled behind each:
    how many drafts hold, and the token that follows the last of them."""
    count = 0
    while count + 1 < len(tokens) and tokens[count + 1] == sampled[count]:
        count += 1
    return count, int(sampled[count])
