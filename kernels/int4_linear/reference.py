"""What Int4Linear computes, in plain PyTorch. The layout is `mimo_edge.params.stored`.

Weight = (q - zero) * scale. Scales are float16 values and q - zero is an integer of at most 8 bits and a sign, so the
product fits float32's 24 bits: dequantised weights are exact, and equal on every target.
"""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` values of the last axis. packed: uint8 [..., B], low nibble first -> uint8 [..., count]."""
    if bits == 8:
        return packed[..., :count]
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :count]


def dequantize(q: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """q uint8 [N, K/G, G*bits/8], scales float32 [N, K/G], zeros uint8 [N, ceil(K/G*bits/8)] -> float32 [N, K]."""
    rows, groups, row_bytes = q.shape
    levels = unpack(q, bits, row_bytes * 8 // bits).to(torch.float32)
    zero = unpack(zeros, bits, groups).to(torch.float32)
    return levels.sub_(zero[..., None]).mul_(scales[..., None]).reshape(rows, -1)


def int4_linear(x: Tensor, q: Tensor, scales: Tensor, zeros: Tensor, bits: int, bias: Tensor | None = None) -> Tensor:
    """x float32 [T, K] times the transposed weights, plus `bias` float32 [N] -> float32 [T, N]."""
    y = x @ dequantize(q, scales, zeros, bits).T
    return y if bias is None else y + bias
