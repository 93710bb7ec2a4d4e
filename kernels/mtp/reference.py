"""What the kernels of MTP heads compute, in plain PyTorch: what a head's projection sees, hidden states in rings."""

from __future__ import annotations

import torch
from torch import Tensor

from mimo_edge.kernels.norm.reference import rms_norm
from mimo_edge.spec import MtpSpec


def pair(
    spec: MtpSpec,
    embedded: Tensor,
    hidden: Tensor,
    positions: Tensor,
    token_norm: Tensor,
    hidden_norm: Tensor,
    final_norm: Tensor,
    eps: float,
) -> Tensor:
    """float32 [T, 2 * hidden]: both halves normed, in the spec's order; 0 in rows without a position (-1).

    embedded float32 [T, hidden]: look-ahead tokens, scaled; hidden float32 [T, hidden]: the main model's states before
    the final norm; positions int [T].
    """
    if spec.hidden == "post_norm":
        hidden = rms_norm(hidden, final_norm, eps)
    if spec.zero_first:
        embedded = torch.where(positions[:, None] == 0, 0.0, embedded)
    halves = [rms_norm(embedded, token_norm, eps), rms_norm(hidden, hidden_norm, eps)]
    y = torch.cat(halves if spec.order == "token_first" else halves[::-1], dim=-1)
    return torch.where(positions[:, None] < 0, 0.0, y)


def keep(ring: Tensor, x: Tensor, positions: Tensor, end: int | None = None) -> Tensor:
    """The ring [R, hidden] with rows x [T, hidden] at slots position mod R; without those of position -1.

    With `end`, of the rows in front of it the newest R, and no others.
    """
    out = ring.clone()
    for row, p in zip(x, positions.tolist(), strict=True):
        if p >= 0 and (end is None or end - len(ring) <= p < end):
            out[p % len(ring)] = row
    return out
