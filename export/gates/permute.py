"""Which channels share a block: an order of the feed-forward's channels, found on calibration rows.

Wanted is the order with which a given share of blocks, chosen anew for each row, holds the most importance. Two steps
are repeated, each of which can only raise what is kept: given blocks, the most important (row, block) pairs are kept;
given those, every channel moves to the block that is kept when the channel matters, `block` channels to each. Channels
that fire together meet, always needed ones too, and so do those hardly ever needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROUNDS, _MEANS_ROUNDS, _AUCTION_ROUNDS = 10, 4, 40
_AUCTION_DECAY = 0.9  # of the step by which prices move
_WORTH = 1e-5  # a round that keeps less more than this is the last
_KEEP = 0.6  # share of (row, block) pairs kept while blocks are formed


def permute(importance: Tensor, block: int, seed: int) -> Tensor:
    """Order int64 [channels]: new channel j is old channel order[j]. `importance` float32 [T, channels], not negative.

    The start is the better of two: channels sorted by mean importance, and balanced k-means of when they matter. Within
    a block, and from block to block, old indices ascend.
    """
    starts = [_by_mean(importance, block), _by_time(importance, block, seed)]
    member = max(starts, key=lambda start: _kept(importance, start, block)[1])
    best, best_kept = member, -1.0
    for _ in range(_ROUNDS):
        keep, kept = _kept(importance, member, block)
        if kept <= best_kept * (1 + _WORTH):
            break
        best, best_kept = member, kept
        member = assign(importance.T @ keep, block)
    return _order(best)


def _kept(importance: Tensor, member: Tensor, block: int) -> tuple[Tensor, float]:
    """0/1 [T, blocks] of the most important pairs, and the importance they hold."""
    blocks = importance.shape[1] // block
    total = importance[:, member.argsort(stable=True)].unflatten(1, (blocks, block)).sum(-1)
    threshold = total.flatten().kthvalue(max(1, round((1 - _KEEP) * total.numel()))).values
    keep = (total > threshold).float()
    return keep, float((total.double() * keep).sum())


def _by_mean(importance: Tensor, block: int) -> Tensor:
    rank = importance.mean(0).argsort(stable=True).argsort(stable=True)
    return rank // block


def _by_time(importance: Tensor, block: int, seed: int) -> Tensor:
    """Balanced k-means of channels by when they matter (square roots, as unit vectors)."""
    features = importance.sqrt().T
    features = features / features.norm(dim=1, keepdim=True).clamp(min=1e-30)
    blocks = importance.shape[1] // block
    generator = torch.Generator().manual_seed(seed)
    centres = features[torch.randperm(len(features), generator=generator)[:blocks]]
    for _ in range(_MEANS_ROUNDS):
        member = assign(features @ centres.T, block)
        centres = torch.zeros_like(centres).index_add_(0, member, features)
        centres = centres / centres.norm(dim=1, keepdim=True).clamp(min=1e-30)
    return member


def assign(score: Tensor, capacity: int) -> Tensor:
    """A block int64 [channels] for each channel, `capacity` a block, with a large sum of score [channels, blocks].

    Prices rise on blocks that too many channels want (an auction); what is left over goes in order of regret.
    """
    price = torch.zeros(score.shape[1])
    step = score.std() / 2
    for _ in range(_AUCTION_ROUNDS):
        wanted = (score - price).argmax(1)
        excess = torch.bincount(wanted, minlength=score.shape[1]) - capacity
        if int(excess.abs().max()) == 0:
            break
        price += step * (excess / capacity).clamp(-1, 1)
        step *= _AUCTION_DECAY
    return _fill(score - price, capacity)


def _fill(score: Tensor, capacity: int) -> Tensor:
    """Channels with most to lose choose first; each takes its best block that has room."""
    top = score.topk(min(2, score.shape[1]), dim=1).values
    room = [capacity] * score.shape[1]
    member = torch.empty(len(score), dtype=torch.int64)
    wishes = score.argsort(dim=1, descending=True, stable=True).tolist()
    for channel in (top[:, 0] - top[:, -1]).argsort(descending=True, stable=True).tolist():
        member[channel] = chosen = next(b for b in wishes[channel] if room[b])
        room[chosen] -= 1
    return member


def _order(member: Tensor) -> Tensor:
    """Blocks by their smallest channel, so that equal partitions give equal orders."""
    first = torch.full((int(member.max()) + 1,), len(member)).scatter_reduce(
        0, member, torch.arange(len(member)), "amin"
    )
    return first[member].argsort(stable=True)
