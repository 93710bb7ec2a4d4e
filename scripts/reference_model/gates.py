"""Block gates in training: the decision of mimo_edge.backends.oracle.block_mask with a straight-through gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mimo_edge.spec import GateSpec

START_BIAS = 2.0  # all blocks open at the start
ALIVE = 0.05  # a block used by fewer rows than this is pulled back


class GateUse(NamedTuple):
    """How a batch uses the gates. dense bool [B]: rows that keep every block. chat, general float [B, S]: weights that
    add up to 1 over the rows of each sort (0 where there is none). same float [B, S]: 1 where a row's predecessor is
    in its document."""

    dense: Tensor
    chat: Tensor
    general: Tensor
    same: Tensor


class GateStats(NamedTuple):
    """Scalars with gradients: mean share of blocks kept in both sorts of rows, share that changes from row to row, and
    how much seldom used blocks lack."""

    chat: Tensor
    general: Tensor
    flips: Tensor
    lack: Tensor


class BlockGate(nn.Module):
    """forward: x [B, S, hidden] (the feed-forward's normed input) -> (0/1 mask [B, S, blocks], statistics)."""

    def __init__(self, g: GateSpec, hidden: int, intermediate: int):
        super().__init__()
        blocks = intermediate // g.block
        self.w1 = nn.Parameter(torch.randn(g.rank, hidden) * hidden**-0.5)
        self.w2 = nn.Parameter(torch.randn(blocks, g.rank) * g.rank**-0.5)
        self.bias = nn.Parameter(torch.full((blocks,), START_BIAS))

    def forward(self, x: Tensor, use: GateUse) -> tuple[Tensor, GateStats]:
        with torch.autocast(x.device.type, enabled=False):  # the sign decides: float32, as at run time
            z = F.relu(x.float() @ self.w1.T) @ self.w2.T + self.bias
        soft = z.sigmoid()
        keep = (z > 0).float() + (soft - soft.detach())
        mean = keep.mean(-1)
        flips = (keep[:, 1:] - keep[:, :-1]).abs().mean(-1) * use.same[:, 1:]
        stats = GateStats(
            (mean * use.chat).sum(),
            (mean * use.general).sum(),
            flips.sum() / use.same.sum(),
            F.relu(ALIVE - keep.mean((0, 1))).sum(),
        )
        return torch.where(use.dense[:, None, None], torch.ones_like(keep), keep), stats


@dataclass(frozen=True)
class GatePlan:
    """Share of blocks to keep: all until `start`, then linearly down to `keep` at `end` (shares of training)."""

    keep: float = 0.55
    start: float = 0.06
    end: float = 0.45
    budget: float = 25.0
    coherence: float = 0.04
    alive: float = 0.02

    def target(self, done: float) -> float:
        """Share of blocks to keep when the share `done` of training is behind."""
        way = min(max((done - self.start) / (self.end - self.start), 0.0), 1.0)
        return 1.0 - way * (1.0 - self.keep)

    def loss(self, stats: list[GateStats], target: float) -> Tensor:
        """Squared excess over the target of the mean over layers, for each sort of rows, and the two side terms."""
        chat, general, flips, lack = (torch.stack(column).mean() for column in zip(*stats, strict=True))
        excess = F.relu(chat - target).square() + F.relu(general - target).square()
        return self.budget * excess + self.coherence * flips + self.alive * lack
