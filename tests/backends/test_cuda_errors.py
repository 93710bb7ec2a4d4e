"""What the cuda backend says when a driver, a device, memory or a file is not as it must be; how `auto` chooses."""

import json
import logging
import sys
import types

import numpy as np
import pytest
from cuda_bundle import fake_cuda, write_cuda_bundle
from fakes_cuda import FakeCuda
from specs import qwen_spec, window_only_spec

from mimo_edge import Engine
from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.backends.cuda_driver import Driver
from mimo_edge.backends.cuda_memory import Arena, place, staging, stream
from mimo_edge.bundle import Bundle
from mimo_edge.errors import BadInputError, MimoEdgeError, UnsupportedError
from mimo_edge.kernels import index
from mimo_edge.kernels.index import KernelIndex
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.kv.layout import plan_layout


@pytest.fixture
def bundle(tmp_path):
    return write_cuda_bundle(tmp_path / "tiny", window_only_spec())


@pytest.fixture
def driver_is(monkeypatch):
    """Makes `import cuda.bindings.driver` give a fake."""

    def use(api):
        package = types.ModuleType("cuda.bindings")
        package.driver = api
        monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
        sys.modules["cuda"].bindings = package
        monkeypatch.setitem(sys.modules, "cuda.bindings", package)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", api)

    return use


def test_no_driver_no_gpu_no_library(monkeypatch):
    api = FakeCuda()
    api.cuInit = lambda flags: (_ for _ in ()).throw(RuntimeError("libcuda.so.1\nnot found"))
    with pytest.raises(UnsupportedError, match=r"no NVIDIA driver \(libcuda.so.1 not found\): use --backend onnx"):
        Driver(api=api)
    with pytest.raises(UnsupportedError, match=r"no usable NVIDIA GPU \(CUDA_ERROR_NO_DEVICE: a fake's words\)"):
        Driver(api=FakeCuda(devices=0))
    with pytest.raises(UnsupportedError, match="no NVIDIA GPU number 2"):
        Driver(2, FakeCuda())
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r"pip install 'mimo-edge\[cuda\]'"):
        Driver()


def test_kernels_for_another_device(bundle):
    with pytest.raises(UnsupportedError) as e:
        CudaBackend.open(bundle, api=fake_cuda(bundle, device=90))
    message = str(e.value)
    assert "has sm_87" in message and "this device (Fake GPU) is sm_90" in message
    assert "`mimo-edge export SRC --target sm_90 -o DIR`, or run the PTX of sm_87 with --backend cuda-ptx" in message
    with pytest.raises(UnsupportedError, match=r"is sm_80: run `mimo-edge export SRC --target sm_80 -o DIR`$"):
        CudaBackend.open(bundle, ptx=True, api=fake_cuda(bundle, device=80))


def test_ptx_runs_on_a_newer_device_only_when_asked(bundle, caplog):
    api = fake_cuda(bundle, device=90)
    with caplog.at_level(logging.INFO, "mimo_edge"):
        backend = CudaBackend.open(bundle, ptx=True, api=api)
    assert all(code.startswith(b".version") for code in api.loaded) and len(api.loaded) > 5
    assert "backend cuda runs the PTX of sm_87 on Fake GPU (sm_90)" in caplog.text
    backend.close()
    assert not api.live
    same = fake_cuda(bundle)
    CudaBackend.open(bundle, ptx=True, api=same).close()
    assert all(code.startswith(b"\x7fELF") for code in same.loaded), "a cubin that fits is preferred"


@pytest.mark.parametrize(
    ("device", "version", "message"),
    [
        (87, 11080, r"supports CUDA 11.8, the bundle's kernels need 12.0 or newer: update the driver"),
        (90, 12060, r"supports CUDA 12.6, the bundle's PTX needs 12.8 or newer: update the driver"),
    ],
)
def test_an_old_driver(bundle, device, version, message):
    with pytest.raises(UnsupportedError, match=message):
        CudaBackend.open(bundle, ptx=True, api=fake_cuda(bundle, device=device, version=version))


