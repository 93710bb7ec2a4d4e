"""Scales and zeros of groups, searched for the least weighted error: what error feedback then rounds to.

Round to nearest takes a group's exact range. Here several scales and zeros are tried, and each weight's error counts as
much as its input does (the diagonal of the Hessian).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mimo_edge.errors import BadInputError

_WIDER = (1.0, 1.02, 1.05, 1.1)  # of the exact range: nothing is clipped
_NARROWER = (0.7, 0.75, 0.8, 0.85, 0.9, 0.95)  # tried as well where clipping is allowed
_SLACK = 1e-4  # of a step
_LARGEST_SCALE = float(np.finfo(np.float16).max)


def search(blocks: Tensor, weight: Tensor, bits: int, clip: bool, name: str) -> tuple[Tensor, Tensor]:
    """blocks float32 [n, groups, G], weight [groups, G] >= 0 -> (scales, zeros), float32 [n, groups].

    Scales are float16 values; zeros are integers 0..2^bits-1. Without `clip` only pairs that hold the whole range, 0
    included, to half a step are taken. Groups of zeros get scale 0. Raises BadInputError as round to nearest does.
    """
    top = (1 << bits) - 1
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    _check(low, high, top, name)
    scales, zeros = torch.zeros_like(low), torch.zeros_like(low)
    best = torch.full_like(low, torch.inf)
    for factor in (*_WIDER, *_NARROWER) if clip else _WIDER:
        scale = _round_up(((high - low) * (factor / top)).double())
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        exact = -low * min(factor, 1.0) * inverse  # a narrower range shrinks from both ends
        for zero in (exact.floor(), exact.floor() + 1):
            zero = zero.clamp(0, top)
            levels = ((blocks * inverse[..., None] + zero[..., None]).round_().clamp_(0, top)) - zero[..., None]
            error = ((levels * scale[..., None] - blocks).square_() * weight).sum(-1)
            if not clip:
                error[(-low * inverse - zero > 0.5 + _SLACK) | (high * inverse + zero - top > 0.5 + _SLACK)] = torch.inf
            better = error < best
            best, scales, zeros = (
                torch.where(better, a, b) for a, b in ((error, best), (scale, scales), (zero, zeros))
            )
    return scales, zeros


def _check(low: Tensor, high: Tensor, top: int, name: str) -> None:
    if not (low.isfinite().all() and high.isfinite().all()):
        raise BadInputError(f"tensor {name} holds NaN or Inf: the checkpoint is damaged, get it again")
    widest = float((high.double() - low.double()).max()) if low.numel() else 0.0
    if widest * _WIDER[-1] / top > _LARGEST_SCALE:
        raise BadInputError(
            f"tensor {name}: a group spans {widest:.3g}, more than a float16 scale holds: keep this kind in float"
        )


def _round_up(values: Tensor) -> Tensor:
    """float64 -> the next float16 value, as float32."""
    exact = values.numpy()
    half = exact.astype(np.float16)
    return torch.from_numpy(np.where(half < exact, np.nextafter(half, np.float16(np.inf)), half).astype(np.float32))
