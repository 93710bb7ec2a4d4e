"""The columns of the table: how each backend is opened on a GPU; raises UnsupportedError, saying why it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from _parity import open_for_orin
from fakes_trt import copy_rows, fake_tensorrt
from trt_bundle import put_engine

from mimo_edge.backends.base import Step
from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.backends.cuda_driver import Driver
from mimo_edge.backends.onnxruntime import OnnxRuntimeBackend
from mimo_edge.backends.reference import ReferenceBackend
from mimo_edge.backends.tensorrt import TensorRtBackend
from mimo_edge.bundle import Bundle
from mimo_edge.errors import UnsupportedError
from mimo_edge.trt_plugins import compat

EXACT = ("CUDAExecutionProvider", {"use_tf32": "0"})  # float32 products as float32


def capability() -> int:
    """The GPU's. Raises UnsupportedError without one."""
    driver = Driver()
    found = driver.capability
    driver.close()
    return found


def plugins(bundle: Bundle, folder: Path) -> TensorRtBackend:
    """Each plugin's enqueue is called as by TensorRT, with addresses, shapes and a stream, and captured in a graph."""
    import cuda.bindings.driver as api

    trt = compat.checked(fake_tensorrt(api, gather=copy_rows), rtx=False)
    return with_engine(bundle, folder, f"sm_{capability()}", lambda: TensorRtBackend.open(bundle, trt=trt))


def with_engine(bundle: Bundle, folder: Path, target: str, opened: Callable[[], TensorRtBackend]) -> TensorRtBackend:
    """A backend whose engine lies in `folder` instead of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIMO_EDGE_CACHE", str(folder))
        put_engine(bundle, target=target)
        backend = opened()
    run = backend.run

    def run_all(steps: list[Step]) -> Any:
        """Of a long step one row's logits come from the engine's Gather, which the stand-in lacks on a GPU: two rows
        come from the cuda backend's head."""
        twice = [len(s.tokens) > 4 and len(s.logit_rows) == 1 for s in steps]
        asked = [
            Step(s.slots, s.start, s.tokens, np.repeat(s.logit_rows, 2)) if two else s
            for s, two in zip(steps, twice, strict=True)
        ]
        outputs = run(asked)
        return [type(o)(o.logits[:1]) if two else o for o, two in zip(outputs, twice, strict=True)]

    backend.run = run_all  # type: ignore[method-assign]
    return backend


def onnx_on_cuda(bundle: Bundle, folder: Path) -> OnnxRuntimeBackend:
    if EXACT[0] not in onnxruntime.get_available_providers():
        raise UnsupportedError(f"onnxruntime {onnxruntime.__version__} was built without {EXACT[0]}")
    providers = (EXACT, "CPUExecutionProvider")
    return OnnxRuntimeBackend.open(bundle, float_activations=True, providers=providers)


BACKENDS: dict[str, Callable[[Bundle, Path], Any]] = {
    "reference": lambda bundle, folder: ReferenceBackend.open(bundle),
    "cuda": lambda bundle, folder: CudaBackend.open(bundle),
    "cuda, sm_87's PTX": lambda bundle, folder: open_for_orin(bundle),
    "plugins": plugins,
    "onnxruntime on CUDA": onnx_on_cuda,
}
