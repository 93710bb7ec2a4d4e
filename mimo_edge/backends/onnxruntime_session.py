"""ONNX Runtime sessions: how they are loaded and run, errors as this package's own."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from mimo_edge.errors import MimoEdgeError

# Steps of more rows give their scratch memory back: a prefill chunk's is a hundred times that of a decode step.
_LARGE_STEP = 16
_GIVE_BACK = ort.RunOptions()
_GIVE_BACK.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")


def load(model: Path, threads: int | None) -> ort.InferenceSession:
    """A session on the CPU; `threads` None means one a core. Raises MimoEdgeError."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_mem_pattern = False  # a pattern serves one shape, and the past grows with every step
    # Threads spin within a step (a fifth faster than sleeping) and sleep between steps.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except Exception as e:  # ONNX Runtime's exceptions have no common base
        raise MimoEdgeError(f"onnxruntime {ort.__version__} cannot load {model}: {_line(e)}") from e


def run(session: ort.InferenceSession, binding: ort.IOBinding, rows: int, start: int) -> None:
    """One step of `rows` rows from position `start` on, everything bound. Raises MimoEdgeError."""
    try:
        session.run_with_iobinding(binding, _GIVE_BACK if rows > _LARGE_STEP else None)
    except Exception as e:  # ONNX Runtime's exceptions have no common base
        raise MimoEdgeError(f"onnxruntime failed on {rows} rows at {start}: {_line(e)}") from e


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
