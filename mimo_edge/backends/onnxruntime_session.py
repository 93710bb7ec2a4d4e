"""ONNX Runtime sessions: how they are loaded and run, errors as this package's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from mimo_edge.errors import MimoEdgeError, UnsupportedError

Providers = Sequence[str | tuple[str, Mapping[str, str]]]
ON_CPU: Providers = ("CPUExecutionProvider",)

# Steps of more rows give their scratch memory back: a prefill chunk's is a hundred times that of a decode step.
_LARGE_STEP = 16
_GIVE_BACK = ort.RunOptions()
_GIVE_BACK.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")


def load(model: Path, threads: int | None, providers: Providers = ON_CPU) -> ort.InferenceSession:
    """A session; `threads` None means one a core. Raises MimoEdgeError, and UnsupportedError when the first provider is
    not there, for which ONNX Runtime would silently take the next one."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # a pattern serves one shape, and the past grows with every step
    # Threads spin within a step (a fifth faster than sleeping) and sleep between steps.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        session = ort.InferenceSession(str(model), options, providers=list(providers))
    except Exception as e:  # ONNX Runtime's exceptions have no common base
        raise MimoEdgeError(f"onnxruntime {ort.__version__} cannot load {model}: {_line(e)}") from e
    if (have := session.get_providers())[0] != (asked := name_of(providers)):
        raise UnsupportedError(f"onnxruntime {ort.__version__} has no usable {asked} here, only {', '.join(have)}")
    return session


def name_of(providers: Providers) -> str:
    """The first one's name."""
    return providers[0] if isinstance(providers[0], str) else providers[0][0]


class Binding:
    """A session's inputs and outputs, which lie in numpy arrays: a step sees what the inputs hold when it is run."""

    def __init__(self, session: ort.InferenceSession):
        self._session, self._io = session, session.io_binding()
        self._copied: dict[str, NDArray] | None = None if session.get_providers()[0] == name_of(ON_CPU) else {}

    def input(self, name: str, array: NDArray) -> None:
        self._io.bind_cpu_input(name, array)
        if self._copied is not None:
            self._copied[name] = array

    def output(self, name: str, array: NDArray[np.float32]) -> None:
        self._io.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)

    def run(self, rows: int, start: int) -> None:
        """One step of `rows` rows from position `start` on, everything bound. Raises MimoEdgeError."""
        try:
            for name, array in (self._copied or {}).items():
                self._io.bind_cpu_input(name, array)  # a device has a copy, made when it was bound
            self._session.run_with_iobinding(self._io, _GIVE_BACK if rows > _LARGE_STEP else None)
        except Exception as e:  # ONNX Runtime's exceptions have no common base
            raise MimoEdgeError(f"onnxruntime failed on {rows} rows at {start}: {_line(e)}") from e


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
