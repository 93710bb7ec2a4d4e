"""The optimiser: Muon for the weight matrices of the layers, AdamW for everything else.

Muon (https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by the nearest orthogonal one. It needs
fewer steps than AdamW at this size, and its weights have few outliers, which INT4 groups like.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MATRICES = ("qkv", "o", "gate_up", "down", "proj")


def orthogonal(m: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration on a stack of matrices [n, rows, columns]; singular values end near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m.bfloat16() if m.is_cuda else m
    flipped = x.shape[1] > x.shape[2]
    x = x.mT if flipped else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return (x.mT if flipped else x).to(m.dtype)


class Optimizer:
    """step(lr): lr is the schedule's factor, 1 at the plateau."""

    def __init__(self, model: nn.Module, matrix_lr: float, other_lr: float, decay: float, momentum: float = 0.95):
        named = dict(model.named_parameters())
        self._lr, self._decay, self._momentum = matrix_lr, decay, momentum
        self._stacks: dict[torch.Size, list[nn.Parameter]] = {}
        others = []
        for name, p in named.items():
            if name.rsplit(".", 1)[-1] in MATRICES:
                self._stacks.setdefault(p.shape, []).append(p)
            else:
                others.append(p)
        self._moments = {shape: torch.zeros(len(ps), *shape, device=ps[0].device) for shape, ps in self._stacks.items()}
        self._other_lr = other_lr
        self._adam = torch.optim.AdamW(
            others, lr=other_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=others[0].is_cuda
        )

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group in self._adam.param_groups:
            group["lr"] = self._other_lr * lr
        self._adam.step()
        for shape, params in self._stacks.items():
            gradient = torch.stack([p.grad for p in params])
            moment = self._moments[shape]
            moment.lerp_(gradient, 1 - self._momentum)
            update = orthogonal(gradient.lerp(moment, self._momentum))
            rate = self._lr * lr
            torch._foreach_mul_(params, 1 - rate * self._decay)
            torch._foreach_add_(params, list(update.unbind()), alpha=-rate * max(1.0, shape[0] / shape[1]) ** 0.5)

    def state_dict(self) -> dict:
        return {"moments": list(self._moments.values()), "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        for mine, saved in zip(self._moments.values(), state["moments"], strict=True):
            mine.copy_(saved)
        self._adam.load_state_dict(state["adam"])
