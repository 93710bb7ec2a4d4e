"""ONNX Runtime on a CPU: float32 pools in this process, bound where they lie. The graph is export/graph/cpu.py's.

Pools are slot-major, so a sequence's written slots are one contiguous view: pages of a sequence must follow each other
on this backend, and a ring is written from its slot 0 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mimo_edge.backends import host_rows
from mimo_edge.backends.base import Step, StepOutput
from mimo_edge.backends.onnxruntime_heads import OnnxHeads
from mimo_edge.backends.onnxruntime_session import ON_CPU, Binding, Providers, load, name_of
from mimo_edge.bundle import Bundle, head_graphs
from mimo_edge.errors import MimoEdgeError
from mimo_edge.kv.layout import HEAD_ROWS, HIDDEN_ROWS, KvLayout, SequenceSlots
from mimo_edge.kv.windows import past_mask, ring_positions
from mimo_edge.spec import MAX_DRAFTS, ModelSpec

MODEL, FLOAT_MODEL = "model.cpu.onnx", "model.cpu-float.onnx"

Rows = tuple[NDArray[np.float32], NDArray[np.float32]]  # keys [n, kv_heads, head_dim], values [n, kv_heads, v_head_dim]


class OnnxRuntimeBackend:
    """Runs the bundle's CPU graph, one sequence after the other. Implements backends/base.py."""

    name = "onnxruntime"

    def __init__(
        self,
        spec: ModelSpec,
        model: Path,
        threads: int | None = None,
        heads: Sequence[Path] = (),
        providers: Providers = ON_CPU,
    ):
        """Loads `model`, whose weights are mapped from the file it names. Raises MimoEdgeError if that fails.

        `heads` are the graphs of MTP heads, which are loaded when they draft.
        """
        self._spec = spec
        self.row_format = f"float32 {model.name}"
        if name_of(providers) != name_of(ON_CPU):
            self.row_format += f" {name_of(providers)}"
        self._session = load(model, threads, providers)
        self.heads = len(heads)
        self._head_graphs, self._threads, self._providers = heads, threads, providers
        self._heads: OnnxHeads | None = None
        self._layers: dict[str, list[int]] = {}  # of each attention kind: layers of a kind use the same slots
        for i, layer in enumerate(spec.layers):
            self._layers.setdefault(layer.attention, []).append(i)
        self._pools: list[Rows] = []
        self._nothing: list[Rows] = []
        self._lanes: dict[tuple[int, int, int], _Lane] = {}
        self._pending: list[tuple[Step, _Lane]] = []

    @staticmethod
    def open(
        bundle: Bundle, threads: int | None = None, float_activations: bool = False, providers: Providers = ON_CPU
    ) -> OnnxRuntimeBackend:
        """`threads` None means one a core. `float_activations` keeps quantised products exact in their activations,
        which are otherwise rounded to 8 bits: slower, for comparisons. So are other `providers` than the CPU's: rows
        stay in this process's memory, and are copied for every step."""
        model = FLOAT_MODEL if float_activations else MODEL
        heads = [bundle.file(name) for name in head_graphs(model, bundle.spec) if bundle.has(name)]
        backend = OnnxRuntimeBackend(bundle.spec, bundle.file(model), threads, heads, providers)
        backend.name = "onnxruntime-float" if float_activations else "onnxruntime"
        return backend

    def allocate(self, layout: KvLayout) -> None:
        """Zeroed pools; the system commits a page of memory only when it is first written."""
        self._layout = layout
        slots = [host_rows.capacity(layout, layer.attention) for layer in self._spec.layers]
        self._pools = [self._zeros(i, n) for i, n in enumerate(slots)]
        self._heads = OnnxHeads(self._head_graphs, self._threads, layout, self._providers) if layout.heads else None
        self._nothing = [self._zeros(i, 1) for i in range(len(self._spec.layers))]
        self._lanes = {}

    def run(self, steps: Sequence[Step]) -> list[StepOutput]:
        self._pending = []
        lanes = [self._lane(j, step) for j, step in enumerate(steps)]
        outputs = [StepOutput(self._run(step, lane)) for step, lane in zip(steps, lanes, strict=True)]
        self._pending = list(zip(steps, lanes, strict=True))
        return outputs

    def commit(self, accepted: Sequence[int]) -> None:
        for (step, lane), rows in zip(self._pending, accepted, strict=True):
            for kind, layers in self._layers.items():
                pieces = self._pieces(kind, step, rows)
                for i in layers:
                    for pool, new in zip(self._pools[i], lane.rows[i], strict=True):
                        for slot, row, count in pieces:
                            pool[slot : slot + count] = new[row : row + count]
            if self._heads and lane.hidden is not None:
                for slot, row, count in self._pieces(HIDDEN_ROWS, step, rows):
                    self._heads.hidden[slot : slot + count] = lane.hidden[row : row + count]
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
        self._pools, self._nothing, self._lanes, self._pending = [], [], {}, []
        self._session = self._heads = None

    def _host_pools(self, kind: str) -> host_rows.Pools:
        if self._heads and kind in (HEAD_ROWS, HIDDEN_ROWS):
            return self._heads.pools(kind)
        return [self._pools[i] for i in self._layers[kind]]

    def _lane(self, j: int, step: Step) -> _Lane:
        """Of the j-th step of a run. The number of drafts changes from step to step: each has bindings of its own."""
        few = len(step.tokens) <= MAX_DRAFTS + 1
        key = (j, len(step.tokens), len(step.logit_rows)) if few else (j, 0, 0)
        if key not in self._lanes:
            self._lanes[key] = _Lane(self._session, self._spec, self._heads is not None)
        return self._lanes[key]

    def _run(self, step: Step, lane: _Lane) -> NDArray[np.float32]:
        self._check(step)
        lane.shape(len(step.tokens), len(step.logit_rows))
        bind = lane.binding.input
        queries = np.arange(step.start, step.start + len(step.tokens))
        bind("tokens", np.ascontiguousarray(step.tokens, np.int64))
        bind("positions", queries)
        bind("logit_rows", np.ascontiguousarray(step.logit_rows, np.int64))
        for kind, layers in self._layers.items():
            bind(f"mask.{kind}", self._mask(kind, step.start, queries))
            first, last = self._committed(kind, step)
            if not lane.moved(kind, first, last, step.start > 0):
                continue
            for i in layers:
                k, v = self._pools[i] if step.start else self._nothing[i]
                bind(f"past_k.{i}", k[first:last])
                bind(f"past_v.{i}", v[first:last])
        lane.binding.run(len(step.tokens), step.start)
        return lane.logits

    def _mask(self, kind: str, start: int, queries: NDArray[np.int64]) -> NDArray[np.float32]:
        ring = self._layout.rings.get(kind)
        past = np.arange(start) if ring is None else ring_positions(start, ring)
        seen = past_mask(queries, np.concatenate([past, queries]), self._spec.attention[kind].window)
        if start == 0:  # the row of _nothing
            seen = np.pad(seen, ((0, 0), (1, 0)))
        return np.where(seen, np.float32(0), np.float32(-np.inf))

    def _check(self, step: Step) -> None:
        """A wrong step would read or write a neighbour's slots."""
        pages, end = step.slots.pages, step.start + len(step.tokens)
        if pages != tuple(range(pages[0], pages[0] + len(pages)) if pages else ()):
            raise MimoEdgeError(f"backend onnxruntime needs pages in one run, got {pages[:8]}...")
        if end > len(pages) * self._layout.page_size:
            raise MimoEdgeError(f"rows up to {end} do not fit into {len(pages)} pages of {self._layout.page_size}")

    def _committed(self, kind: str, step: Step) -> tuple[int, int]:
        """Slots [first, last) that hold committed rows. Before there are any, one row of zeros that the mask hides is
        read instead: ONNX Runtime before 1.27 divides by zero on an empty past."""
        ring = self._layout.rings.get(kind)
        if step.start == 0:
            return 0, 1
        first = self._base(kind, step.slots)
        return first, first + (step.start if ring is None else min(step.start, ring))

    def _pieces(self, kind: str, step: Step, rows: int) -> list[tuple[int, int, int]]:
        """(slot, row, count) of the runs in which the first `rows` rows are stored; of more than a ring, the newest."""
        ring, base = self._layout.rings.get(kind), self._base(kind, step.slots)
        if ring is None:
            return [(base + step.start, 0, rows)]
        pieces, row = [], max(0, rows - ring)
        while row < rows:  # up to the ring's end, then from its start
            slot = (step.start + row) % ring
            count = min(rows - row, ring - slot)
            pieces.append((base + slot, row, count))
            row += count
        return pieces

    def _base(self, kind: str, slots: SequenceSlots) -> int:
        ring = self._layout.rings.get(kind)
        return slots.pages[0] * self._layout.page_size if ring is None else slots.ring * ring

    def _zeros(self, i: int, slots: int) -> Rows:
        a = self._spec.attention_of(i)
        shapes = (slots, a.kv_heads, a.head_dim), (slots, a.kv_heads, a.v_head_dim)
        return np.zeros(shapes[0], np.float32), np.zeros(shapes[1], np.float32)


