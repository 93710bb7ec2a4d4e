"""What WindowedAttention computes, in plain PyTorch: one attention layer between its qkv and its o product.

Rows of several sequences are flat. Keys and values live in pools of blocks: pages for full attention, one ring a
sequence for windows. Both are addressed alike, with block = pool.shape[1] and table [B, N] the sequence's blocks:

    slot of position p = table[sequence, (p // block) % N] * block + p % block

For a ring N is 1 and the slot is p mod R. Before the step a sequence has n = lengths[sequence] committed rows, of which
the newest N * block are held. A row sees held positions and this step's rows of its own sequence, window permitting;
afterwards the newest N * block of this step's rows are stored. Rows that are then rejected are simply not committed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """The layer's constants; AttentionSpec says what they mean. `window` 0 stands for no window."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int
    scale: float
    value_scale: float = 1.0
    eps: float = 1e-6


def windowed_attention(
    shape: Shape,
    qkv: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    positions: Tensor,
    sequences: Tensor,
    lengths: Tensor,
    table: Tensor,
    frequencies: Tensor,
    sinks: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    first_held: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (y [T, heads * v_head_dim], k_pool and v_pool with this step's rows); the pools given are not changed.

    qkv [T, q + k + v rows]; pools [blocks, block, kv_heads, head_dim or v_head_dim]; positions (-1: padding, its y is
    0 and nothing is stored) and sequences int [T]; lengths int [B]; table int [B, N]; frequencies float32
    [rotary_dim / 2]; sinks [heads]; norms [head_dim]. Computes in float32 and returns the dtypes of qkv and the pools;
    new keys and values are rounded to the pools' dtype before any row reads them, so chunking changes no result.
    With first_held int [B], committed rows in front of it count as if there were none.
    """
    q, k, v = _rows(shape, qkv.float(), positions, frequencies, q_norm, k_norm)
    k, v = k.to(k_pool.dtype), v.to(v_pool.dtype)
    y = torch.zeros(len(qkv), shape.heads, shape.v_head_dim)
    k_out, v_out = k_pool.clone(), v_pool.clone()
    for s, n in enumerate(lengths.tolist()):
        rows = ((sequences == s) & (positions >= 0)).nonzero().flatten()
        capacity = table.shape[1] * k_pool.shape[1]
        since = 0 if first_held is None else min(n, int(first_held[s]))
        held = torch.arange(max(since, n - capacity), n)
        slots = _slots(held, table[s], k_pool.shape[1])
        keys = torch.cat([k_pool.flatten(0, 1)[slots], k[rows]]).float()
        values = torch.cat([v_pool.flatten(0, 1)[slots], v[rows]]).float()
        y[rows] = _attend(shape, q[rows], keys, values, positions[rows], torch.cat([held, positions[rows]]), sinks)
        stored = rows[-capacity:]
        slots = _slots(positions[stored].long(), table[s], k_pool.shape[1])
        k_out.flatten(0, 1)[slots], v_out.flatten(0, 1)[slots] = k[stored], v[stored]
    return y.flatten(1).to(qkv.dtype), k_out, v_out


def _slots(positions: Tensor, blocks: Tensor, block: int) -> Tensor:
    return blocks.long()[positions // block % len(blocks)] * block + positions % block


def _rows(
    shape: Shape, qkv: Tensor, positions: Tensor, frequencies: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, heads, D] and k [T, kv_heads, D], normed and rotated; v [T, kv_heads, Dv], scaled."""
    q, k, v = qkv.split(
        [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.v_head_dim], dim=-1
    )
    q, k = q.unflatten(-1, (shape.heads, -1)), k.unflatten(-1, (shape.kv_heads, -1))
    if q_norm is not None and k_norm is not None:
        q, k = _rms_norm(q, q_norm, shape.eps), _rms_norm(k, k_norm, shape.eps)
    v = v.unflatten(-1, (shape.kv_heads, -1)) * shape.value_scale
    return _rotate(q, positions, frequencies), _rotate(k, positions, frequencies), v


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Dimension j pairs with j + rotary_dim/2; dimensions from rotary_dim on pass through."""
    half = len(frequencies)
    angles = (positions[:, None].float() * frequencies)[:, None]
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _attend(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, held: Tensor, sinks: Tensor | None
) -> Tensor:
    """q [t, heads, D], k and v [S, kv_heads, D or Dv] at positions `held` [S] -> [t, heads, Dv]."""
    group = shape.heads // shape.kv_heads
    scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, dim=1)) * shape.scale
    seen = held[None] <= queries[:, None]
    if shape.window:
        seen &= held[None] > queries[:, None] - shape.window
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, len(queries), 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : len(held)]
    return torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, dim=1))
