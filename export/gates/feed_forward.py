"""A layer's dense feed-forward on the rows of several texts, and the walk through all layers that masks it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from mimo_edge.backends import oracle
from mimo_edge.export.quantize.perplexity import LayerWeights, Source
from mimo_edge.export.quantize.rtn import quantize_rows
from mimo_edge.spec import ModelSpec, QuantSpec

_ROWS = 1024  # rows whose gate and up products are in memory at once


class FeedForward:
    """Layer `i` behind its attention; `residual` float32 [T, hidden] is the residual stream there."""

    def __init__(self, spec: ModelSpec, weights: oracle.Weights, i: int, residual: Tensor):
        self.spec, self.i, self.residual = spec, i, residual
        self._f = spec.ffn_of(i)
        self._weights = weights
        self.down = self._get("down")
        self.x = oracle.rms_norm(residual, self._get("ffn_norm"), spec.norm_eps)

    def _get(self, name: str) -> Tensor:
        return self._weights.get(f"layers.{self.i}.{name}")

    @cached_property
    def h(self) -> Tensor:
        """Activations in front of `down`, float32 [T, intermediate]."""
        h = torch.empty(len(self.x), self._f.intermediate)
        for x, part in zip(self.x.split(_ROWS), h.split(_ROWS), strict=True):
            part.copy_(oracle.activated(self._f, self._get("gate_up"), x))
        return h

    @property
    def bias(self) -> Tensor | float:
        """What is added to the output of `down` [hidden]; 0 in most models."""
        return self._get("down.bias") if self.spec.output_bias else 0.0

    @property
    def post_norm(self) -> Tensor | None:
        """Weight [hidden] of the norm behind `down`, where the model has one."""
        return self._get("post_ffn_norm") if self.spec.post_norms else None

    def reordered(self, order: Tensor) -> FeedForward:
        """The same with channel j taken from order[j]."""
        other = copy.copy(self)
        other.h, other.down = self.h[:, order], self.down[:, order]
        return other

    def output(self, keep: Tensor | None = None) -> Tensor:
        """The residual stream behind the layer [T, hidden]; `keep` 0/1 [T, blocks] drops blocks of channels."""
        h = self.h
        if keep is not None:
            h = h * keep.repeat_interleave(h.shape[1] // keep.shape[1], dim=1)
        y = h @ self.down.T + self.bias
        if self.post_norm is not None:
            y = oracle.rms_norm(y, self.post_norm, self.spec.norm_eps)
        return self.residual + y


Visit = Callable[[FeedForward], "Tensor | None"]  # 0/1 [T, blocks] of what to keep, or None for everything


def float_weights(spec: ModelSpec, source: Source) -> LayerWeights:
    """The checkpoint's own weights, one layer in memory at a time."""
    return LayerWeights(spec, source, quantize_rows, QuantSpec())


def walk(
    spec: ModelSpec, source: Source, texts: Sequence[Tensor], visit: Visit, progress: Callable[[int, int], None]
) -> Tensor:
    """Normed hidden rows float32 [T, hidden] of all texts (int64, one after the other), seen through `visit`.

    `visit` gets each layer's feed-forward in turn and says what its rows keep. Rows of different texts do not see each
    other. One layer's weights are in memory at a time. `progress` gets (layers done, all layers).
    """
    weights = float_weights(spec, source)
    sizes = [len(text) for text in texts]
    x = weights.rows("embed", torch.cat(list(texts))) * spec.embed_scale
    for i in range(len(spec.layers)):
        weights.clear()
        behind = torch.cat([attend(spec, weights, i, part) for part in x.split(sizes)])
        ffn = FeedForward(spec, weights, i, behind)
        x = ffn.output(visit(ffn))
        progress(i + 1, len(spec.layers))
    return oracle.rms_norm(x, weights.get("norm"), spec.norm_eps)


def attend(spec: ModelSpec, weights: oracle.Weights, i: int, x: Tensor) -> Tensor:
    """The attention half of layer `i` on all rows x [T, hidden] of one text."""

    def get(name: str) -> Tensor:
        return weights.get(f"layers.{i}.{name}")

    normed = oracle.rms_norm(x, get("attn_norm"), spec.norm_eps)
    y, _, _ = oracle.attention(spec.attention_of(i), spec.norm_eps, get, normed, torch.arange(len(x)), None)
    y = y + get("o.bias") if spec.output_bias else y
    return x + (oracle.rms_norm(y, get("post_attn_norm"), spec.norm_eps) if spec.post_norms else y)
