"""What a model in training gets right, from teacher-forced predictions.

Greedy decoding reproduces a reference answer exactly when every teacher-forced prediction in it is right, so exact
match needs no decoding; and where the answer is right, drafts can be checked against it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from scripts.reference_model.losses import gate_use
from scripts.reference_model.packing import ACTION, REPLY, Rows
from scripts.reference_model.trainer import Trainer


@dataclass(frozen=True)
class Predictions:
    """best int64 [1 + heads, B, S]: most likely tokens of the main model and the heads; nll float32 [B, S] of the main
    model; kept: share of blocks kept in conversations and in general text, and share of blocks that change by row."""

    best: NDArray[np.int64]
    nll: NDArray[np.float32]
    kept: tuple[float, float, float]


@torch.no_grad()
def predict(trainer: Trainer, rows: Rows, dense: bool) -> Predictions:
    """`dense` ignores the gates. Any number of rows; batches are filled up with copies of the last row."""
    size, total = trainer.plan.batch, len(rows.tokens)
    best, nll, kept = [], [], []
    for at in range(0, total, size):
        index = np.minimum(np.arange(at, at + size), total - 1)
        batch = trainer.prepare(Rows(*(x[index] for x in (rows.tokens, rows.document, rows.kinds, rows.position))))
        off = torch.full((size,), dense, device=trainer.device)
        with trainer.autocast():
            hidden, stats = trainer.model.hidden(batch.tokens, batch.position, trainer.masks.held, gate_use(batch, off))
            outs = [[F.linear(row, trainer.model.embed).float() for row in h] for h in hidden[:1]]
            heads = [torch.stack([F.linear(row, trainer.model.embed).argmax(-1) for row in h]) for h in hidden[1:]]
        main = torch.stack([o.argmax(-1) for o in outs[0]])
        targets = batch.tokens[:, 1 : 1 + trainer.plan.length]
        nll.append(
            torch.stack([F.cross_entropy(o, t, reduction="none") for o, t in zip(outs[0], targets, strict=True)]).cpu()
        )
        best.append(torch.stack([main, *heads]).cpu())
        kept.append([torch.stack([getattr(s, n) for s in stats]).mean().item() for n in ("chat", "general", "flips")])
    means = np.mean(kept, axis=0)
    return Predictions(torch.cat(best, 1).numpy()[:, :total], torch.cat(nll).numpy()[:total], tuple(map(float, means)))


@dataclass(frozen=True)
class Command:
    """One evaluated sample. tokens, steps: length of the answer behind its first token and the steps that drafting
    needs for it; accepted: how often head i's draft was accepted, when it was reached."""

    action: bool
    reply: bool
    tokens: int
    steps: int
    accepted: tuple[int, ...]


def commands(rows: Rows, p: Predictions) -> list[Command]:
    """In the order of the samples in the rows."""
    out = []
    length = p.best.shape[2]
    for r in range(len(rows.tokens)):
        answer = np.flatnonzero((rows.kinds[r, :length] == ACTION) | (rows.kinds[r, :length] == REPLY))
        if len(answer) == 0:
            continue
        for piece in np.split(answer, np.flatnonzero(np.diff(rows.document[r, answer])) + 1):
            out.append(
                _command(rows.tokens[r].astype(np.int64), rows.kinds[r], p.best[:, r], int(piece[0]), int(piece[-1]))
            )
    return out


def _command(tokens: NDArray, kinds: NDArray, best: NDArray, first: int, last: int) -> Command:
    right = best[0, first - 1 : last] == tokens[first : last + 1]
    is_action = kinds[first : last + 1] == ACTION
    heads, accepted = len(best) - 1, [0] * (len(best) - 1)
    at, steps = first, 0
    while at < last:  # token `at` is pending; drafts for at + 1, ... come from row at - 1
        steps += 1
        taken = 0
        while taken < heads and at + 1 + taken <= last and best[1 + taken, at - 1] == tokens[at + 1 + taken]:
            accepted[taken] += 1
            taken += 1
        at += 1 + taken
    return Command(bool(right[is_action].all()), bool(right[~is_action].all()), last - first, steps, tuple(accepted))


def summary(found: list[Command]) -> dict[str, float]:
    """Shares over commands; `length` is the mean number of tokens that a step yields where the answer is right."""
    right = [c for c in found if c.action and c.reply]
    steps = max(1, sum(c.steps for c in right))
    out = {
        "commands": float(len(found)),
        "action": float(np.mean([c.action for c in found])),
        "reply": float(np.mean([c.reply for c in found])),
        "length": sum(c.tokens for c in right) / steps,
    }
    for i in range(len(found[0].accepted)):
        out[f"accept{i}"] = sum(c.accepted[i] for c in right) / steps
    return out


def general_summary(rows: Rows, p: Predictions) -> dict[str, float]:
    """Perplexity, and how often the heads' best token is the main model's own best one (all of them up to head i)."""
    length = p.best.shape[2]
    inside = rows.document[:, 1 : 1 + length] == rows.document[:, :length]
    out = {"perplexity": float(np.exp(p.nll[inside].mean()))}
    chain = np.ones((len(rows.tokens), length - len(p.best)), bool)
    for i in range(len(p.best) - 1):
        chain &= p.best[1 + i, :, : chain.shape[1]] == p.best[0, :, 1 + i : 1 + i + chain.shape[1]]
        out[f"agree{i}"] = float(chain.mean())
    out["length"] = 1 + sum(out[f"agree{i}"] for i in range(len(p.best) - 1))
    return out
