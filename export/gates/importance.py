"""What dropping a block of channels does to a row: the change of the residual stream behind the layer.

The change is exact for one block dropped alone, through the norm behind `down` too. It is measured in a metric:
plain lengths relative to the row's residual stream, or the loss that such a change causes (sensitivity.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mimo_edge.export.gates.feed_forward import FeedForward

_ROWS = 1024  # rows handled at once


def energy(ffn: FeedForward, block: int) -> Tensor:
    """Sum over a block of (activation times length of its column of `down`)^2: float32 [T, blocks].

    The label of PowerInfer and its like. It ignores how a block's channels add up or cancel, and the norm behind.
    """
    return (ffn.h.square() * ffn.down.square().sum(0)).unflatten(1, (-1, block)).sum(-1)


def output_change(ffn: FeedForward, block: int, metric: Tensor | None = None) -> Tensor:
    """Squared change of the layer's output when one block is dropped, float32 [T, blocks].

    Relative to the row's squared length behind the layer. `metric` [hidden, hidden] is a matrix R: a change d counts
    |R d|^2 instead of |d|^2. Without a norm behind `down`, y = sum of c_b and d = -c_b. With one, d = w (y - c_b) / s_b
    - w y / s, where s and s_b are the root mean squares; |R d|^2 is put together from inner products, so that nothing
    of size [T, blocks, hidden] is made.
    """
    down, weight = ffn.down, ffn.post_norm
    seen = down if weight is None else weight[:, None] * down  # as the residual stream gets it
    seen = seen if metric is None else metric @ seen
    parts = []
    for h, out in zip(ffn.h.split(_ROWS), ffn.output().split(_ROWS), strict=True):
        length = out.square().sum(-1, keepdim=True)
        own = _block_norms(h, seen, block)
        if weight is not None:
            own = _behind_norm(h, ffn, metric, seen, own, block)
        parts.append(own / length)
    return torch.cat(parts)


def _block_norms(h: Tensor, down: Tensor, block: int) -> Tensor:
    """|down_b h_b|^2 [T, blocks] through the blocks' Gram matrices."""
    if block == 1:
        return h.square() * down.square().sum(0)
    columns = down.unflatten(1, (-1, block))
    gram = torch.einsum("nbi,nbj->bij", columns, columns)
    rows = h.unflatten(1, (-1, block)).transpose(0, 1)
    return ((rows @ gram) * rows).sum(-1).T


def _behind_norm(h: Tensor, ffn: FeedForward, metric: Tensor | None, seen: Tensor, own: Tensor, block: int) -> Tensor:
    """|R d|^2 [T, blocks] where d passes through the norm; `seen` is R w down, `own` is |R w c_b|^2."""
    down, eps = ffn.down, ffn.spec.norm_eps
    hidden = down.shape[0]
    y = h @ down.T + ffn.bias
    y_seen = ffn.post_norm * y if metric is None else (ffn.post_norm * y) @ metric.T
    with_y = (h * (y @ down)).unflatten(1, (-1, block)).sum(-1)  # y . c_b
    cross = (h * (y_seen @ seen)).unflatten(1, (-1, block)).sum(-1)  # R w y . R w c_b
    mean = y.square().mean(-1, keepdim=True) + eps
    less = (2 * with_y - _block_norms(h, down, block)) / hidden  # of the mean square, without the block
    mean_b = (mean - less).clamp(min=eps)
    scale, scale_b = mean.rsqrt(), mean_b.rsqrt()
    grown = less * scale * scale_b / (mean.sqrt() + mean_b.sqrt())  # scale_b - scale without cancellation
    change = grown.square() * y_seen.square().sum(-1, keepdim=True) - 2 * grown * scale_b * cross
    return (change + scale_b.square() * own).clamp(min=0)
