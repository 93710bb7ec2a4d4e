"""Exports for GPUs: what is in the bundle, that it runs, and what is refused. Kernels compile in test_aot.py."""

from dataclasses import replace

import numpy as np
import pytest
from cuda_bundle import fake_compile, fake_cuda
from fakes import BOS, EOS, TEMPLATE, byte_tokenizer
from rows import error, feed, whole
from specs import RandomWeights, mimo_spec, qwen_spec

from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.backends.cuda_kernels import targets
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.bundle import WEIGHTS, Bundle, read_tensors
from mimo_edge.errors import BadInputError, MimoEdgeError, UnsupportedError
from mimo_edge.export import pipeline
from mimo_edge.export.families import Checkpoint
from mimo_edge.export.pipeline import export_bundle, uniform
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.pools import KvPools


class Source:
    """Random weights, handed out as a checkpoint's would be; `readable` False: reading is an error."""

    def __init__(self, spec, readable):
        self.weights, self.readable = RandomWeights(spec, 0), readable

    def read(self, name, start=0, stop=None):
        assert self.readable, f"{name} was read"
        value = self.weights.get(name).numpy()
        return np.ascontiguousarray(value[start:stop]) if value.ndim == 2 else value


@pytest.fixture
def export(tmp_path, monkeypatch):
    """Exports a tiny spec to tmp_path/b."""

    def run(spec, readable=True, **options):
        spec = replace(spec, vocab_size=258, bos_id=BOS, eos_ids=(EOS,))
        checkpoint = Checkpoint(spec, Source(spec, readable), byte_tokenizer().to_str(), TEMPLATE, "tiny")
        monkeypatch.setattr(pipeline, "open_checkpoint", lambda src: checkpoint)
        return export_bundle("src", tmp_path / "b", **options)

    return run


@pytest.fixture
def compiler(monkeypatch):
    """Kernels that only the fake driver runs."""
    monkeypatch.setattr("mimo_edge.kernels.aot.compile_variants", fake_compile)


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_a_bundle_gets_kernels_for_several_gpus_and_runs_there(export, compiler):
    done = []
    bundle = export(
        mimo_spec(), quant=uniform(), target=["sm_90", "orin", "cpu"], progress=lambda *a: done.append(a[2])
    )
    assert bundle.manifest.target == "cpu,sm_87,sm_90" and targets(bundle) == [87, 90]
    assert bundle.has("model.cpu.onnx") and "device weights" in done
    tokens = np.random.default_rng(1).integers(0, 258, 9)
    layout = plan_layout(bundle.spec, 64)
    for capability in (90, 87):
        backend = CudaBackend.open(bundle, api=fake_cuda(bundle, capability))
        assert backend.index.target == f"sm_{capability}"
        backend.allocate(layout)
    weights = BundleWeights(bundle.spec, read_tensors(bundle.file(WEIGHTS)), keep=True)
    got = feed(backend, KvPools(layout).admit(9), tokens[:4], [3, 1])
    assert error(got, whole(bundle.spec, weights, tokens[:4])) < 2e-2


def test_a_bundle_is_copied_with_kernels_for_another_gpu(export, compiler, tmp_path):
    first = export(qwen_spec(1), quant=uniform(), target="orin")
    second = export_bundle(first.path, tmp_path / "c", target="sm_90")
    assert second.manifest.target == "cpu,sm_90" and targets(second) == [90]
    assert (second.fingerprint, second.spec, second.chat_template) == (first.fingerprint, first.spec, TEMPLATE)
    Bundle.open(second.path)
    for options, message in (
        ({}, "is a bundle already: name a GPU to add kernels for, as in --target orin"),
        ({"target": "orin", "quant": uniform()}, "is a bundle, which is copied as it is: leave options on bits"),
        ({"target": "orin", "max_context": 9}, "is a bundle, which is copied as it is"),
        ({"target": "orin", "calib": "missing.jsonl"}, "is a bundle, which is copied as it is"),
        ({"target": "orin", "budget": 0.5}, "is a bundle, which is copied as it is"),
    ):
        with pytest.raises(BadInputError, match=message):
            export_bundle(first.path, tmp_path / "d", **options)
    with pytest.raises(BadInputError, match="c exists"):
        export_bundle(first.path, tmp_path / "c", target="orin")
    assert names(tmp_path) == ["b", "c"]


def test_a_model_without_kernels_is_refused_before_it_is_quantised(export, compiler, tmp_path):
    with pytest.raises(UnsupportedError, match="do not support mixture-of-experts layers: use --target cpu"):
        export(mimo_spec(moe=True), readable=False, quant=uniform(), target="orin")
    assert names(tmp_path) == []


def test_kernels_that_do_not_compile_leave_nothing_behind(export, tmp_path, monkeypatch):
    def fail(*args, **options):
        raise MimoEdgeError("kernel x does not compile for sm_87")

    monkeypatch.setattr("mimo_edge.kernels.aot.compile_variants", fail)
    with pytest.raises(MimoEdgeError, match="does not compile"):
        export(qwen_spec(1), quant=uniform(), target="orin")
    assert names(tmp_path) == []
