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
from mimo_edge.bundle import Bundle
from mimo_edge.errors import MimoEdgeError
from mimo_edge.kv.layout import KvLayout, SequenceSlots
from mimo_edge.kv.windows import past_mask, ring_positions
from mimo_edge.spec import ModelSpec

MODEL, FLOAT_MODEL = "model.cpu.onnx", "model.cpu-float.onnx"
# Steps of more rows give their scratch memory back: a prefill chunk's is a hundred times that of a decode step.
_LARGE_STEP = 16

Rows = tuple[NDArray[np.float32], NDArray[np.float32]]  # keys [n, kv_heads, head_dim], values [n, kv_heads, v_head_dim]


class OnnxRuntimeBackend:
    """Runs the bundle's CPU graph, one sequence after the other. Implements backends/base.py."""

    name = "onnxruntime"

    def __init__(self, spec: ModelSpec, model: Path, threads: int | None = None):
        """Loads `model`, whose weights are mapped from the file it names. Raises MimoEdgeError if that fails."""
        self._spec = spec
        self.row_format = f"float32 {model.name}"
        self._session = _load(model, threads)
        self._layers: dict[str, list[int]] = {}  # of each attention kind: layers of a kind use the same slots
        for i, layer in enumerate(spec.layers):
            self._layers.setdefault(layer.attention, []).append(i)
        self._pools: list[Rows] = []
        self._nothing: list[Rows] = []
        self._lanes: list[_Lane] = []
        self._pending: list[Step] = []
        self._give_back = ort.RunOptions()
        self._give_back.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

    @staticmethod
    def open(bundle: Bundle, threads: int | None = None, float_activations: bool = False) -> OnnxRuntimeBackend:
        """`threads` None means one a core. `float_activations` keeps quantised products exact in their activations,
        which are otherwise rounded to 8 bits: slower, for comparisons."""
        model = bundle.file(FLOAT_MODEL if float_activations else MODEL)
        backend = OnnxRuntimeBackend(bundle.spec, model, threads)
        backend.name = "onnxruntime-float" if float_activations else "onnxruntime"
        return backend

    def allocate(self, layout: KvLayout) -> None:
        """Zeroed pools; the system commits a page of memory only when it is first written."""
        self._layout = layout
        slots = {
            kind: layout.sequences * layout.rings[kind] if kind in layout.rings else layout.pages * layout.page_size
            for kind in self._layers
        }
        self._pools = [self._zeros(i, slots[layer.attention]) for i, layer in enumerate(self._spec.layers)]
        self._nothing = [self._zeros(i, 1) for i in range(len(self._spec.layers))]
        self._lanes = []

    def run(self, steps: Sequence[Step]) -> list[StepOutput]:
        self._pending = []
        self._lanes += [_Lane(self._session, self._spec) for _ in range(len(steps) - len(self._lanes))]
        outputs = [StepOutput(self._run(step, lane)) for step, lane in zip(steps, self._lanes, strict=False)]
        self._pending = list(steps)
        return outputs

    def commit(self, accepted: Sequence[int]) -> None:
        for step, lane, rows in zip(self._pending, self._lanes, accepted, strict=False):
            for kind, layers in self._layers.items():
                pieces = self._pieces(kind, step, rows)
                for i in layers:
                    for pool, new in zip(self._pools[i], lane.rows[i], strict=True):
                        for slot, row, count in pieces:
                            pool[slot : slot + count] = new[row : row + count]
        self._pending = []

    def read_rows(self, slots: SequenceSlots, kind: str, first: int, last: int, out: NDArray[np.uint8]) -> None:
        pools = [self._pools[i] for i in self._layers[kind]]
        host_rows.read(pools, [*host_rows.runs(self._layout, slots, kind, first, last)], out)

    def write_rows(self, slots: SequenceSlots, kind: str, first: int, last: int, rows: NDArray[np.uint8]) -> None:
        pools = [self._pools[i] for i in self._layers[kind]]
        host_rows.write(pools, [*host_rows.runs(self._layout, slots, kind, first, last)], rows)

    def close(self) -> None:
        self._pools, self._nothing, self._lanes, self._pending = [], [], [], []
        self._session = None

    def _run(self, step: Step, lane: _Lane) -> NDArray[np.float32]:
        self._check(step)
        lane.shape(len(step.tokens), len(step.logit_rows))
        bind = lane.binding.bind_cpu_input
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
        options = self._give_back if len(step.tokens) > _LARGE_STEP else None
        try:
            self._session.run_with_iobinding(lane.binding, options)
        except Exception as e:  # ONNX Runtime's exceptions have no common base
            raise MimoEdgeError(f"onnxruntime failed on {len(step.tokens)} rows at {step.start}: {_line(e)}") from e
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
    """Bindings and output buffers of the j-th step of every run, kept as long as T and M stay the same."""

    def __init__(self, session: ort.InferenceSession, spec: ModelSpec):
        self.binding = session.io_binding()
        self.logits = np.empty((0, spec.vocab_size), np.float32)
        self.rows: list[Rows] = []
        self._spec = spec
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
        self._bind("logits", self.logits)
        self.rows = []
        for i in range(len(self._spec.layers)):
            a = self._spec.attention_of(i)
            k = np.empty((rows, a.kv_heads, a.head_dim), np.float32)
            v = np.empty((rows, a.kv_heads, a.v_head_dim), np.float32)
            self._bind(f"new_k.{i}", k)
            self._bind(f"new_v.{i}", v)
            self.rows.append((k, v))

    def _bind(self, name: str, array: NDArray[np.float32]) -> None:
        self.binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)


def _load(model: Path, threads: int | None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads spin within a step (a fifth faster than sleeping) and sleep between steps.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except Exception as e:  # ONNX Runtime's exceptions have no common base
        raise MimoEdgeError(f"onnxruntime {ort.__version__} cannot load {model}: {_line(e)}") from e


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
