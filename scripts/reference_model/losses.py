"""Cross-entropy of the main model and its heads, in chunks: only one chunk's logits exist at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scripts.reference_model.gates import GateUse
from scripts.reference_model.packing import GENERAL, Rows

ANSWER_WEIGHT = 3.0  # answers are few among the tokens
CHUNK = 65_536  # rows at a time, of one head: smaller pieces leave a large GPU waiting for the host
PAD_ID = 0


class Batch(NamedTuple):
    """tokens int64 [B, S + LOOKAHEAD]; position int64 and document int32 [B, S]; weights float32 [heads + 1, B, S]:
    what the prediction of the main model (0) and of head i (1 + i) counts; chat bool [B, S]."""

    tokens: Tensor
    position: Tensor
    document: Tensor
    weights: Tensor
    chat: Tensor


def to_batch(rows: Rows, heads: int, device: torch.device) -> Batch:
    """Row p of head i (main: i = -1) predicts the token at p + 2 + i; it counts only within its document."""
    length = rows.tokens.shape[1] - 1 - heads
    tokens, document, kinds, position = (
        torch.from_numpy(x.astype(t)).to(device, non_blocking=True)
        for x, t in zip((rows.tokens, rows.document, rows.kinds, rows.position), ("i8", "i4", "i8", "i8"), strict=True)
    )
    value = torch.tensor([0.0, ANSWER_WEIGHT, ANSWER_WEIGHT, 1.0], device=device)[kinds]
    weights = []
    for ahead in range(1, 2 + heads):
        same = document[:, ahead : ahead + length] == document[:, :length]
        weights.append(value[:, ahead : ahead + length] * same)
    chat = (kinds != GENERAL) & (tokens != PAD_ID)
    return Batch(tokens, position[:, :length], document[:, :length], torch.stack(weights), chat[:, :length])


def gate_use(batch: Batch, dense: Tensor) -> GateUse:
    """dense bool [B]: rows on which the gates are ignored."""

    def share(mask: Tensor) -> Tensor:
        mask = mask.float()
        return mask / mask.sum().clamp(min=1.0)

    same = F.pad((batch.document[:, 1:] == batch.document[:, :-1]).float(), (1, 0))
    return GateUse(dense, share(batch.chat), share(~batch.chat), same)


def chunk_loss(x: Tensor, embed: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight * cross-entropy over rows x [n, hidden]."""
    return (F.cross_entropy(F.linear(x, embed).float(), targets, reduction="none") * weights).sum()


def head_losses(hidden: list[Tensor], embed: Tensor, batch: Batch, loss=chunk_loss) -> list[Tensor]:
    """Mean weighted loss of the main model and of every head."""
    length = batch.position.shape[1]
    out = []
    for ahead, x in enumerate(hidden, start=1):
        targets, weights = batch.tokens[:, ahead : ahead + length].reshape(-1), batch.weights[ahead - 1].reshape(-1)
        flat, total = x.flatten(0, 1), x.new_zeros(())
        for at in range(0, len(flat), CHUNK):
            piece = slice(at, at + CHUNK)
            total = total + checkpoint(loss, flat[piece], embed, targets[piece], weights[piece], use_reentrant=False)
        out.append(total / weights.sum().clamp(min=1.0))
    return out
