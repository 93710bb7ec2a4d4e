"""mimo-edge bench: what it prints, what it refuses; bytes, operations and predictions."""

import json
from dataclasses import replace

import numpy as np
import pytest
from fakes import FakeBackend, fake_spec
from specs import mimo_spec, qwen_spec
from tiny_bundle import write_bundle
from tiny_weights import INT4

from mimo_edge import roofline
from mimo_edge.backends import registry
from mimo_edge.backends.onnxruntime import OnnxRuntimeBackend
from mimo_edge.bench import Bench
from mimo_edge.cli.main import main
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.kv.layout import plan_layout
from mimo_edge.spec import QuantSpec, TensorQuant, dumps


@pytest.fixture
def command(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mimo_edge.bench._COPY_BYTES", 1 << 20)

    def run(*args):
        with pytest.raises(SystemExit) as exit:
            main(["bench", *map(str, args)])
        return exit.value.code or 0, *capsys.readouterr()

    return run


def test_a_bundle_is_timed_beside_its_floor(command, tmp_path):
    write_bundle(tmp_path / "b", mimo_spec())
    options = ("--depth", 20, "--steps", 3, "--repeats", 3, "--context", 200)
    code, out, err = command("b", *options, "--plot", "roof.svg")
    result = json.loads(out.splitlines()[-1])
    assert code == 0 and result["backend"] == "onnxruntime" and result["logits_error"] < 2e-2, err
    assert [p["name"] for p in result["points"]] == ["decode, 1 row", "decode, 4 rows"], "longer prompts do not fit"
    assert all(0 < p["floor_ms"] < p["ms"] for p in result["points"])
    step = result["decode_1"]["step_ms"]
    assert step["low"] <= step["median"] <= step["high"]
    svg = (tmp_path / "roof.svg").read_text()
    assert svg.startswith("<svg") and "decode, 4 rows" in svg and svg.count("<circle") == 2


def test_wrong_logits_are_not_timed(command, tmp_path, monkeypatch):
    write_bundle(tmp_path / "b", mimo_spec())
    run = OnnxRuntimeBackend.run

    def wrong(self, steps):
        outputs = run(self, steps)
        if len(steps[0].tokens) == 4:
            outputs[0].logits[:] *= 1.5
        return outputs

    monkeypatch.setattr(OnnxRuntimeBackend, "run", wrong)
    code, out, err = command("b", "--depth", 20, "--steps", 3, "--repeats", 2, "--context", 200)
    assert code == 1 and out == "" and "refused: backend onnxruntime computes wrong logits (relative error 0." in err


def test_logits_that_are_always_the_same_or_not_finite_are_wrong():
    spec = fake_spec()
    layout = plan_layout(spec, 64)
    for rule, message in ((lambda tokens: 5, "wrong logits"), (None, "wrong logits")):
        backend = FakeBackend(rule or (lambda tokens: 5))
        if rule is None:
            run = backend.run
            backend.run = lambda steps, run=run: [type(o)(o.logits * np.nan) for o in run(steps)]
        backend.allocate(layout)
        with pytest.raises(MimoEdgeError, match=message):
            Bench(spec, backend, layout).check(None)
    backend = FakeBackend()
    backend.allocate(layout)
    assert Bench(spec, backend, layout).check(None) == 0


def test_a_prediction_says_that_it_is_one(command, tmp_path):
    write_bundle(tmp_path / "b", qwen_spec())
    code, out, _ = command("b", "--predict", "orin-nano-8gb", "--depth", 100)
    line, last = out.splitlines()
    result = json.loads(last)
    assert code == 0 and line.startswith("PREDICTION for orin-nano-8gb, not a measurement: ")
    assert result["kind"] == "prediction, not a measurement"
    low, high = result["decode_tok_s"]
    assert low < high < result["decode_tok_s_floor"] == pytest.approx(68e9 / result["bytes_per_token"])
    code, _, err = command("b", "--predict", "orin")
    assert code == 2 and "unknown module 'orin' (known: orin-nano-4gb, orin-nano-8gb" in err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--steps", "0"], 2, "--steps 0 is out of range"),
        (["b", "--random-weights", "spec.json"], 2, "not both"),
        (["--random-weights", "none.json", "--backend", "cuda"], 2, "cannot read none.json"),
        (["--random-weights", "text.json", "--backend", "cuda"], 2, "text.json is not JSON"),
        (["--random-weights", "spec.json"], 3, "--random-weights measures a GPU: add --backend cuda"),
        (["--depth", "500", "--context", "300"], 2, "--depth 500 and --steps 32 need 536 tokens, the context is 300"),
    ],
)
def test_what_cannot_be(args, code, message, command, tmp_path):
    (tmp_path / "spec.json").write_text(dumps(qwen_spec()))
    (tmp_path / "text.json").write_text("text")
    got, out, err = command(*args)
    assert (got, out) == (code, "") and message in err and err.count("\n") == 1


def test_bytes_and_operations_of_a_step():
    spec = replace(qwen_spec(1), quant=QuantSpec(*[TensorQuant(8, 32)] * 4))
    one, four = (roofline.step(spec, rows, 100) for rows in (1, 4))
    per_row = (32 + 4 + 1) / 32  # 8 bits, a scale and a zero for 32 weights
    matrices = 64 * 32 + 32 * 32 + 2 * 64 * 32 + 32 * 64 + 97 * 32
    floats = 4 * (64 + 32 + 32 + 32)
    assert one.weight_bytes == matrices * per_row + floats + 32 * per_row
    assert one.kv_bytes == 2 * 2 * 2 * 8 * 101 and four.kv_bytes == 2 * 2 * 2 * 8 * 104
    assert one.flops == pytest.approx(2 * (matrices + 4 * 16 * 100.5))
    prompt = roofline.step(spec, 64, 0, logit_rows=1)
    assert prompt.flops == pytest.approx(2 * (64 * (matrices - 97 * 32) + 97 * 32 + 4 * 16 * 64 * 32))
    windows = roofline.step(replace(mimo_spec(), layers=mimo_spec().layers[1:2], quant=INT4), 1, 10_000)
    assert windows.kv_bytes == 2 * 2 * (12 + 8) * 8, "a window of 8 is 7 rows and its own"


def test_a_device_s_floor_is_the_slower_of_memory_and_arithmetic():
    step = roofline.Step(rows=1, context=0, weight_bytes=900, kv_bytes=100, flops=50.0)
    assert step.floor_s(roofline.Device("x", 1000.0, 1e9)) == 1.0
    assert step.floor_s(roofline.Device("x", 1e9, 5.0)) == 10.0
    with pytest.raises(BadInputError):
        roofline.predict(qwen_spec(), "nano", 1)


def test_every_backend_is_named_in_run_s_help(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(name in text for name in registry.LOADERS)
