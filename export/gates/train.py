"""A layer's gate, trained to keep a block when the block is worth more than what skipping it saves.

With importance m of a block for a row (the loss that dropping it causes) and price p of keeping a block, keeping costs
p and dropping costs m. The cheapest rule that sees only x keeps where E[m | x] > p. Binary cross-entropy with label
m > p and weight |m/p - 1| has this rule as its minimum (cost-sensitive classification, Elkan 2001), so that a missed
block weighs as much as it matters: the loss is weighted towards recall.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mimo_edge.export.gates.source import Gate

_LARGEST_WEIGHT = 20.0  # a few rows matter thousands of times more than most
_RATE, _BATCH = 1e-2, 512
_RIDGE = 0.01
_LEAST = 1e-3


def scores(gate: Gate, x: Tensor) -> Tensor:
    """What the gate compares with 0, float32 [T, blocks]; x float32 [T, hidden]."""
    w1, w2, bias = (torch.from_numpy(part) for part in (gate.w1, gate.w2, gate.bias))
    return F.relu(x @ w1.T) @ w2.T + bias


def first_gate(x: Tensor, importance: Tensor, price: float, rank: int) -> Gate:
    """The best linear map of this rank from x [T, hidden] to log(importance / price) [T, blocks].

    Reduced-rank regression: ridge regression, cut to the main directions of what it predicts; a direction takes two
    rows of W1, one for each sign. The bias is the best one for a gate that sees nothing.
    """
    scale = x.square().mean(0).sqrt().clamp(min=1e-6)
    seen = x / scale
    wanted = (importance / price).clamp(1e-3, 1e3).log()
    mean = wanted.mean(0)
    gram = seen.T @ seen / len(x)
    map_ = torch.linalg.solve(gram + _RIDGE * torch.eye(len(gram)), seen.T @ (wanted - mean) / len(x))
    _, vectors = torch.linalg.eigh(map_.T @ gram @ map_)
    main = vectors.flip(1)[:, : max(1, rank // 2)]
    w1 = (map_ @ main).T / scale
    pairs = torch.cat([w1, -w1]) if rank > 1 else w1
    back = torch.cat([main, -main], dim=1) if rank > 1 else main
    missing = rank - len(pairs)
    weight = _weights(importance / price)
    needed = importance > price
    odds = ((weight * needed).mean(0) + _LEAST) / ((weight * ~needed).mean(0) + _LEAST)
    return _stored(F.pad(pairs, (0, 0, 0, missing)), F.pad(back, (0, missing)), odds.log())


def train_gate(x: Tensor, importance: Tensor, price: float, start: Gate, epochs: int, seed: int) -> Gate:
    """`start` after Adam on all rows, with a rate that falls to 0. Deterministic for a seed.

    x float32 [T, hidden], importance float32 [T, blocks], both of calibration rows.
    """
    scale = x.square().mean(0).sqrt().clamp(min=1e-6)
    seen, worth = x / scale, importance / price
    label, weight = (worth > 1).float(), _weights(worth)
    w1, w2, bias = (torch.from_numpy(part).clone() for part in (start.w1, start.w2, start.bias))
    parts = [(w1 * scale).requires_grad_(), w2.requires_grad_(), bias.requires_grad_()]
    generator = torch.Generator().manual_seed(seed)
    steps = -(-len(x) // _BATCH) * epochs
    optimiser = torch.optim.Adam(parts, lr=_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    with torch.enable_grad():
        for _ in range(epochs):
            for rows in torch.randperm(len(x), generator=generator).split(_BATCH):
                z = F.relu(seen[rows] @ parts[0].T) @ parts[1].T + parts[2]
                loss = F.binary_cross_entropy_with_logits(z, label[rows], weight[rows])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
    w1, w2, bias = (part.detach() for part in parts)
    return _stored(w1 / scale, w2, bias)


def _weights(worth: Tensor) -> Tensor:
    return (worth - 1).abs().clamp(max=_LARGEST_WEIGHT)


def _stored(w1: Tensor, w2: Tensor, bias: Tensor) -> Gate:
    """Weights rounded to float16 values, so that a target that holds them so decides alike; stored as float32."""
    arrays = (w1.half().float().numpy(), w2.half().float().numpy(), bias.numpy().astype(np.float32))
    return Gate(*(np.ascontiguousarray(a) for a in arrays))
