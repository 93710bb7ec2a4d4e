"""The oracle behind the backend interface: PyTorch float32, KV in pools, weights dequantised on use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimo_edge.backends import host_rows, oracle
from mimo_edge.backends.base import SequenceSlots, Step, StepOutput
from mimo_edge.backends.reference_heads import ReferenceHeads
from mimo_edge.bundle import Bundle, read_tensors
from mimo_edge.kernels.int4_linear.reference import dequantize
from mimo_edge.kv.layout import HEAD_ROWS, HIDDEN_ROWS, KvLayout
from mimo_edge.kv.windows import ring_positions
from mimo_edge.params import parameters
from mimo_edge.spec import ModelSpec


class BundleWeights:
    """oracle.Weights over a bundle's file: float32 parameters as they are, quantised ones dequantised when asked for.

    `keep` holds the dequantised tensors: several times faster, at 32 bits a weight.
    """

    def __init__(self, spec: ModelSpec, tensors: dict[str, np.ndarray], keep: bool = False):
        self._bits = {p.name: q.bits for p in parameters(spec) if (q := spec.quant.of(p.kind))}
        self._tensors = tensors
        self._kept: dict[str, Tensor] | None = {} if keep else None

    def get(self, name: str) -> Tensor:
        if self._kept is not None and name in self._kept:
            return self._kept[name]
        value = self._load(name)
        if self._kept is not None:
            self._kept[name] = value
        return value

    def rows(self, name: str, index: Tensor) -> Tensor:
        if name not in self._bits:
            return self._tensor(name)[index]
        q, scales, zeros = (self._tensor(f"{name}.{part}", index) for part in ("q", "scales", "zeros"))
        return dequantize(q, scales, zeros, self._bits[name])

    def _load(self, name: str) -> Tensor:
        if name not in self._bits:
            return self._tensor(name)
        q, scales, zeros = (self._tensor(f"{name}.{part}") for part in ("q", "scales", "zeros"))
        return dequantize(q, scales, zeros, self._bits[name])

    def _tensor(self, name: str, index: Tensor | None = None) -> Tensor:
        array = self._tensors[name]
        return torch.from_numpy(np.array(array if index is None else array[index.numpy()]))


class ReferenceBackend:
    """Slow and readable. Reads only slots that hold a committed position, so free slots may hold anything."""

    name = "reference"
    row_format = "float32 exact"

    def __init__(self, spec: ModelSpec, weights: oracle.Weights):
        self._spec = spec
        self._weights = weights
        self._pools: list[tuple[Tensor, Tensor]] = []
        self._pending: list[tuple[Step, oracle.Output]] = []
        self._heads: ReferenceHeads | None = None
        self.heads = spec.mtp.heads if spec.mtp else 0

    @staticmethod
    def open(bundle: Bundle) -> ReferenceBackend:
        weights = BundleWeights(bundle.spec, read_tensors(bundle.file("weights.safetensors")), keep=True)
        return ReferenceBackend(bundle.spec, weights)

    def allocate(self, layout: KvLayout) -> None:
        self._layout = layout
        self._pools = []
        for layer in self._spec.layers:
            a = self._spec.attention[layer.attention]
            slots = host_rows.capacity(layout, layer.attention)
            self._pools.append(
                (torch.zeros(slots, a.kv_heads, a.head_dim), torch.zeros(slots, a.kv_heads, a.v_head_dim))
            )
        self._heads = ReferenceHeads(self._weights, layout) if layout.heads else None

    def run(self, steps: Sequence[Step]) -> list[StepOutput]:
        self._pending = []
        outputs = []
        for step in steps:
            with torch.inference_mode():
                out = oracle.forward(
                    self._spec,
                    self._weights,
                    torch.from_numpy(step.tokens),
                    torch.arange(step.start, step.start + len(step.tokens)),
                    [self._past(i, step.slots, step.start) for i in range(len(self._spec.layers))],
                    torch.from_numpy(step.logit_rows),
                )
            self._pending.append((step, out))
            outputs.append(StepOutput(out.logits.numpy()))
        return outputs

    def commit(self, accepted: Sequence[int]) -> None:
        for (step, out), rows in zip(self._pending, accepted, strict=True):
            for i, (k, v) in enumerate(out.new):
                ring = self._ring(i)
                # of a long chunk only the newest R rows stay; older ones would be overwritten at once
                first = 0 if ring is None else max(0, rows - ring)
                at = self._slots(i, step.slots, np.arange(step.start + first, step.start + rows))
                self._pools[i][0][at], self._pools[i][1][at] = k[first:rows], v[first:rows]
            if self._heads:
                self._heads.store(step.slots, step.start, out.hidden[:rows])
        self._pending = []

    def draft(
        self, slots: SequenceSlots, head: int, held: int, start: int, tokens: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        assert self._heads is not None, "the layout has no heads"
        return self._heads.draft(slots, head, held, start, tokens)

    def read_rows(self, slots: SequenceSlots, kind: str, first: int, last: int, out: NDArray[np.uint8]) -> None:
        host_rows.read(self._host_pools(kind), self._layout, slots, kind, first, last, out)

    def write_rows(self, slots: SequenceSlots, kind: str, first: int, last: int, rows: NDArray[np.uint8]) -> None:
        host_rows.write(self._host_pools(kind), self._layout, slots, kind, first, last, rows)

    def close(self) -> None:
        self._pools, self._pending, self._heads = [], [], None

    def _host_pools(self, kind: str) -> host_rows.Pools:
        if self._heads and kind in (HEAD_ROWS, HIDDEN_ROWS):
            return self._heads.pools(kind)
        layers = [i for i, layer in enumerate(self._spec.layers) if layer.attention == kind]
        return [(self._pools[i][0].numpy(), self._pools[i][1].numpy()) for i in layers]

    def _ring(self, i: int) -> int | None:
        return self._layout.rings.get(self._spec.layers[i].attention)

    def _slots(self, i: int, slots: SequenceSlots, positions: np.ndarray) -> Tensor:
        kind = self._spec.layers[i].attention
        return torch.from_numpy(host_rows.addresses(self._layout, slots, kind, positions))

    def _past(self, i: int, slots: SequenceSlots, start: int) -> oracle.Past:
        ring = self._ring(i)
        positions = np.arange(start) if ring is None else ring_positions(start, ring)
        at = self._slots(i, slots, positions)
        k, v = self._pools[i]
        return oracle.Past(k[at], v[at], torch.from_numpy(positions))
