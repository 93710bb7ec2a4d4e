"""What SparseFfn computes, in plain PyTorch: a feed-forward of which each row keeps its own blocks of channels.

A kernel loads only the blocks that some row keeps; the result is the same, because a row's activations are multiplied
by that row's own mask whatever the others keep.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mimo_edge.kernels.int4_linear.reference import int4_linear

Packed = tuple[Tensor, Tensor, Tensor]  # q, scales, zeros as mimo_edge.params.stored lays them out


def sparse_ffn(x: Tensor, keep: Tensor, gate_up: Packed, down: Packed, bits: int, activation: str) -> Tensor:
    """down(mask * act(gate x) * up x): x float32 [T, K], keep 0/1 [T, blocks] -> float32 [T, N].

    gate_up holds all gate rows, then all up rows, [2 * blocks * block, K]; down is [N, blocks * block]. `activation` is
    "silu" or "gelu_tanh". A block a row does not keep is 0 for that row, even where its weights are not finite.
    """
    gate, up = int4_linear(x, *gate_up, bits).chunk(2, dim=-1)
    h = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
    kept = keep.bool().repeat_interleave(h.shape[-1] // keep.shape[-1], dim=-1)
    return int4_linear(h.masked_fill(~kept, 0), *down, bits)
