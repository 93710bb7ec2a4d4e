"""Perplexity of several quantisations of one model, with one layer's weights in memory at a time.

All candidates advance together: hidden states of the texts are kept for each of them (about 1,000 rows a text), and a
layer's weights are read once. The head is taken in blocks of vocabulary rows with a running log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimo_edge.backends import oracle
from mimo_edge.export.quantize.rtn import Quantized
from mimo_edge.kernels.int4_linear.reference import dequantize
from mimo_edge.params import parameters
from mimo_edge.spec import ModelSpec, QuantSpec, TensorQuant

Method = Callable[[NDArray[np.float32], TensorQuant, str], Quantized]  # rows, how, name of the tensor

_CACHE_BYTES = 768 << 20  # dequantised tensors kept for the other candidates; a layer of 1.7B-parameter models needs 600 MB
_HEAD_BYTES = 64 << 20  # one block of the head, and its logits, in float32


class Source(Protocol):
    """Float32 rows [start, stop) of canonical parameters (mimo_edge/export/families/checkpoint.py)."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]: ...


class LayerCache:
    """Tensors of the current layer as they are after storing them in a given precision; `clear` before the next layer."""

    def __init__(self, source: Source, method: Method):
        self._source, self._method = source, method
        self._held: dict[tuple[str, TensorQuant | None], Tensor] = {}
        self._bytes = 0

    def get(self, name: str, quant: TensorQuant | None) -> Tensor:
        if (name, quant) in self._held:
            return self._held[name, quant]
        value = restored(self.get(name, None).numpy(), quant, name, self._method) if quant else self._read(name)
        if self._bytes + value.nbytes <= _CACHE_BYTES:
            self._held[name, quant] = value
            self._bytes += value.nbytes
        return value

    def clear(self) -> None:
        self._held.clear()
        self._bytes = 0

    def _read(self, name: str) -> Tensor:
        return torch.from_numpy(self._source.read(name))


def restored(rows: NDArray[np.float32], quant: TensorQuant | None, name: str, method: Method) -> Tensor:
    """What a runtime sees of `rows` [n, K] when they are stored as `quant` says: float32 [n, K]."""
    if quant is None:
        return torch.from_numpy(rows)
    q, scales, zeros = (torch.from_numpy(part) for part in method(rows, quant, name))
    return dequantize(q, scales, zeros, quant.bits)


class _Weights:
    """oracle.Weights of one candidate."""

    def __init__(self, cache: LayerCache, kinds: dict[str, str], quant: QuantSpec):
        self._cache, self._kinds, self._quant = cache, kinds, quant

    def get(self, name: str) -> Tensor:
        return self._cache.get(name, self._quant.of(self._kinds[name]))

    def rows(self, name: str, index: Tensor) -> Tensor:
        raise NotImplementedError(f"layers do not look up rows of {name}")


def hidden_states(
    spec: ModelSpec,
    source: Source,
    method: Method,
    candidates: Sequence[QuantSpec],
    texts: Sequence[Tensor],
    progress: Callable[[int, int], None],
) -> list[list[Tensor]]:
    """Normed hidden rows [T, hidden] of every text (int64 [T]) for every candidate: result[candidate][text].

    `progress` gets (layers done, layers in all).
    """
    cache = LayerCache(source, method)
    kinds = {p.name: p.kind for p in parameters(spec)}
    weights = [_Weights(cache, kinds, quant) for quant in candidates]
    states = [[_embed(spec, source, method, quant.embedding, text) for text in texts] for quant in candidates]
    for i, layer in enumerate(spec.layers):
        cache.clear()
        for candidate, of_texts in zip(weights, states, strict=True):
            for t, x in enumerate(of_texts):
                positions = torch.arange(len(x))
                of_texts[t], _, _ = oracle.block(
                    spec, candidate, f"layers.{i}", layer.attention, layer.ffn, x, positions, None
                )
        progress(i + 1, len(spec.layers))
    norm = torch.from_numpy(source.read("norm"))
    return [[oracle.rms_norm(x, norm, spec.norm_eps) for x in of_texts] for of_texts in states]


def _embed(spec: ModelSpec, source: Source, method: Method, quant: TensorQuant | None, text: Tensor) -> Tensor:
    used, index = text.unique(return_inverse=True)
    rows = np.concatenate([source.read("embed", t, t + 1) for t in used.tolist()])
    return restored(rows, quant, "embed", method)[index] * spec.embed_scale


def cross_entropy(
    spec: ModelSpec, source: Source, method: Method, quant: TensorQuant | None, hidden: Tensor, targets: Tensor
) -> Tensor:
    """Nats of every row: hidden [T, hidden] (normed) predicting targets int64 [T] -> float64 [T]."""
    name = "embed" if spec.tied else "head"
    step = max(1, _HEAD_BYTES // 4 // max(spec.hidden_size, len(hidden)))
    log_sum = torch.full((len(hidden),), -torch.inf, dtype=torch.float64)
    chosen = torch.zeros(len(hidden), dtype=torch.float64)
    for start in range(0, spec.vocab_size, step):
        rows = source.read(name, start, min(start + step, spec.vocab_size))
        logits = hidden @ restored(rows, quant, "head", method).T
        log_sum = torch.logaddexp(log_sum, logits.logsumexp(-1).double())
        inside = (targets >= start) & (targets < start + len(rows))
        chosen[inside] = logits[inside, targets[inside] - start].double()
    return log_sum - chosen