def test_a_minor_release_behind_loads_cubins(bundle):
    CudaBackend.open(bundle, api=fake_cuda(bundle, version=12000)).close()


def edit(bundle, name, change):
    """Changes a file of the bundle, unnoticed by the manifest."""
    path = bundle.file(f"{index.folder('sm_87')}/{name}")
    path.write_bytes(change(path.read_bytes()))


def test_a_cubin_that_is_not_the_index_s(bundle):
    api = fake_cuda(bundle)
    key = list(api.variants)[3]
    edit(bundle, f"{key}.cubin", lambda data: data + b" ")
    with pytest.raises(BadInputError, match=rf"{key}.cubin does not match the kernel index"):
        CudaBackend.open(bundle, api=api)
    assert not api.live and api.calls[-1] == "cuDevicePrimaryCtxRelease"
    with pytest.raises(BadInputError, match="bytes instead of"):
        Bundle.open(bundle.path)


def test_damaged_indexes(bundle):
    key = next(iter(fake_cuda(bundle).variants))

    def without(data):
        parsed = json.loads(data)
        del parsed["kernels"][key]
        return json.dumps(parsed).encode()

    cases = [
        (index.INDEX, without, f"kernel {key} is not in the index of sm_87: export again"),
        (index.INDEX, lambda d: d.replace(b'"sm_87"', b'"sm_90"'), "is the index of sm_90"),
        (index.INDEX, lambda d: d.replace(b'"format": 1', b'"format": 2'), "format 2, this version reads 1"),
        (index.INDEX, lambda d: d[:-9], "is not JSON"),
        (index.PROGRAMS, lambda d: d.replace(b'"rows"', b'"lines"'), "is damaged"),
        (index.PROGRAMS, lambda d: d.replace(b'"format":1', b'"format":7'), "format 7, this version reads 1"),
    ]
    for name, change, message in cases:
        path = bundle.file(f"{index.folder('sm_87')}/{name}")
        api, good = fake_cuda(bundle), path.read_bytes()
        edit(bundle, name, change)
        with pytest.raises(BadInputError, match=message):
            CudaBackend.open(bundle, api=api)
        path.write_bytes(good)
        assert not api.live


def test_weights_that_the_programs_do_not_find(bundle):
    path = bundle.file(index.WEIGHTS_INDEX)
    good = path.read_text()
    path.write_text(good.replace('"layers.0.qkv.q"', '"layers.0.qkv.p"'))
    with pytest.raises(BadInputError, match=r"weights.bin lacks layers.0.qkv.q: export the model again"):
        CudaBackend.open(bundle, api=fake_cuda(bundle))
    path.write_text("[]")
    with pytest.raises(BadInputError, match=r"weights.json is damaged"):
        CudaBackend.open(bundle, api=fake_cuda(bundle))
    path.write_text(good)
    data = bundle.file(index.WEIGHTS)
    data.write_bytes(data.read_bytes()[:-5000])
    api = fake_cuda(bundle)
    with pytest.raises(BadInputError, match=r"weights.bin ends early"):
        CudaBackend.open(bundle, api=api)
    assert not api.live


def test_too_little_memory_names_every_item(bundle):
    api = fake_cuda(bundle, memory=20_000)
    with pytest.raises(MimoEdgeError, match=r"no GPU memory for weights: needed weights 0.\d MB, free now 0.\d MB"):
        CudaBackend.open(bundle, api=api)
    assert not api.live
    api = fake_cuda(bundle, memory=17_000_000)  # two page-locked buffers of 8 MB while weights are loaded
    backend = CudaBackend.open(bundle, api=api)
    layout = plan_layout(bundle.spec, 128, sequences=40_000)
    with pytest.raises(MimoEdgeError, match=r"needed weights 0.\d MB \+ kv \d+.\d MB.*choose a smaller --context"):
        backend.allocate(layout)
    backend.allocate(plan_layout(bundle.spec, 128))
    backend.close()
    assert not api.live