class _Lane:
    """Bindings and output buffers of a step, kept as long as T and M stay the same."""

    def __init__(self, session: ort.InferenceSession, spec: ModelSpec, with_hidden: bool):
        self.binding = Binding(session)
        self.logits = np.empty((0, spec.vocab_size), np.float32)
        self.rows: list[Rows] = []
        self.hidden: NDArray[np.float32] | None = None
        self._spec, self._with_hidden = spec, with_hidden
        self._shape = (-1, -1)
        self._past: dict[str, tuple] = {}

    def moved(self, kind: str, *past: int) -> bool:
        """Whether the kind's past lies elsewhere than at the last call; a full ring stays where it is."""
        if self._past.get(kind) == past:
            return False
        self._past[kind] = past
        return True

    def shape(self, rows: int, logit_rows: int) -> None:
        if (rows, logit_rows) == self._shape:
            return
        self._shape = (rows, logit_rows)
        self.logits = np.empty((logit_rows, self._spec.vocab_size), np.float32)
        self.binding.output("logits", self.logits)
        if self._with_hidden:
            self.hidden = np.empty((rows, self._spec.hidden_size), np.float32)
            self.binding.output("hidden", self.hidden)
        self.rows = []
        for i in range(len(self._spec.layers)):
            a = self._spec.attention_of(i)
            k = np.empty((rows, a.kv_heads, a.head_dim), np.float32)
            v = np.empty((rows, a.kv_heads, a.v_head_dim), np.float32)
            self.binding.output(f"new_k.{i}", k)
            self.binding.output(f"new_v.{i}", v)
            self.rows.append((k, v))
