"""The cuda backend: kernels compiled ahead of time, captured as graphs, run through the driver alone.

Everything is allocated and captured in `allocate`. A step is then one small copy to the device, one graph, and one
copy of logits back. Rows are evaluated by the smallest of the bundle's programs that holds them, padded at the end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_edge.backends.base import Round, SequenceSlots, Step, StepOutput
from mimo_edge.backends.cuda_array import DeviceArray, device_array
from mimo_edge.backends.cuda_driver import Driver, OutOfMemoryError
from mimo_edge.backends.cuda_heads import Heads
from mimo_edge.backends.cuda_kernels import Kernels, choose
from mimo_edge.backends.cuda_memory import Arena, read_places, stream
from mimo_edge.backends.cuda_rows import pieces
from mimo_edge.backends.cuda_steps import NUMPY, PARTS, SHORT, Steps, pieces_of
from mimo_edge.bundle import Bundle
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.kernels.index import PROGRAMS, WEIGHTS, WEIGHTS_INDEX, KernelIndex, folder
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.kv.layout import HIDDEN_ROWS, KvLayout
from mimo_edge.spec import ModelSpec


@dataclass(frozen=True)
class HostTime:
    """Seconds of the last step on the host: `queue_s` until all was queued, `step_s` until its results were there."""

    queue_s: float
    step_s: float


class CudaBackend:
    """Implements backends/base.py. At most one step of a `run` may have more than 4 rows."""

    name = "cuda"
    element_bytes = 2  # float16 keys and values
    writes_in_run = True

    def __init__(self, bundle: Bundle, driver: Driver, index: KernelIndex, ptx: bool):
        """Checks the kernels, loads them and the weights. `open` is the usual way in; `close` closes the driver."""
        self.spec: ModelSpec = bundle.spec
        self.driver, self.index = driver, index
        self.row_format = f"float16 cuda {index.target}"
        self.last_step = HostTime(0.0, 0.0)
        path = bundle.file(f"{folder(index.target)}/{PROGRAMS}")
        self.programs = ProgramSet.loads(path.read_bytes(), str(path))
        self._arenas: dict[str, Arena] = {}
        self._steps: Steps | None = None
        self._heads: Heads | None = None
        self._pending: list[tuple[str, NDArray[np.uint8]]] = []
        self._kernels = Kernels(driver, bundle, index, ptx, self.programs.variants())
        try:
            self._load_weights(bundle)
        except BaseException:
            self._kernels.close()
            self._close_arenas("weights")
            raise

    @staticmethod
    def open(bundle: Bundle, ptx: bool = False, device: int = 0, api: Any = None) -> CudaBackend:
        """`ptx` allows an older target's PTX where the bundle has no cubins for the device.

        Raises UnsupportedError without a driver or fitting kernels, BadInputError on changed files, MimoEdgeError
        when memory runs out."""
        driver = Driver(device, api)
        try:
            return CudaBackend(bundle, driver, *choose(bundle, driver, ptx))
        except BaseException:
            driver.close()
            raise

    @property
    def chunk(self) -> int:
        """The most rows of a step."""
        return max(p.rows for name, p in self.programs.programs.items() if name.startswith("step."))

    @property
    def heads(self) -> int:
        """MTP heads that the bundle's programs have; bundles of earlier versions have none."""
        return self.programs.heads

    def allocate(self, layout: KvLayout) -> None:
        """Pools, inputs and scratch; then captures every program. Raises MimoEdgeError when memory runs out."""
        self.driver.enter()
        self._check_layout(layout)
        self._release()
        self._layout = layout
        programs = self.programs.with_heads(layout.heads)
        for part, sizes in pieces_of(programs, layout).items():
            self._arenas[part] = self._arena(part, sizes)
        self._steps = self._make_steps(programs)
        self._heads = Heads(self._steps, layout.heads) if layout.heads else None

    def run(self, steps: Sequence[Step]) -> list[StepOutput]:
        if sum(len(s.tokens) > SHORT for s in steps) > 1:
            raise MimoEdgeError(
                f"backend cuda takes one step of more than {SHORT} rows a run: give the others their own"
            )
        work = self._enter()
        outputs, pending = [], []
        for step in steps:
            began = time.perf_counter()
            name, inputs = work.queue(step)
            queued = time.perf_counter()
            logits = work.logits(step, name)
            self.last_step = HostTime(queued - began, time.perf_counter() - began)
            outputs.append(StepOutput(logits if len(steps) == 1 else logits.copy()))
            pending.append((name, inputs))
        self._pending = pending
        return outputs

    def commit(self, accepted: Sequence[int]) -> None:
        pending, work = self._pending, self._enter()
        for (name, inputs), rows in zip(pending, accepted, strict=True):
            work.commit(name, inputs, rows)

    def best(self, step: Step) -> NDArray[np.int64]:
        """The best token behind each of a short step's rows, int64 [T]: a run whose logits stay on the device."""
        if len(step.tokens) > SHORT:
            raise MimoEdgeError(f"{len(step.tokens)} rows: `best` takes at most {SHORT}")
        work = self._enter()
        began = time.perf_counter()
        pending = work.queue(step)
        tokens = work.queue_best()
        queued = time.perf_counter()
        self.driver.sync()
        self.last_step = HostTime(queued - began, time.perf_counter() - began)
        self._pending = [pending]
        return tokens[: len(step.tokens)].astype(np.int64)

    def draft(
        self, slots: SequenceSlots, head: int, held: int, start: int, tokens: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        return self._drafting().draft(slots, head, held, start, tokens)

    def catch_up(self, slots: SequenceSlots, head: int, held: int, start: int, tokens: NDArray[np.int64]) -> None:
        self._drafting().catch_up(slots, head, held, start, tokens)

    def round(self, asked: Round) -> NDArray[np.int64]:
        """As base.DraftRounds: one copy in, one graph, one copy of six integers out."""
        heads = self._drafting()
        began = time.perf_counter()
        heads.queue_round(asked)
        queued = time.perf_counter()
        tokens = heads.take_round()
        self.last_step = HostTime(queued - began, time.perf_counter() - began)
        self._pending = [("round", np.empty(0, np.uint8))]
        return tokens

    def head(self, hidden: Any) -> NDArray[np.float32]:
        """Logits float32 [M, vocab] of hidden rows float32 [M, hidden] in device memory, any library's array.

        The rows' contents must be complete. Raises BadInputError on another shape, dtype or device.
        """
        rows, size = device_array(hidden), self.spec.hidden_size
        place, here = rows.place, f"GPU {self.driver.device}"
        if rows.dtype != np.float32 or rows.shape[1:] != (size,) or place != here:
            raise BadInputError(
                f"hidden rows of {rows.dtype} {rows.shape} on {place} (allowed: float32 [rows, {size}] on {here})"
            )
        work = self._enter()
        return work.head([rows.address + i * 4 * size for i in range(rows.shape[0])])

    def read_rows(self, slots: SequenceSlots, kind: str, first: int, last: int, out: NDArray[np.uint8]) -> None:
        work = self._ready()
        self.driver.enter()
        for name, offset, part in pieces(self.programs, self._layout, slots, kind, first, last, out):
            self.driver.download(part, work.address(name) + offset)
        self.driver.sync()

    def write_rows(self, slots: SequenceSlots, kind: str, first: int, last: int, rows: NDArray[np.uint8]) -> None:
        work = self._ready()
        self.driver.enter()
        for name, offset, part in pieces(self.programs, self._layout, slots, kind, first, last, rows):
            self.driver.upload(work.address(name) + offset, part)
        self.driver.sync()

    @property
    def hidden(self) -> DeviceArray:
        """float32 [rows, hidden] on the device: the last step's rows before the final norm, until a run or draft."""
        return self._array("x")

    @property
    def logits(self) -> DeviceArray:
        """float32 [4, vocab] on the device: the last (up to 4) rows of logits, until the next run."""
        return self._array("logits")

    def memory(self) -> dict[str, int]:
        """Bytes of device memory: weights, kv, inputs and scratch."""
        return {part: arena.nbytes for part, arena in self._arenas.items()}

    def close(self) -> None:
        if self._arenas:
            self.driver.enter()
            self.driver.sync()
            self._release()
            self._kernels.close()
            self._close_arenas("weights")
            self.driver.close()

    def _enter(self) -> Steps:
        """The device is this thread's, and the last run is forgotten."""
        work = self._ready()
        self.driver.enter()
        self._pending = []
        return work

    def _make_steps(self, programs: ProgramSet) -> Steps:
        return Steps(self.driver, programs, self._kernels, self._arenas)

    def _drafting(self) -> Heads:
        self._enter()
        if self._heads is None:
            raise MimoEdgeError("backend cuda: the layout that was allocated has no MTP heads")
        return self._heads

    def _ready(self) -> Steps:
        if self._steps is None:
            raise MimoEdgeError("backend cuda: allocate was not called")
        return self._steps

    def _load_weights(self, bundle: Bundle) -> None:
        places = read_places(bundle.file(WEIGHTS_INDEX))
        sizes = {n: b.nbytes for n, b in self.programs.buffers.items() if b.role == "weight"}
        if wrong := [n for n, size in sizes.items() if places.get(n, (0, -1))[1] != size]:
            raise BadInputError(f"{bundle.path}: {WEIGHTS} lacks {wrong[0]}: export the model again")
        self._arenas["weights"] = self._arena("weights", sizes)
        stream(self.driver, bundle.file(WEIGHTS), {n: places[n] for n in sizes}, self._arenas["weights"])

    def _arena(self, part: str, sizes: dict[str, int]) -> Arena:
        try:
            return Arena(self.driver, sizes)
        except OutOfMemoryError:
            need = {**self.memory(), part: sum(sizes.values())}
            items = " + ".join(f"{name} {n / 1e6:,.1f} MB" for name, n in need.items())
            free = self.driver.memory()[0] / 1e6
            raise MimoEdgeError(
                f"no GPU memory for {part}: needed {items}, free now {free:,.1f} MB: choose a smaller --context, or "
                "close other programs"
            ) from None

    def _check_layout(self, layout: KvLayout) -> None:
        p = self.programs
        if layout.page_size != p.page_size or layout.context > p.page_size * p.pages:
            raise MimoEdgeError(
                f"the kernels are for pages of {p.page_size} and a context of {p.page_size * p.pages} tokens, "
                f"not {layout.page_size} and {layout.context}: export the model again"
            )
        if layout.heads > p.heads:
            raise MimoEdgeError(f"the kernels are for {p.heads} MTP heads, not {layout.heads}: export the model again")
        if layout.heads and p.rings[HIDDEN_ROWS] < min(layout.context, layout.rings[HIDDEN_ROWS] + SHORT):
            raise MimoEdgeError(
                f"the kernels keep {p.rings[HIDDEN_ROWS]} hidden states, not {layout.rings[HIDDEN_ROWS] + SHORT}: "
                f"evaluate at most {self.chunk} rows a step"
            )

    def _array(self, name: str) -> DeviceArray:
        b = self.programs.buffers[name]
        return DeviceArray(self._ready().address(name), b.shape, NUMPY[b.dtype], self.driver.device, self)

    def _release(self) -> None:
        """Everything that `allocate` took."""
        if self._steps:
            self._steps.close()
        self._steps, self._heads, self._pending = None, None, []
        self._close_arenas(*PARTS)

    def _close_arenas(self, *parts: str) -> None:
        for part in parts:
            if part in self._arenas:
                self._arenas.pop(part).close()
