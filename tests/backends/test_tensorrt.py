"""The tensorrt backend over stand-ins for TensorRT and the driver, with real plugins and kernels."""

import logging
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_bundle import fake_cuda, open_cuda, write_cuda_bundle
from fakes_trt import copy_rows, fake_tensorrt, gather_on_cpu
from trt_bundle import SPECS, put_engine, run_all

from mimo_edge.backends import registry, tensorrt_engines
from mimo_edge.backends.base import Step
from mimo_edge.backends.tensorrt import TensorRtBackend
from mimo_edge.bundle import Bundle
from mimo_edge.errors import BadInputError, MimoEdgeError, UnsupportedError
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.pools import KvPools
from mimo_edge.trt_plugins import compat


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trt")
    return {name: write_cuda_bundle(folder / name, spec) for name, spec in SPECS.items()}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIMO_EDGE_CACHE", str(tmp_path))


def open_trt(bundle: Bundle, version="10.16.2.10", gather=gather_on_cpu, **options) -> TensorRtBackend:
    cuda = fake_cuda(bundle, **options)
    module = fake_tensorrt(cuda, version, gather)
    return TensorRtBackend.open(bundle, api=cuda, trt=compat.checked(module, rtx=False))


@pytest.mark.parametrize(
    ("name", "rows", "gather"), [("gated", [14], gather_on_cpu), ("gemma", [3, 14], copy_rows)], ids=["gated", "gemma"]
)
def test_every_bit_is_the_cuda_backends(bundles, name, rows, gather):
    """One row of a long step is the engine's own head's, several are the cuda backend's."""
    put_engine(bundles[name])
    logits, best = run_all(open_trt(bundles[name], gather=gather), bundles[name], rows)
    want, want_best = run_all(open_cuda(bundles[name]), bundles[name], rows)
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(logits, want)
    np.testing.assert_array_equal(best, want_best)


def test_a_step_is_copies_and_one_graph(bundles):
    put_engine(bundles["qwen"])
    backend = open_trt(bundles["qwen"])
    layout = plan_layout(bundles["qwen"].spec, 64, sequences=1, element_bytes=2)
    backend.allocate(layout)
    slots = KvPools(layout).admit(64)
    api = backend.driver._api
    api.calls.clear()
    backend.run([Step(slots, 0, np.array([3]), np.array([0]))])
    queued = [c for c in api.calls if "Synchronize" not in c and "CtxSet" not in c and not c.startswith("cuuint")]
    assert queued == ["cuMemcpyHtoDAsync"] * 2 + ["cuGraphLaunch", "cuMemcpyDtoHAsync"]
    assert backend.memory().keys() == {"weights", "kv", "inputs", "scratch", "engine"}
    backend.close()
    assert not api.live


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensorrt": "tensorrt-10.3.0"}, "are for tensorrt-10.3.0-sm_87; this one has tensorrt-10.16.2.10, sm_87"),
        ({"target": "sm_90", "real": "sm_87"}, "are for tensorrt-10.16.2.10-sm_90; this one has"),
        ({"fingerprint": "0" * 64}, "holds an engine of tensorrt-10.16.2.10, sm_87, bundle 0000000000000000"),
        ({"model": "0" * 64}, "was built from another export"),
        ({"sha256": "0" * 64}, "engine.plan is damaged"),
        ({"bytes": 7}, "engine.plan is damaged"),
        ({"plan": b"foreign"}, "does not read its engine"),
    ],
    ids=["version", "gpu", "bundle", "export", "changed", "short", "foreign"],
)
def test_another_engine_is_refused_with_the_command(bundles, changes, message):
    put_engine(bundles["qwen"], **changes)
    with pytest.raises(UnsupportedError, match=f"{message}.*run `mimo-edge build"):
        open_trt(bundles["qwen"])


