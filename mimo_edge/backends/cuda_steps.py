"""What a step of the cuda backend works with: pools, inputs, scratch and captured programs. Nothing is allocated later.

The inputs of a step lie together, so that one copy from their page-locked mirror sets them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_edge.backends.base import SequenceSlots, Step
from mimo_edge.backends.cuda_driver import Driver
from mimo_edge.backends.cuda_kernels import Kernels
from mimo_edge.backends.cuda_memory import Arena
from mimo_edge.errors import MimoEdgeError
from mimo_edge.kernels.launch import Buffer, Launch
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.kv.layout import KvLayout
from mimo_edge.spec import MAX_DRAFTS

SHORT = MAX_DRAFTS + 1  # rows of a step whose keys and values are stored while it runs; longer ones wait for commit
PARTS = ("kv", "inputs", "scratch")
NUMPY: dict[str, np.dtype] = {
    "fp16": np.dtype("<f2"),
    "fp32": np.dtype("<f4"),
    "i32": np.dtype("<i4"),
    "u8": np.dtype("u1"),
}


def part_of(buffer: Buffer) -> str:
    """Which arena a buffer lies in."""
    return {"weight": "weights", "kv": "kv", "input": "inputs"}.get(buffer.role, "scratch")


def pieces_of(programs: ProgramSet, layout: KvLayout) -> dict[str, dict[str, int]]:
    """Bytes of every buffer for a layout, by arena."""
    many = {"step": 1, "page": layout.pages, "ring": layout.sequences}
    return {
        part: {n: b.nbytes * many[b.per] for n, b in programs.buffers.items() if part_of(b) == part} for part in PARTS
    }


def graphs(programs: ProgramSet) -> dict[str, list[str]]:
    """The graphs of steps and of the head of the vocabulary: the programs that each captures."""
    return {name: [name] for name in programs.programs if name.startswith(("step.", "head."))}


class Steps:
    """Captured programs over the given arenas ("weights" and PARTS). Owns its graphs and page-locked memory."""

    def __init__(self, driver: Driver, programs: ProgramSet, kernels: Kernels, arenas: dict[str, Arena]):
        self._driver, self.programs, self._kernels, self._arenas = driver, programs, kernels, arenas
        self._address = {name: at for arena in arenas.values() for name, at in arena.address.items()}
        self._graphs: dict[str, Any] = {}
        self._pinned: list[NDArray] = []
        try:
            self._make_host_buffers()
            self._fill()
            for name, pieces in graphs(programs).items():
                self.capture(name, *pieces)
            for name, program in programs.programs.items():
                if program.commit:
                    self._graphs[f"{name}.commit"] = self._capture(program.commit)
        except MimoEdgeError:
            self.close()
            raise

    def address(self, name: str) -> int:
        return self._address[name]

    def program(self, rows: int) -> str:
        """The smallest program for so many rows. Raises MimoEdgeError when there is none."""
        fitting = [p.rows for n, p in self.programs.programs.items() if n.startswith("step.") and p.rows >= rows]
        if not fitting:
            raise MimoEdgeError(f"a step of {rows} rows: this bundle's kernels take at most {self.most_rows}")
        return f"step.{min(fitting)}"

    @property
    def most_rows(self) -> int:
        return max(p.rows for n, p in self.programs.programs.items() if n.startswith("step."))

    def queue(self, step: Step) -> tuple[str, NDArray[np.uint8]]:
        """Queues a step's inputs and program; returns the program's name and the inputs, for `commit`."""
        name = self.program(len(step.tokens))
        rows = self.programs.programs[name].rows
        self.set_rows(step.slots, step.start, len(step.tokens), rows)
        self.inputs["tokens"][: len(step.tokens)], self.inputs["tokens"][len(step.tokens) : rows] = step.tokens, 0
        self.replay(name)
        return name, self._input_bytes.copy()

    def commit(self, name: str, inputs: NDArray[np.uint8], rows: int) -> None:
        """Stores the first rows of a queued step, unless the step did so itself."""
        if rows and f"{name}.commit" in self._graphs:
            self._input_bytes[:] = inputs
            self.inputs["counts"][:] = rows
            self.replay(f"{name}.commit")
            self._driver.sync()  # the mirror may be written again

    def capture(self, name: str, *programs: str) -> None:
        """Captures programs, one behind the other, as the graph `name`."""
        self._graphs[name] = self._capture([x for p in programs for x in self.programs.programs[p].launches])

    def replay(self, name: str) -> None:
        """Queues the inputs and a graph; the inputs stay as they are until that is done."""
        self._driver.upload(self._inputs_at, self._input_bytes)
        self._driver.replay(self._graphs[name])

    def fetch(self, to: NDArray, name: str) -> None:
        """Queues the copy of a buffer into an array that `host` made."""
        self._driver.download(to, self.address(name))

    def sync(self) -> None:
        self._driver.sync()

    def first_logits(self) -> NDArray[np.float32]:
        """float32 [vocab] of the first row that a queued graph leaves, valid until the next; waits for it."""
        self.fetch(self._host_logits[:1], "logits")
        self.sync()
        return self._host_logits[0]

    def queue_best(self) -> NDArray[np.int32]:
        """Queues the copy of a short step's best tokens into the array returned, int32 [4]."""
        self.fetch(self._host_best, "best")
        return self._host_best

    def logits(self, step: Step, name: str) -> NDArray[np.float32]:
        """float32 [M, vocab] of the rows that a queued step asked for, valid until the next step; waits for them."""
        rows, row_bytes = step.logit_rows, self._host_logits[0].nbytes
        if self.programs.programs[name].rows > SHORT:
            hidden_bytes = self._row_bytes("x")
            return self.head([self.address("x") + int(row) * hidden_bytes for row in rows])
        if len(rows) == 1:
            self._driver.download(self._host_logits[:1], self.address("logits") + int(rows[0]) * row_bytes)
        elif len(rows):
            self._driver.download(self._host_logits, self.address("logits"))
        self._driver.sync()
        return self._host_logits[: len(rows)] if len(rows) < 2 else self._host_logits[rows]

    def head(self, rows: Sequence[int]) -> NDArray[np.float32]:
        """Logits float32 [M, vocab] of hidden rows at device addresses, at most 4 of them at a time."""
        out = np.empty((len(rows), self._host_logits.shape[1]), np.float32)
        size = self._row_bytes("head_hidden")
        for first in range(0, len(rows), SHORT):
            part = rows[first : first + SHORT]
            for j, address in enumerate(part):
                self._driver.copy(self.address("head_hidden") + j * size, address, size)
            self._driver.replay(self._graphs["head.1" if len(part) == 1 else f"head.{SHORT}"])
            self._driver.download(self._host_logits[: len(part)], self.address("logits"))
            self._driver.sync()
            out[first : first + len(part)] = self._host_logits[: len(part)]
        self._driver.sync()
        return out

    def close(self) -> None:
        """Gives graphs and page-locked memory back; the arenas are their owner's."""
        for graph in self._graphs.values():
            self._driver.drop(graph)
        for array in self._pinned:
            self._driver.unpin(array)
        self._graphs, self._pinned = {}, []

    def set_place(self, slots: SequenceSlots) -> None:
        """Where the sequence of the next graph lies."""
        self.inputs["table.pages"][0, : len(slots.pages)] = slots.pages
        self.inputs["table.rings"][0, 0] = slots.ring

    def set_rows(self, slots: SequenceSlots, start: int, count: int, rows: int) -> None:
        """The positions of `rows` rows, of which the first `count` are used. Raises MimoEdgeError when these do not fit
        into the sequence's pages."""
        if start + count > len(slots.pages) * self.programs.page_size:
            raise MimoEdgeError(f"rows up to {start + count} do not fit into {len(slots.pages)} pages")
        positions = self.inputs["positions"]
        positions[:count], positions[count:rows] = np.arange(start, start + count), -1
        self.inputs["lengths"][0] = start
        self.set_place(slots)

    def _make_host_buffers(self) -> None:
        inputs = self._arenas["inputs"]
        self._inputs_at = min(inputs.address.values())
        self._input_bytes = self._pin(inputs.nbytes)
        self._input_bytes[:] = 0
        self.inputs: dict[str, NDArray] = {}
        for name, at in inputs.address.items():
            self.inputs[name] = self._typed(name, self._input_bytes[at - self._inputs_at :])
        self._host_logits, self._host_best = self.host("logits"), self.host("best")

    def host(self, name: str) -> NDArray:
        """A page-locked array of a buffer's shape and type."""
        return self._typed(name, self._pin(self.programs.buffers[name].nbytes))

    def _typed(self, name: str, raw: NDArray[np.uint8]) -> NDArray:
        b = self.programs.buffers[name]
        return raw[: b.nbytes].view(NUMPY[b.dtype]).reshape(b.shape)

    def _row_bytes(self, name: str) -> int:
        b = self.programs.buffers[name]
        return b.nbytes // b.shape[0]

    def _pin(self, nbytes: int) -> NDArray[np.uint8]:
        self._pinned.append(self._driver.pinned(nbytes))
        return self._pinned[-1]

    def _fill(self) -> None:
        for name, b in self.programs.buffers.items():
            if b.role != "weight" and b.fill is not None:
                self._arenas[part_of(b)].fill(name, b.fill)
        self._driver.sync()

    def _capture(self, launches: Sequence[Launch]) -> Any:
        prepared = [self._kernels.prepare(x, self._address) for x in launches]

        def queue() -> None:
            for launch in prepared:
                launch()

        return self._driver.capture(queue)
