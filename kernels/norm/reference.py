"""What the norms compute, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] over the root of its mean square, times weight [n], in float32 (arXiv 1910.07467)."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def add_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A residual stream x [..., n] behind a branch whose output y is normed (`post_norms` of ModelSpec)."""
    return x.float() + rms_norm(y, weight, eps)
