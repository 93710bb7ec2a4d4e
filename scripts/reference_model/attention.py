"""Attention over rows of documents: FlexAttention on a GPU, explicit scores on a CPU. Both give the same numbers.

A sink is one more logit in the softmax's denominator, so that the output is the plain one times
sum / (sum + exp(sink)) = sigmoid(lse - sink).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mimo_edge.spec import ModelSpec


class Masks:
    """Which keys a query sees, for every kind of attention: same document, not later, inside the window."""

    def __init__(self, spec: ModelSpec, batch: int, length: int, device: torch.device, explicit: bool = False):
        """`explicit` wants explicit scores on a GPU too: nothing to compile, for short rows."""
        self._windows = {kind: a.window for kind, a in spec.attention.items()}
        self._document = torch.zeros(batch, length, dtype=torch.int32, device=device)
        self._flex = device.type == "cuda" and not explicit
        self.held: dict = {}
        if self._flex:
            self._rules = {kind: self._rule(window) for kind, window in self._windows.items()}

    def set(self, document: Tensor) -> None:
        """Takes the documents [B, S] of the next batch, in place: the rules' tensors keep their identity, so that
        nothing is compiled again."""
        self._document.copy_(document)
        if not self._flex:
            self.held = {kind: self._dense(window) for kind, window in self._windows.items()}
            return
        from torch.nn.attention.flex_attention import create_block_mask

        b, s = self._document.shape
        for kind, rule in self._rules.items():
            self.held[kind] = create_block_mask(rule, b, None, s, s, device=self._document.device, _compile=True)

    def _rule(self, window: int | None):
        document = self._document
        if window is None:
            return lambda b, h, q, k: (q >= k) & (document[b, q] == document[b, k])
        return lambda b, h, q, k: (q >= k) & (q - k < window) & (document[b, q] == document[b, k])

    def _dense(self, window: int | None) -> Tensor:
        at = torch.arange(self._document.shape[1], device=self._document.device)
        seen = (at[:, None] >= at) & (at[:, None] - at < (window or len(at)))
        return seen & (self._document[:, :, None] == self._document[:, None, :])


def attend(mask, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """q [B, S, heads, D], k [B, S, kv_heads, D], v [B, S, kv_heads, Dv] -> [B, S, heads, Dv]; `mask` is from Masks."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return (dense if isinstance(mask, Tensor) else flex)(mask, q, k, v, scale, sinks).transpose(1, 2)


def flex(mask, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    y, lse = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_lse=True)
    if sinks is not None:
        y = y * torch.sigmoid(lse - sinks[None, :, None]).unsqueeze(-1).to(y.dtype)
    return y


def dense(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT).float() * scale
    scores = scores.masked_fill(~mask[:, None], -math.inf)
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    probs = scores.softmax(-1)[..., : k.shape[2]]
    return probs.to(v.dtype) @ v
