"""An engine that was read: its contexts, bound to the memory that a step works in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mimo_edge.backends.tensorrt_engines import EngineInfo
from mimo_edge.errors import MimoEdgeError, UnsupportedError
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.kv.layout import KvLayout
from mimo_edge.trt_plugins.compat import TensorRt
from mimo_edge.trt_plugins.enqueue import Launcher
from mimo_edge.trt_plugins.network import PROFILES, Log
from mimo_edge.trt_plugins.op import SHORT
from mimo_edge.trt_plugins.plugin import Plugins

MEMORY, LOGIT_ROWS = "engine.memory", "logit_rows"
_PER_ROW = ("tokens", "positions", "sequences")
_BYTES = {"HALF": 2, "FLOAT": 4, "INT32": 4, "INT8": 1}
_OUT = ".out"  # behind the name of a buffer that an output shares


class Engine:
    """A context for each size of step; they share `memory` bytes, as only one runs at a time."""

    def __init__(self, trt: TensorRt, plugins: Plugins, launcher: Launcher, plan: bytes, info: EngineInfo):
        """Raises UnsupportedError when TensorRT does not read the plan, BadInputError when a plugin refuses a field."""
        self.info, self._trt, self._plugins = info, trt, plugins
        self._contexts: list[Any] = []
        self._log = Log(trt.module)
        self._runtime = trt.module.Runtime(self._log.logger)
        with plugins.using(launcher):
            self._engine = self._runtime.deserialize_cuda_engine(plan)
        plugins.check()
        if self._engine is None:
            raise UnsupportedError(
                f"{trt.name} does not read its engine ({self._log.last}): run `mimo-edge build` again"
            )
        self.memory = max(1, int(self._engine.device_memory_size_v2))

    def check_layout(self, programs: ProgramSet, layout: KvLayout) -> None:
        """Raises MimoEdgeError when the pools are larger than the engine's profiles allow."""
        for what, have, most in (
            ("pages", layout.pages, self.info.pages),
            ("sessions", layout.sequences, self.info.sequences),
        ):
            if have > most:
                sessions = max(layout.sequences, math.ceil(layout.pages / programs.pages))
                raise MimoEdgeError(
                    f"the engine allows {most} {what}, not {have}: run `mimo-edge build --sessions {sessions}` again"
                )

    def prepare(
        self, rows: int, programs: ProgramSet, layout: KvLayout, address: Mapping[str, int], stream: Any
    ) -> Callable[[], None]:
        """A call that queues a step of `rows` rows on the stream.

        Raises MimoEdgeError when the engine has a tensor that the programs lack, or a weight of another size.
        """
        m = self._trt.module
        context = self._engine.create_execution_context(m.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise MimoEdgeError(f"{self._trt.name} gave no context: {self._log.last}")
        self._contexts.append(context)
        context.set_device_memory(address[MEMORY], self.memory)
        profile = PROFILES.index("decode" if rows == 1 else "drafts" if rows == SHORT else "prefill")
        self._must(context.set_optimization_profile_async(profile, int(stream)), f"the profile of {rows} rows")
        for i in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(i)
            buffer = name.removesuffix(_OUT)
            if buffer not in address:
                raise MimoEdgeError(f"the engine has a tensor {name}, the bundle's programs have none: build it again")
            if self._engine.get_tensor_mode(name) == m.TensorIOMode.INPUT:
                self._shape(context, name, rows, programs, layout)
            self._must(context.set_tensor_address(name, address[buffer]), f"the address of {name}")

        def run() -> None:
            done = context.execute_async_v3(int(stream))
            self._plugins.check()
            self._must(done, f"a step of {rows} rows")

        return run

    def forget(self) -> None:
        """Gives the contexts up; their memory is the caller's."""
        self._contexts = []

    def _shape(self, context: Any, name: str, rows: int, programs: ProgramSet, layout: KvLayout) -> None:
        shape = list(self._engine.get_tensor_shape(name))
        if -1 in shape:
            shape[0] = _size(name, rows, programs, layout)
            self._must(context.set_input_shape(name, shape), f"the shape {shape} of {name}")
            return
        buffer = programs.buffers[name]
        nbytes = math.prod(shape) * _BYTES[str(self._engine.get_tensor_dtype(name)).rpartition(".")[2]]
        if buffer.role == "weight" and nbytes != buffer.nbytes:
            raise MimoEdgeError(
                f"{name} has {nbytes} bytes in the engine, {buffer.nbytes} in the bundle: build it again"
            )

    def _must(self, done: bool, what: str) -> None:
        if not done:
            raise MimoEdgeError(f"{self._trt.name} failed at {what}: {self._log.last}")


def _size(name: str, rows: int, programs: ProgramSet, layout: KvLayout) -> int:
    """The dimension of an input that varies."""
    if name in _PER_ROW:
        return rows
    if name == LOGIT_ROWS:
        return rows if rows <= SHORT else 1
    return {"page": layout.pages, "ring": layout.sequences}[programs.buffers[name].per]
