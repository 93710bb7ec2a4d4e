"""The whole export: contents of the bundle, bounded memory, and nothing left behind when it fails."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fakes import BOS, EOS, TEMPLATE, byte_tokenizer
from specs import ALL, RandomWeights, gemma_spec, mimo_spec, qwen_spec

from mimo_edge.backends.onnxruntime import FLOAT_MODEL, MODEL
from mimo_edge.bundle import TOKENIZER, WEIGHTS, Bundle, read_tensors
from mimo_edge.errors import BadInputError, MimoEdgeError, UnsupportedError
from mimo_edge.export import pipeline
from mimo_edge.export.families import Checkpoint
from mimo_edge.export.pipeline import QUANTIZATION, export_bundle, uniform
from mimo_edge.export.quantize.choose import DEFAULT_BUDGET
from mimo_edge.export.quantize.rtn import quantize_rows
from mimo_edge.params import parameters, stored, stored_tensors
from mimo_edge.spec import QuantSpec, TensorQuant

MIXED = QuantSpec(TensorQuant(8, 32), TensorQuant(4, 32), None, TensorQuant(8, 32))


class Source:
    """Random weights, handed out as a checkpoint's would be; `before` is called with each name asked for."""

    def __init__(self, spec, before=lambda name: None):
        self.weights, self.before, self.largest = RandomWeights(spec, np.random.randint(1 << 30)), before, 0

    def read(self, name, start=0, stop=None):
        self.before(name)
        rows = self.weights.get(name)[start:stop].numpy().copy()
        self.largest = max(self.largest, rows.nbytes)
        return rows


@pytest.fixture
def export(tmp_path, monkeypatch):
    """Exports a tiny spec to tmp_path/b; the source is kept in `export.source`."""

    def run(spec, before=lambda name: None, template=TEMPLATE, **options):
        spec = replace(spec, vocab_size=258, bos_id=BOS, eos_ids=(EOS,))
        run.source, run.spec = Source(spec, before), spec
        checkpoint = Checkpoint(spec, run.source, byte_tokenizer().to_str(), template, "tiny")
        monkeypatch.setattr(pipeline, "open_checkpoint", lambda src: checkpoint)
        return export_bundle("src", tmp_path / "b", **options)

    return run


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def expected_tensors(spec, source):
    out = {}
    for p in parameters(spec):
        quant = spec.quant.of(p.kind)
        w = source.weights.get("embed" if p.name == "head" and spec.tied else p.name).numpy()
        parts = (w,) if quant is None else quantize_rows(w, quant, p.name)
        out |= {s.name: part for s, part in zip(stored(p, quant), parts, strict=True)}
    return out


@pytest.mark.parametrize("quant", [uniform(), uniform(8), MIXED, QuantSpec()], ids=["4", "8", "mixed", "float"])
@pytest.mark.parametrize("spec", [*ALL.values(), mimo_spec(mtp=3)], ids=[*ALL, "mtp"])
def test_the_weights_file_in_blocks_of_any_size(spec, quant, export, tmp_path, monkeypatch):
    block = int(np.random.randint(300, 9000))
    monkeypatch.setattr(pipeline, "_BLOCK_BYTES", block)
    bundle = export(spec, quant=quant)
    assert bundle.spec == replace(export.spec, quant=quant)
    arrays, expected = read_tensors(bundle.file(WEIGHTS)), expected_tensors(bundle.spec, export.source)
    assert list(arrays) == [t.name for t in stored_tensors(bundle.spec)] == list(expected)
    for name, array in arrays.items():
        assert np.array_equal(array, expected[name]), name
    rows = max(4 * p.shape[-1] for p in parameters(bundle.spec) if len(p.shape) == 2)
    assert export.source.largest <= max(block, rows, 4 * 512)  # one row, or a whole vector, at least


