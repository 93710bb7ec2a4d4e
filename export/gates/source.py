"""The checkpoint with its feed-forward channels in another order, and with gates: what quantisers and graphs read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimo_edge.export.families import Source
from mimo_edge.export.quantize.perplexity import ReadySource
from mimo_edge.export.quantize.rtn import Quantized
from mimo_edge.spec import TensorQuant

_SLAB_BYTES = 32 << 20  # source rows in memory at once while rows are gathered


@dataclass(frozen=True)
class Gate:
    """A layer's gate as mimo_edge/params.py names it: w1 float32 [rank, hidden], w2 [blocks, rank], bias [blocks]."""

    w1: NDArray[np.float32]
    w2: NDArray[np.float32]
    bias: NDArray[np.float32]


class GatedSource:
    """`source` with channel j of layer i's feed-forward taken from orders[i][j], and `gates` under their names.

    orders int64 [intermediate] by layer; layers that are not named are handed through.
    """

    def __init__(self, source: Source, orders: Mapping[int, NDArray[np.int64]], gates: Mapping[int, Gate]):
        self._source = source
        self._gate_up = {f"layers.{i}.gate_up": np.concatenate([o, len(o) + o]) for i, o in orders.items()}
        self._down = {f"layers.{i}.down": o for i, o in orders.items()}
        self._gates = {
            f"layers.{i}.gate.{part}": getattr(gate, part) for i, gate in gates.items() for part in ("w1", "w2", "bias")
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """As the source's own; beside what is asked it holds at most 32 MiB of rows."""
        if name in self._gates:
            return self._gates[name][start:stop].copy()
        if name in self._gate_up:
            return self._gathered(name, self._gate_up[name][start:stop])
        rows = self._source.read(name, start, stop)
        return np.take(rows, self._down[name], axis=1) if name in self._down else rows

    def ready(self, name: str, quant: TensorQuant, start: int = 0, stop: int | None = None) -> Quantized | None:
        """Rows that the checkpoint stores quantised already; None for those whose weights change places."""
        if name in self._gate_up or name in self._down or not isinstance(self._source, ReadySource):
            return None
        return self._source.ready(name, quant, start, stop)

    def _gathered(self, name: str, wanted: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows `wanted`, in that order, from few long reads."""
        if not len(wanted):
            return self._source.read(name, 0, 0)
        first = self._source.read(name, int(wanted[0]), int(wanted[0]) + 1)
        out = np.empty((len(wanted), first.shape[1]), np.float32)
        step = max(1, _SLAB_BYTES // first.nbytes)
        for low in range(int(wanted.min()), int(wanted.max()) + 1, step):
            high = min(low + step, int(wanted.max()) + 1)
            inside = np.flatnonzero((wanted >= low) & (wanted < high))
            if len(inside):
                out[inside] = self._source.read(name, low, high)[wanted[inside] - low]
        return out