def test_without_an_engine_or_tensorrt_the_fix_is_named(bundles, monkeypatch):
    with pytest.raises(UnsupportedError, match=r"qwen has no engine: run `mimo-edge build"):
        open_trt(bundles["qwen"])
    put_engine(bundles["qwen"])
    with pytest.raises(UnsupportedError, match=r"TensorRT is not installed .*python3-libnvinfer"):
        compat.load(["no_such_tensorrt"])
    with pytest.raises(UnsupportedError, match=r"TensorRT 8.6.1 \(works with 10.3 to 11\)"):
        open_trt(bundles["qwen"], version="8.6.1")
    module = fake_tensorrt(None, "10.3.0")
    monkeypatch.setattr(module, "PluginField", lambda *_: SimpleNamespace(data=[3, 3]))  # 10.3 with NumPy 2
    with pytest.raises(UnsupportedError, match=r"TensorRT 10.3.0 and NumPy .* do not work together: run `pip install"):
        compat.checked(module, rtx=False)
    with pytest.raises(UnsupportedError, match=r"has sm_87, this device .* is sm_89"):
        open_trt(bundles["qwen"], device=89)


def test_pools_beyond_the_profiles_are_refused(bundles):
    put_engine(bundles["gated"])
    backend = open_trt(bundles["gated"])
    with pytest.raises(MimoEdgeError, match="allows 2 sessions, not 3: run `mimo-edge build --sessions 3`"):
        backend.allocate(plan_layout(bundles["gated"].spec, 64, sequences=3, element_bytes=2))
    backend.close()


def test_a_damaged_field_of_a_plugin_is_named(bundles):
    import onnx

    model = onnx.load(tensorrt_engines.model_file(bundles["qwen"], "sm_87"))
    node = next(n for n in model.graph.node if n.op_type == "Int4Linear")
    next(a for a in node.attribute if a.name == "cut").ints.append(1)
    put_engine(bundles["qwen"], plan=model.SerializeToString())
    with pytest.raises(BadInputError, match=r"plugin Int4Linear, node layers.0.qkv.y: field cut \(1, 1, 4, 0, 0, 1\)"):
        open_trt(bundles["qwen"])


def test_a_kernel_that_the_bundle_lacks_is_named(bundles, monkeypatch):
    put_engine(bundles["qwen"])
    backend = open_trt(bundles["qwen"])
    plugin = backend.engine._engine.nodes[2][1]
    plugin.op = replace(plugin.op, eps=0.125)
    with pytest.raises(MimoEdgeError, match=r"kernel int4_linear.norm_ahead.* is not in the bundle: export"):
        backend.allocate(plan_layout(bundles["qwen"].spec, 64, element_bytes=2))
    backend.close()


def test_auto_prefers_tensorrt_then_cuda_then_onnxruntime(bundles, monkeypatch, caplog):
    def fail(what):
        def load(bundle, threads):
            raise UnsupportedError(what)

        return load

    caplog.set_level(logging.INFO, "mimo_edge")
    monkeypatch.setattr(logging.getLogger("mimo_edge"), "propagate", True)
    loaders = {"tensorrt": lambda b, t: "trt", "cuda": lambda b, t: "cuda", "onnxruntime": lambda b, t: "ort"}
    for missing, chosen in (((), "trt"), (("tensorrt",), "cuda"), (("tensorrt", "cuda"), "ort")):
        for name, loader in loaders.items():
            monkeypatch.setitem(registry.LOADERS, name, fail(f"no {name} here") if name in missing else loader)
        caplog.clear()
        assert registry.load("auto", bundles["qwen"]) == chosen
        (line,) = {r.getMessage() for r in caplog.records}
        assert all(f"no {name} here" in line for name in missing) and line.startswith("backend ")


def test_engine_json_is_checked(bundles):
    place = put_engine(bundles["qwen"])
    info = place / tensorrt_engines.INFO
    assert asdict(tensorrt_engines.read_info(info))["target"] == "sm_87"
    for text, message in (("{", "is damaged"), ('{"format": 2}', "format 2, this version reads 1")):
        info.write_text(text)
        with pytest.raises(BadInputError, match=message):
            open_trt(bundles["qwen"])