def test_everything_else_in_the_bundle(export, tmp_path):
    steps = []
    bundle = export(gemma_spec(), quant=uniform(), max_context=100, progress=lambda *s: steps.append(s))
    assert Bundle.open(tmp_path / "b") == bundle and names(tmp_path) == ["b"]
    assert (bundle.manifest.name, bundle.manifest.target, bundle.spec.max_context) == ("tiny", "cpu", 100)
    assert bundle.chat_template == TEMPLATE and bundle.file(TOKENIZER).read_text() == byte_tokenizer().to_str()
    assert bundle.has(MODEL) and bundle.has(FLOAT_MODEL)
    assert not bundle.has(QUANTIZATION), "nothing was measured"
    done, total, what = zip(*steps, strict=True)
    assert set(what) == {"weights"} and list(done) == sorted(done) and done[-1] == total[-1]
    assert total[0] == sum(t.nbytes for t in stored_tensors(bundle.spec))


def test_a_checkpoint_without_a_template(export):
    assert export(qwen_spec(), template=None, quant=uniform()).chat_template is None


def test_the_measured_table_is_in_the_bundle(export):
    steps = []
    bundle = export(mimo_spec(), max_context=64, progress=lambda *s: steps.append(s))
    report = json.loads(bundle.file(QUANTIZATION).read_text())
    assert bundle.spec.quant == QuantSpec(**{k: TensorQuant(**q) for k, q in report["quant"].items()})
    assert report["budget"] == DEFAULT_BUDGET and report["tokens"] == {"prose": 64, "docs": 64}
    assert report["measured"][0]["losses"].keys() == {"prose", "docs"}
    assert {what.split()[0] for _, _, what in steps} == {"measuring", "weights"}


def test_the_same_checkpoint_gives_the_same_fingerprint(export, tmp_path):
    first = export(mimo_spec(), quant=uniform())
    again = export_bundle("src", tmp_path / "again", quant=uniform())
    assert again.fingerprint == first.fingerprint
    assert export_bundle("src", tmp_path / "other", quant=uniform(8)).fingerprint != first.fingerprint


# Refused before anything is read


def never(name):
    raise AssertionError(f"{name} was read")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": "orin", "quant": QuantSpec()}, UnsupportedError, r"float weights \(attention; give --bits\)"),
        ({"target": ["cpu", "sm_75"]}, BadInputError, r"unknown target 'sm_75' \(known: cpu, orin, sm_80 and newer\)"),
        ({"target": "gpu"}, BadInputError, "unknown target 'gpu'"),
        ({"method": "magic"}, BadInputError, r"unknown quantisation method 'magic' \(known: rtn, gptq\)"),
        ({"max_context": 257}, BadInputError, "--max-context 257: the checkpoint allows 1 to 256"),
        ({"max_context": 0}, BadInputError, "--max-context 0"),
        ({"quant": uniform(8, 64)}, BadInputError, "tensor embed: rows of 32 weights do not divide into groups of 64"),
        (
            {"quant": QuantSpec(ffn=TensorQuant(4, 64)), "allow_coarse_groups": True},
            BadInputError,
            r"tensor layers\.0\.gate_up: rows of 32 .* \(groups of 32 would\)",
        ),
    ],
)
def test_options_that_cannot_be(options, error, message, export, tmp_path):
    with pytest.raises(error, match=message) as e:
        export(mimo_spec(), before=never, **({"quant": uniform()} | options))
    assert "\n" not in str(e.value) and names(tmp_path) == []


def test_coarse_groups_are_for_large_models(export, tmp_path, monkeypatch):
    spec = replace(qwen_spec(), hidden_size=64)
    spec = replace(spec, attention={"full": replace(spec.attention["full"], heads=8)})
    with pytest.raises(
        BadInputError, match=r"4-bit groups of 64 \(attention\) in a model of 0M .*--allow-coarse-groups"
    ):
        export(spec, before=never, quant=uniform(4, 64))
    for quant, options in (
        (uniform(8, 64), {}),
        (replace(uniform(8, 64), attention=TensorQuant(4, 32)), {}),
        (uniform(4, 64), {"allow_coarse_groups": True}),
    ):
        assert export(spec, quant=quant, **options).spec.quant == quant
        (tmp_path / "b").rename(tmp_path / f"b{len(names(tmp_path))}")
    monkeypatch.setattr(pipeline, "LARGE_MODEL", 100)
    assert export(spec, quant=uniform(4, 64)).spec.quant == uniform(4, 64)


