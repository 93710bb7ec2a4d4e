"""One training run: model, optimiser, schedule; steps, and state that a later piece resumes from."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from mimo_edge.spec import ModelSpec
from scripts.reference_model.attention import Masks
from scripts.reference_model.gates import GatePlan
from scripts.reference_model.losses import Batch, chunk_loss, gate_use, head_losses, to_batch
from scripts.reference_model.model import Model
from scripts.reference_model.optim import Optimizer
from scripts.reference_model.packing import Rows


@dataclass(frozen=True)
class Plan:
    """A run. The rate rises over `warmup` steps, stays, and from `cooldown` (a share of the steps) falls linearly."""

    steps: int
    batch: int = 8
    length: int = 8192
    seed: int = 1
    matrix_lr: float = 0.02
    other_lr: float = 0.003
    decay: float = 0.02
    warmup: int = 150
    cooldown: float = 0.5
    head_weight: float = 0.15
    gates: GatePlan = field(default_factory=GatePlan)

    def rate(self, step: int) -> float:
        done = step / self.steps
        down = min(1.0, (1.0 - done) / (1.0 - self.cooldown))
        return min(1.0, (step + 1) / self.warmup) * (0.02 + 0.98 * down)


class Trainer:
    """Not for several devices. On a GPU blocks and losses are compiled and run in bfloat16."""

    def __init__(self, spec: ModelSpec, plan: Plan, device: torch.device):
        torch.manual_seed(plan.seed)
        self.spec, self.plan, self.device = spec, plan, device
        self.heads = spec.mtp.heads if spec.mtp else 0
        self.model = Model(spec).to(device)
        self.model.tables = {kind: t.to(device) for kind, t in self.model.tables.items()}
        self.optimizer = Optimizer(self.model, plan.matrix_lr, plan.other_lr, plan.decay)
        self.masks = Masks(spec, plan.batch, plan.length, device)
        self.step_number = 0
        self._loss = chunk_loss
        if device.type == "cuda":
            torch._dynamo.config.cache_size_limit = 64
            self._loss = torch.compile(chunk_loss)
            for block in [*self.model.layers, *(head.layer for head in self.model.mtp)]:
                block.compile(dynamic=False)

    def autocast(self) -> contextlib.AbstractContextManager:
        gpu = self.device.type == "cuda"
        return torch.autocast("cuda", torch.bfloat16) if gpu else contextlib.nullcontext()

    def prepare(self, rows: Rows) -> Batch:
        batch = to_batch(rows, self.heads, self.device)
        self.masks.set(batch.document)
        return batch

    def step(self, rows: Rows) -> dict[str, torch.Tensor]:
        """One update. Returns scalars as tensors, so that nothing waits for the device."""
        plan, batch = self.plan, self.prepare(rows)
        dense = torch.arange(plan.batch, device=self.device) == self.step_number % plan.batch
        target = plan.gates.target(self.step_number / plan.steps)
        with self.autocast():
            hidden, stats = self.model.hidden(batch.tokens, batch.position, self.masks.held, gate_use(batch, dense))
            losses = head_losses(hidden, self.model.embed, batch, self._loss)
            loss = losses[0] + plan.head_weight * sum(losses[1:]) + plan.gates.loss(stats, target)
        loss.backward()
        self.optimizer.step(plan.rate(self.step_number))
        self.model.zero_grad(set_to_none=True)
        self.step_number += 1
        means = {
            name: torch.stack([getattr(s, name) for s in stats]).mean().detach()
            for name in ("chat", "general", "flips", "lack")
        }
        return {f"loss{i}": x.detach() for i, x in enumerate(losses)} | {f"keep_{k}": v for k, v in means.items()}

    def save(self, path: Path) -> None:
        state = {"step": self.step_number, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.step_number = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def round_weights(self) -> None:
        """Rounds to bfloat16, as the checkpoint stores them."""
        with torch.no_grad():
            for p in nn.Module.parameters(self.model):
                p.copy_(p.bfloat16().float())
