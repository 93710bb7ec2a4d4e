"""The tensorrt backend: the cuda backend whose steps are an engine's, captured as graphs like any other.

An engine works in the same memory as the programs do: inputs, weights, pools and results are bound to the arenas'
addresses, so that sampling, commits, heads and copies of rows are the cuda backend's own. Its plugins launch the
bundle's kernels while a graph is captured; afterwards no Python runs between layers. Rounds of drafting and
verification are the cuda backend's programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_edge.backends import tensorrt_engines
from mimo_edge.backends.base import Step
from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.backends.cuda_driver import Driver
from mimo_edge.backends.cuda_kernels import Kernels, choose
from mimo_edge.backends.cuda_memory import Arena
from mimo_edge.backends.cuda_steps import SHORT, Steps
from mimo_edge.backends.tensorrt_engine import LOGIT_ROWS, MEMORY, Engine
from mimo_edge.bundle import Bundle
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.kernels.index import KernelIndex
from mimo_edge.kernels.launch import Launch
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.kv.layout import KvLayout
from mimo_edge.trt_plugins import compat
from mimo_edge.trt_plugins.plugin import Plugins

_BESIDE = ("sampling", "mtp")  # ops of a step that no engine has: best tokens, hidden states for MTP heads


class TensorRtBackend(CudaBackend):
    """Implements backends/base.py. `engine` is what was read; `open` is the usual way in."""

    name = "tensorrt"

    def __init__(self, bundle: Bundle, driver: Driver, index: KernelIndex, trt: compat.TensorRt):
        """Raises UnsupportedError when there is no engine for this TensorRT, GPU and bundle."""
        plan, info = tensorrt_engines.find(bundle, trt.name, index.target)
        super().__init__(bundle, driver, index, ptx=False)
        self.row_format = f"float16 tensorrt {index.target}"
        try:
            launcher = DeviceLauncher(driver, self._kernels)
            self.engine = Engine(trt, _plugins_of(trt), launcher, plan.read_bytes(), info)
        except BaseException:
            self._kernels.close()
            self._close_arenas("weights")
            raise

    @staticmethod
    def open(bundle: Bundle, ptx: bool = False, device: int = 0, api: Any = None, trt: Any = None) -> TensorRtBackend:
        """Raises UnsupportedError without TensorRT, a driver, kernels for the GPU or an engine; `ptx` is not used."""
        tensorrt_engines.check_any(bundle)
        loaded = trt or compat.load()
        driver = Driver(device, api)
        try:
            return TensorRtBackend(bundle, driver, choose(bundle, driver, ptx=False)[0], loaded)
        except BaseException:
            driver.close()
            raise

    def _make_steps(self, programs: ProgramSet) -> Steps:
        self._arenas["engine"] = self._arena("engine", {MEMORY: self.engine.memory, LOGIT_ROWS: 4 * SHORT})
        self.engine.check_layout(programs, self._layout)
        return EngineSteps(self.driver, programs, self._kernels, self._arenas, self.engine, self._layout)

    def _release(self) -> None:
        super()._release()
        self.engine.forget()
        self._close_arenas("engine")


class EngineSteps(Steps):
    """Steps whose programs "step.T" run in an engine."""

    def __init__(
        self,
        driver: Driver,
        programs: ProgramSet,
        kernels: Kernels,
        arenas: dict[str, Arena],
        engine: Engine,
        layout: KvLayout,
    ):
        self._engine, self._layout = engine, layout
        super().__init__(driver, programs, kernels, arenas)

    def capture(self, name: str, *programs: str) -> None:
        if not (name.startswith("step.") and programs == (name,)):
            super().capture(name, *programs)
            return
        program = self.programs.programs[name]
        run = self._engine.prepare(program.rows, self.programs, self._layout, self._address, self._driver.stream)
        beside = [x for x in program.launches if x.variant.kernel.split(".")[0] in _BESIDE]
        rest = [self._kernels.prepare(x, self._address) for x in beside]

        def queue() -> None:
            run()
            for launch in rest:
                launch()

        self._warm_up(run)
        self._graphs[name] = self._driver.capture(queue)

    def queue(self, step: Step) -> tuple[str, NDArray[np.uint8]]:
        long = len(step.tokens) > SHORT
        self._logit_rows[0] = step.logit_rows[0] if long and len(step.logit_rows) else 0
        self._driver.upload(self.address(LOGIT_ROWS), self._logit_rows)
        return super().queue(step)

    def logits(self, step: Step, name: str) -> NDArray[np.float32]:
        """Of a long step's one row from the engine; of several, from the cuda backend's head."""
        if self.programs.programs[name].rows > SHORT and len(step.logit_rows) == 1:
            return self.first_logits()[None]
        return super().logits(step, name)

    def _make_host_buffers(self) -> None:
        super()._make_host_buffers()
        self._logit_rows = self._pin(4 * SHORT).view(np.int32)
        self._logit_rows[:] = np.arange(SHORT)

    def _warm_up(self, run: Any) -> None:
        """TensorRT prepares what it needs in a first run, of padding rows alone: nothing is stored."""
        self.inputs["positions"][:] = -1
        self._driver.upload(self.address(LOGIT_ROWS), self._logit_rows)
        self._driver.upload(self._inputs_at, self._input_bytes)
        run()
        self._driver.sync()


class DeviceLauncher:
    """What plugins launch through (trt_plugins/enqueue.py): the backend's kernels on its one stream."""

    def __init__(self, driver: Driver, kernels: Kernels):
        self._driver, self._kernels = driver, kernels

    def launch(self, launch: Launch, address: Mapping[str, int], stream: int) -> None:
        self._check(stream)
        if not self._kernels.has(launch):
            raise BadInputError(f"kernel {launch.variant.key} is not in the bundle: export the model again")
        self._kernels.prepare(launch, dict(address))()

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        self._check(stream)
        self._driver.copy(to, source, nbytes)

    def fill(self, to: int, byte: int, nbytes: int, stream: int) -> None:
        self._check(stream)
        self._driver.fill(to, byte, nbytes)

    def _check(self, stream: int) -> None:
        if stream != int(self._driver.stream):
            raise MimoEdgeError("TensorRT runs a plugin on a stream of its own: build the engine with this version")


@cache
def _plugins_of(trt: compat.TensorRt) -> Plugins:
    """One a process: so is TensorRT's registry."""
    return Plugins(trt)
