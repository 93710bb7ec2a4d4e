"""Error feedback: the columns of a matrix are rounded one after the other, and the columns that are still float take
over what the rounding changed, as far as inputs are correlated (GPTQ, arXiv 2210.17323).

The most important columns come first (act-order). Scales and zeros are fixed before that, for groups along the stored
order of K, so nothing is permuted at run time. Rows are independent of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimo_edge.export.quantize.ranges import search
from mimo_edge.export.quantize.rtn import Quantized, check_group, pack
from mimo_edge.spec import TensorQuant

_BLOCK = 128  # columns between two large updates
_CHUNK = 1 << 21  # weights at once: what one column changes stays in the cache


@dataclass(frozen=True)
class Feedback:
    """How the errors of one linear input of size K spread.

    order int64 [K]; spread float32 [K, K]: upper Cholesky factor of the inverse Hessian, in that order;
    weight float32 [K]: the Hessian's diagonal, in stored order; aim float32 [K, K]: rows become rows @ aim first.
    """

    order: Tensor
    spread: Tensor
    weight: Tensor
    aim: Tensor | None = None


def feedback(hessian: Tensor, damp: float, cross: Tensor | None = None) -> Feedback:
    """`hessian` float64 [K, K]: sum of x x^T over the inputs of the quantised model. Inputs never seen count as 1.

    `damp` times its mean diagonal is added to the diagonal. `cross` [K, K], sum of (float model's x) x^T, asks for the
    rows that come closest to the float model's outputs: rows @ cross @ hessian^-1, regularised towards no change.
    """
    k = len(hessian)
    diagonal = hessian.diagonal().clone()
    dead = diagonal <= 0
    mean = diagonal[~dead].mean() if bool((~dead).any()) else torch.ones((), dtype=torch.float64)
    damped = hessian.clone()
    damped.diagonal()[:] += torch.where(dead, mean, damp * mean)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    aim = None
    if cross is not None:
        aim = (torch.eye(k, dtype=torch.float64) + (cross - hessian) @ inverse).float()
    order = damped.diagonal().argsort(descending=True, stable=True)
    spread = torch.linalg.cholesky(inverse[order][:, order], upper=True)
    weight = torch.where(dead, 0.0, diagonal / mean).float() + damp
    return Feedback(order, spread.float(), weight, aim)


def quantize_rows(
    w: NDArray[np.float32], quant: TensorQuant, name: str, how: Feedback, clip: bool = False
) -> Quantized:
    """w float32 [n, K] -> q, scales, zeros as `mimo_edge.export.quantize.rtn.quantize_rows` returns them.

    `clip` allows ranges narrower than a group's own. Raises BadInputError on NaN, Inf, and a K that does not divide.
    """
    n, k = w.shape
    check_group(name, k, quant.group)
    step = max(1, _CHUNK // k)
    parts = [_chunk(torch.from_numpy(w[at : at + step]), quant, name, how, clip) for at in range(0, n, step)]
    q, scales, zeros = (np.concatenate(part) for part in zip(*parts, strict=True))
    return q, scales, zeros


def _chunk(w: Tensor, quant: TensorQuant, name: str, how: Feedback, clip: bool) -> Quantized:
    n, k = w.shape
    if how.aim is not None:
        w = w @ how.aim
    blocks = w.reshape(n, k // quant.group, quant.group)
    scales, zeros = search(blocks, how.weight.reshape(blocks.shape[1:]), quant.bits, clip, name)
    levels = _feed_back(w, scales, zeros, quant, how).reshape(blocks.shape).numpy()
    return pack(levels, quant.bits), scales.numpy(), pack(zeros.numpy().astype(np.uint8), quant.bits)


def _feed_back(w: Tensor, scales: Tensor, zeros: Tensor, quant: TensorQuant, how: Feedback) -> Tensor:
    """Levels uint8 [n, K] in stored order."""
    top = (1 << quant.bits) - 1
    columns = w.T[how.order].contiguous()  # [K, n]: a column is one run of memory
    scale, zero = (t.T[how.order // quant.group] for t in (scales, zeros))
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    levels = torch.empty(columns.shape, dtype=torch.uint8)
    for first in range(0, len(columns), _BLOCK):
        last = min(first + _BLOCK, len(columns))
        errors = torch.empty(last - first, columns.shape[1])
        for j in range(first, last):
            level = (columns[j] * inverse[j] + zero[j]).round_().clamp_(0, top)
            levels[how.order[j]] = level.to(torch.uint8)
            error = (columns[j] - (level - zero[j]) * scale[j]) / how.spread[j, j]
            columns[j + 1 : last] -= how.spread[j, j + 1 : last, None] * error
            errors[j - first] = error
        columns[last:] -= how.spread[first:last, last:].T @ errors
    return levels.T.contiguous()