def test_a_failing_launch_names_the_call_and_leaves_nothing_behind(bundle):
    api = fake_cuda(bundle)
    backend = CudaBackend.open(bundle, api=api)
    api.cuLaunchKernelEx = lambda *args: (FakeCuda.CUresult.CUDA_ERROR_INVALID_VALUE,)
    before = set(api.live)
    with pytest.raises(MimoEdgeError, match=r"CUDA failed in .*: CUDA_ERROR_INVALID_VALUE: a fake's words"):
        backend.allocate(plan_layout(bundle.spec, 64))
    backend.close()
    assert before and not api.live


def test_large_pieces_get_allocations_of_their_own():
    chunks, places = place({"a": 100, "b": 2000, "c": 700, "d": 1, "e": 300}, chunk=1024)
    assert chunks == [256 + 768, 2048, 256 + 512]
    assert places == {"a": (0, 0), "b": (1, 0), "c": (0, 256), "d": (2, 0), "e": (2, 256)}
    sizes = {str(i): 90 << 20 for i in range(10)}
    chunks, places = place(sizes)
    assert max(chunks) <= 256 << 20 and sum(chunks) == sum(sizes.values()) and len(set(places.values())) == 10


def test_small_weights_pass_through_small_buffers(tmp_path):
    """Of which pieces need several, and which then hold what the file says."""
    assert [staging(n) for n in (0, 18 << 20, 4 << 30)] == [256 << 10, (18 << 20) // 50, 8 << 20]
    data = np.random.default_rng().integers(0, 256, 1_300_007, np.uint8)
    (tmp_path / "weights").write_bytes(data.tobytes())
    places = {"a": (0, 700_001), "b": (700_003, 5), "c": (700_008, 599_999)}
    api = FakeCuda()
    driver = Driver(0, api)
    arena = Arena(driver, {n: size for n, (_, size) in places.items()})
    stream(driver, tmp_path / "weights", places, arena)
    for name, (at, size) in places.items():
        out = np.zeros(size, np.uint8)
        driver.download(out, arena.address[name])
        assert np.array_equal(out, data[at : at + size])
    arena.close()
    assert api.calls.count("cuMemHostAlloc") == api.calls.count("cuMemFreeHost") == 2 and not api.live


def test_auto_takes_the_gpu_and_says_why(tmp_path, driver_is, caplog, monkeypatch):
    bundle = write_cuda_bundle(tmp_path / "tiny", qwen_spec(1))
    driver_is(fake_cuda(bundle))
    with caplog.at_level(logging.INFO, "mimo_edge"), Engine.open(bundle.path, max_context=64) as engine:
        assert engine.backend.name == "cuda" and engine.chunk == 16
        assert engine.memory().full_kv_bytes == engine.backend.memory()["kv"] == 64 * 2 * 16 * 2
        text = "".join(engine.generate("abc", max_tokens=4))
        monkeypatch.setattr(engine.backend, "best", lambda step: np.full(len(step.tokens), -1))
        with pytest.raises(MimoEdgeError, match="logits at position 3 are not finite"):
            list(engine.generate([1, 2, 3], max_tokens=2))
    assert "backend cuda, as the bundle has kernels for this GPU" in caplog.text
    with Engine.open(bundle.path, "reference", max_context=64) as engine:
        assert "".join(engine.generate("abc", max_tokens=4)) == text


def test_programs_survive_json(bundle):
    path = bundle.file(f"{index.folder('sm_87')}/{index.PROGRAMS}")
    programs = ProgramSet.loads(path.read_bytes(), "x")
    assert ProgramSet.loads(programs.dumps(), "x") == programs
    path = bundle.file(f"{index.folder('sm_87')}/{index.INDEX}")
    assert KernelIndex.loads(path.read_bytes(), "x").dumps() == path.read_text()