# Nothing is left behind


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, BadInputError])
@pytest.mark.parametrize("at", ["embed", "layers.2.o", "norm"])
def test_an_export_that_fails_midway(error, at, export, tmp_path):
    def before(name):
        if name == at:
            raise error("stop")

    with pytest.raises(error, match="stop"):
        export(mimo_spec(), before=before, quant=uniform())
    assert names(tmp_path) == []


def test_an_output_that_exists(export, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("precious")
    with pytest.raises(BadInputError, match="b exists"):
        export(mimo_spec(), before=never, quant=uniform())
    assert names(tmp_path) == ["b"] and (tmp_path / "b" / "mine").read_text() == "precious"


@pytest.mark.parametrize("calls", [0, 1, 7])
def test_a_full_disk(calls, export, tmp_path, monkeypatch):
    pwrite, count = os.pwrite, iter(range(1000))

    def full(fd, data, offset):
        if next(count) >= calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(MimoEdgeError) as e:
        export(mimo_spec(), quant=uniform())
    needed = sum(t.nbytes for t in stored_tensors(replace(export.spec, quant=uniform())))
    assert e.value.exit_code == 1 and "disk full" in str(e.value) and "\n" not in str(e.value)
    stated = int(str(e.value).split("needs ")[1].split(" bytes")[0].replace(",", ""))
    assert needed < stated < needed + (100 << 20) and names(tmp_path) == []


def test_a_disk_without_room(export, tmp_path, monkeypatch):
    monkeypatch.setattr("mimo_edge.bundle.shutil.disk_usage", lambda p: type("U", (), {"free": 1000})())
    with pytest.raises(MimoEdgeError, match="has 1,000 free") as e:
        export(mimo_spec(), before=never, quant=uniform())
    assert "disk full" in str(e.value) and names(tmp_path) == []


def test_short_writes_are_continued(export, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[: 1 + len(data) // 2], offset))
    bundle = export(mimo_spec(), quant=MIXED)
    arrays, expected = read_tensors(bundle.file(WEIGHTS)), expected_tensors(bundle.spec, export.source)
    assert all(np.array_equal(arrays[name], expected[name]) for name in expected)


def test_non_finite_weights_name_the_tensor(export, tmp_path):
    def before(name):
        if name == "layers.1.down":
            export.source.weights.tensors[name][3, 5] = float("nan")

    with pytest.raises(BadInputError, match=r"layers\.1\.down"):
        export(mimo_spec(), before=before, quant=uniform())
    assert names(tmp_path) == []


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_an_export_that_is_stopped_from_outside(sign, tmp_path):
    code = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from fakes import byte_tokenizer
from specs import RandomWeights, mimo_spec
from mimo_edge.export import pipeline
from mimo_edge.export.families import Checkpoint

class Slow:
    weights = RandomWeights(mimo_spec(), 0)
    def read(self, name, start=0, stop=None):
        if name == "layers.3.o":
            print("half way", flush=True)
            time.sleep(60)
        return self.weights.get(name)[start:stop].numpy()

pipeline.open_checkpoint = lambda src: Checkpoint(mimo_spec(), Slow(), byte_tokenizer().to_str(), None, "tiny")
pipeline.export_bundle("src", {str(tmp_path / "b")!r}, quant=pipeline.uniform())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"half way\n"
        child.send_signal(sign)
        child.communicate()
    assert child.returncode != 0 and not (tmp_path / "b").exists()
    if sign == signal.SIGINT:
        assert names(tmp_path) == []
