"""MTP heads of the onnxruntime backend: a graph each (export/graph/cpu.py), loaded when it first drafts.

A head's past is bound where it lies, as that of layers is. A ring is zeroed before its first row is evaluated, so that
all of it is finite, whatever lay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mimo_edge.backends import host_rows
from mimo_edge.backends.base import SequenceSlots
from mimo_edge.backends.onnxruntime_session import ON_CPU, Binding, Providers, load
from mimo_edge.kv.layout import HEAD_ROWS, HIDDEN_ROWS, KvLayout
from mimo_edge.kv.windows import past_mask, ring_positions

Floats = NDArray[np.float32]
_SMALL = 8 << 20  # weights of the output: a head of fewer is done before other threads have woken up


class OnnxHeads:
    """`models` are the graphs of at least layout.heads heads; the main model stores its rows in `hidden`."""

    def __init__(self, models: Sequence[Path], threads: int | None, layout: KvLayout, providers: Providers = ON_CPU):
        small = layout.spec.vocab_size * layout.spec.hidden_size < _SMALL
        self._models, self._threads, self._layout = models, 1 if small else threads, layout
        self._providers = providers
        self._a, self._chained = layout.head_attention, layout.spec.mtp is not None and layout.spec.mtp.chained
        self.hidden: Floats = np.zeros((host_rows.capacity(layout, HIDDEN_ROWS), layout.spec.hidden_size), np.float32)
        self._pools = [self._zeros(host_rows.capacity(layout, HEAD_ROWS)) for _ in range(layout.heads)]
        self._nothing = self._zeros(1)
        self._lanes: dict[int, _Lane] = {}
        self._last: dict[int, tuple[int, Floats]] = {}  # of each ring: first row and hidden states of the last head

    def draft(self, slots: SequenceSlots, head: int, held: int, start: int, tokens: NDArray[np.int64]) -> Floats:
        """As base.DraftHeads."""
        end, lane = start + len(tokens), self._lane(head)
        lane.shape(len(tokens))
        lane.tokens[:] = tokens
        lane.positions[:] = np.arange(start, end)
        self._fill_hidden(lane.hidden, slots, head, start, end)
        self._bind_past(lane, slots, head, held, start)
        lane.binding.run(len(tokens), start)
        self._store(head, slots, start, lane.new)
        if self._chained:
            self._last[slots.ring] = start, lane.own.copy()
        return lane.logits[0]

    def pools(self, kind: str) -> host_rows.Pools:
        """What `kind` consists of, as bytes go to and come from the prefix cache."""
        return [(self.hidden,)] if kind == HIDDEN_ROWS else self._pools

    def _lane(self, head: int) -> _Lane:
        if head not in self._lanes:
            self._lanes[head] = _Lane(load(self._models[head], self._threads, self._providers), self._layout)
        return self._lanes[head]

    def _fill_hidden(self, out: Floats, slots: SequenceSlots, head: int, start: int, end: int) -> None:
        if head and self._chained:
            first, own = self._last[slots.ring]
            out[:] = own[start - first : end - first]
            return
        for slot, row, count in host_rows.runs(self._layout, slots, HIDDEN_ROWS, start, end):
            out[row : row + count] = self.hidden[slot : slot + count]

    def _bind_past(self, lane: _Lane, slots: SequenceSlots, head: int, held: int, start: int) -> None:
        ring = self._layout.rings.get(HEAD_ROWS)
        if held == start:  # a row of zeros that the mask hides, as for layers
            if ring is not None:
                for pool in self._pools[head]:
                    pool[slots.ring * ring : (slots.ring + 1) * ring] = 0
            lane.past(self._nothing, 0, 1)
            positions = np.array([-1])
        elif ring is not None:
            positions = ring_positions(start, ring)
            lane.past(self._pools[head], slots.ring * ring, len(positions))
        else:
            positions = np.arange(held, start)
            lane.past(self._pools[head], slots.pages[0] * self._layout.page_size + held, len(positions))
        queries = lane.positions if self._chained else lane.positions[-1:]
        seen = past_mask(queries, np.concatenate([positions, lane.positions]), self._a.window)
        seen[:, : len(positions)] &= positions >= held
        lane.mask[:] = np.where(seen, np.float32(0), np.float32(-np.inf))

    def _store(self, head: int, slots: SequenceSlots, start: int, new: tuple[Floats, Floats]) -> None:
        end = start + len(new[0])
        first = max(start, end - self._layout.rings.get(HEAD_ROWS, self._layout.context))
        for slot, row, count in host_rows.runs(self._layout, slots, HEAD_ROWS, first, end):
            row += first - start
            for pool, rows in zip(self._pools[head], new, strict=True):
                pool[slot : slot + count] = rows[row : row + count]

    def _zeros(self, slots: int) -> tuple[Floats, Floats]:
        a = self._a
        shapes = (slots, a.kv_heads, a.head_dim), (slots, a.kv_heads, a.v_head_dim)
        return np.zeros(shapes[0], np.float32), np.zeros(shapes[1], np.float32)


class _Lane:
    """Bound buffers of one head, kept as long as the numbers of new and of past rows stay the same; a full ring of one
    sequence is bound once."""

    def __init__(self, session: ort.InferenceSession, layout: KvLayout):
        self.binding = Binding(session)
        self._spec, self._a = layout.spec, layout.head_attention
        assert self._spec.mtp is not None
        self._chained, self._mask = self._spec.mtp.chained, f"mask.{self._spec.mtp.attention}"
        self.logits = self._output("logits", (1, self._spec.vocab_size))
        self._rows = self._columns = 0
        self._past: tuple[int, int, int] = (0, 0, 0)

    def shape(self, rows: int) -> None:
        if rows == self._rows:
            return
        self._rows, self._columns = rows, 0
        a, hidden = self._a, (rows, self._spec.hidden_size)
        self.tokens: NDArray[np.int64] = self._input("tokens", np.empty(rows, np.int64))
        self.positions: NDArray[np.int64] = self._input("positions", np.empty(rows, np.int64))
        self.hidden: Floats = self._input("hidden", np.empty(hidden, np.float32))
        self.new = (
            self._output("new_k", (rows, a.kv_heads, a.head_dim)),
            self._output("new_v", (rows, a.kv_heads, a.v_head_dim)),
        )
        if self._chained:
            self.own = self._output("own", hidden)

    def past(self, pools: tuple[Floats, Floats], slot: int, count: int) -> None:
        """Binds slots [slot, slot + count) and a mask for them and the new rows."""
        if (at := (id(pools[0]), slot, count)) != self._past:
            self._past = at
            for name, pool in zip(("past_k", "past_v"), pools, strict=True):
                self._input(name, pool[slot : slot + count])
        if self._columns != count + self._rows:
            self._columns = count + self._rows
            shape = (self._rows if self._chained else 1, self._columns)
            self.mask: Floats = self._input(self._mask, np.empty(shape, np.float32))

    def _input(self, name: str, array: NDArray) -> NDArray:
        self.binding.input(name, array)
        return array

    def _output(self, name: str, shape: tuple[int, ...]) -> Floats:
        array = np.empty(shape, np.float32)
        self.binding.output(name, array)
        return array
