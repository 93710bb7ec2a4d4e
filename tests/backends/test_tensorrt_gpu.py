"""Plugins on a GPU: real pointers, kernels and graphs, only TensorRT itself is the stand-in."""

import numpy as np
import pytest
import torch
from cuda_bundle import write_cuda_bundle
from fakes_trt import copy_rows, fake_tensorrt
from trt_bundle import SPECS, put_engine, run_all

from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.backends.cuda_driver import Driver
from mimo_edge.backends.tensorrt import TensorRtBackend
from mimo_edge.kernels.aot import compile_variants
from mimo_edge.trt_plugins import compat

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("name", SPECS)
def test_captured_plugins_give_the_cuda_backends_bits(name, tmp_path, monkeypatch):
    """Each plugin's enqueue is called with addresses, shapes and a stream as TensorRT does, and captured in a graph."""
    import cuda.bindings.driver as api

    monkeypatch.setenv("MIMO_EDGE_CACHE", str(tmp_path / "cache"))
    driver = Driver()
    capability = driver.capability
    driver.close()
    bundle = write_cuda_bundle(tmp_path / name, SPECS[name], capability, compile=compile_variants)
    put_engine(bundle, target=f"sm_{capability}")
    trt = compat.checked(fake_tensorrt(api, gather=copy_rows), rtx=False)
    logits, best = run_all(TensorRtBackend.open(bundle, trt=trt), bundle, [3, 14])
    want, want_best = run_all(CudaBackend.open(bundle), bundle, [3, 14])
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(logits, want)
    np.testing.assert_array_equal(best, want_best)
