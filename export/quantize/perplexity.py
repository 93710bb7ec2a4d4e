"""How well a quantisation predicts text, with one layer's weights (and one block of the head) in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimo_edge.backends import oracle
from mimo_edge.export.quantize.rtn import Quantized
from mimo_edge.kernels.int4_linear.reference import dequantize
from mimo_edge.params import parameters
from mimo_edge.spec import ModelSpec, QuantSpec, TensorQuant

Method = Callable[[NDArray[np.float32], TensorQuant, str], Quantized]  # rows [n, K], how, name of the tensor

_LAYER_BYTES = 1 << 30  # a layer's tensors kept for the second text; larger layers (many experts) are read again
_HEAD_BYTES = 64 << 20  # one block of the head in float32, and its logits


class Source(Protocol):
    """Float32 rows [start, stop) of canonical parameters (mimo_edge/export/families/checkpoint.py)."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]: ...


@runtime_checkable
class ReadySource(Source, Protocol):
    """A source whose weights may already be quantised: `read` gives them dequantised, `ready` as they are."""

    def ready(self, name: str, quant: TensorQuant, start: int = 0, stop: int | None = None) -> Quantized | None:
        """Rows [start, stop) of a 2-D parameter as params.stored lays them out for `quant`, exactly the weights of
        `read`; None if the parameter is not stored so. Raises as `read` does."""
        ...


class LayerWeights:
    """oracle.Weights of `source` as if stored in `quant`; `clear` before each layer."""

    def __init__(self, spec: ModelSpec, source: Source, method: Method, quant: QuantSpec):
        self._source, self._method = source, method
        self._quants = {p.name: quant.of(p.kind) for p in parameters(spec)}
        self._held: dict[str, Tensor] = {}
        self._bytes = 0

    def get(self, name: str) -> Tensor:
        if name in self._held:
            return self._held[name]
        value = read_restored(self._source, name, 0, None, self._quants[name], self._method)
        if self._bytes + value.nbytes <= _LAYER_BYTES:
            self._held[name] = value
            self._bytes += value.nbytes
        return value

    def rows(self, name: str, index: Tensor) -> Tensor:
        """Quantises only the rows asked for: groups lie along K, so that rows are independent."""
        used, place = index.unique(return_inverse=True)
        quant = self._quants[name]
        ready = isinstance(self._source, ReadySource) and quant and self._source.ready(name, quant, 0, 1)
        if ready:
            rows = [read_restored(self._source, name, i, i + 1, quant, self._method) for i in used.tolist()]
            return torch.cat(rows)[place]
        read = np.concatenate([self._source.read(name, i, i + 1) for i in used.tolist()])
        return restored(read, quant, name, self._method)[place]

    def clear(self) -> None:
        self._held.clear()
        self._bytes = 0


def restored(rows: NDArray[np.float32], quant: TensorQuant | None, name: str, method: Method) -> Tensor:
    """What a runtime sees of float32 `rows` [n, K] that are stored as `quant` says."""
    if quant is None:
        return torch.from_numpy(rows)
    q, scales, zeros = (torch.from_numpy(part) for part in method(rows, quant, name))
    return dequantize(q, scales, zeros, quant.bits)


def read_restored(
    source: Source, name: str, start: int, stop: int | None, quant: TensorQuant | None, method: Method
) -> Tensor:
    """What a runtime sees of the source's rows [start, stop), stored as `quant` says."""
    if quant and isinstance(source, ReadySource) and (ready := source.ready(name, quant, start, stop)):
        return dequantize(*map(torch.from_numpy, ready), quant.bits)
    return restored(source.read(name, start, stop), quant, name, method)


def hidden_states(
    spec: ModelSpec, weights: LayerWeights, texts: Sequence[Tensor], progress: Callable[[int, int], None]
) -> list[Tensor]:
    """Normed hidden rows float32 [T, hidden] of each text (int64 [T]). `progress` gets (layers done, all layers)."""
    states = [weights.rows("embed", text) * spec.embed_scale for text in texts]
    for i, kinds in enumerate(spec.layers):
        weights.clear()
        for t, x in enumerate(states):
            positions = torch.arange(len(x))
            states[t], _, _ = oracle.block(spec, weights, f"layers.{i}", kinds.attention, kinds.ffn, x, positions, None)
        progress(i + 1, len(spec.layers))
    return [oracle.rms_norm(x, weights.get("norm"), spec.norm_eps) for x in states]


def cross_entropy(
    spec: ModelSpec, source: Source, method: Method, quant: TensorQuant | None, hidden: Tensor, targets: Tensor
) -> Tensor:
    """Nats that each row of `hidden` [T, hidden] (normed) needs for its target int64 [T]: float64 [T].

    The head, stored as `quant` says, is taken in blocks of vocabulary rows with a running log-sum-exp.
    """

    def as_head(rows: NDArray[np.float32], how: TensorQuant, name: str) -> Quantized:
        return method(rows, how, "head")  # a tied head is read as the embedding, but may be rounded in its own way

    name = "embed" if spec.tied else "head"
    step = max(1, _HEAD_BYTES // 4 // max(spec.hidden_size, len(hidden)))
    log_sum = torch.full((len(hidden),), -torch.inf, dtype=torch.float64)
    chosen = torch.zeros(len(hidden), dtype=torch.float64)
    for start in range(0, spec.vocab_size, step):
        rows = read_restored(source, name, start, min(start + step, spec.vocab_size), quant, as_head)
        logits = hidden @ rows.T
        log_sum = torch.logaddexp(log_sum, logits.logsumexp(-1).double())
        inside = (targets >= start) & (targets < start + len(rows))
        chosen[inside] = logits[inside, targets[inside] - start].double()
    return log_sum - chosen
