"""The export with calibration text: what gets into the bundle, and that it runs."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from fakes import BOS, EOS, TEMPLATE, byte_tokenizer
from specs import RandomWeights, gemma_spec, mimo_spec

from mimo_edge.bundle import WEIGHTS, read_tensors
from mimo_edge.cli.main import cli
from mimo_edge.engine import Engine
from mimo_edge.errors import BadInputError
from mimo_edge.export import pipeline
from mimo_edge.export.families import Checkpoint
from mimo_edge.export.pipeline import CALIBRATION, QUANTIZATION, export_bundle, uniform
from mimo_edge.export.quantize.calibration import Conditions
from mimo_edge.export.quantize.rtn import quantize_rows
from mimo_edge.params import stored_tensors


class Source:
    def __init__(self, spec):
        self.weights = RandomWeights(spec, np.random.randint(1 << 30))

    def read(self, name, start=0, stop=None):
        return self.weights.get(name)[start:stop].numpy().copy()


@pytest.fixture
def export(tmp_path, monkeypatch):
    """Exports a tiny spec with 30 lines of text to tmp_path/b."""

    def run(spec, lines=30, **options):
        run.spec = replace(spec, vocab_size=258, bos_id=BOS, eos_ids=(EOS,))
        run.source = Source(run.spec)
        checkpoint = Checkpoint(run.spec, run.source, byte_tokenizer().to_str(), TEMPLATE, "tiny")
        monkeypatch.setattr(pipeline, "open_checkpoint", lambda src: checkpoint)
        letters = np.random.default_rng().integers(97, 122, (lines, 60))
        text = tmp_path / "calib.jsonl"
        text.write_text("".join(json.dumps({"text": bytes(row.tolist()).decode()}) + "\n" for row in letters))
        return export_bundle("src", tmp_path / "b", **{"calib": text, **options})

    return run


@pytest.mark.parametrize("spec", [mimo_spec(gate=True, mtp=2), gemma_spec()], ids=["mimo", "gemma"])
def test_a_calibrated_bundle_runs(spec, export):
    bundle = export(spec, quant=uniform())
    assert bundle.spec == replace(export.spec, quant=uniform(), output_bias=True)
    arrays = read_tensors(bundle.file(WEIGHTS))
    assert list(arrays) == [t.name for t in stored_tensors(bundle.spec)]
    assert np.abs(arrays["layers.0.o.bias"]).max() > 0
    plain = quantize_rows(export.source.read("layers.1.down"), uniform().ffn)[0]
    assert not np.array_equal(arrays["layers.1.down.q"], plain)
    told = json.loads(bundle.file(CALIBRATION).read_text())
    assert told["conditions"]["output_bias"] and told["tokens"] >= 1800 and "layers.0.qkv" in told["inputs"]
    replies = []
    for backend in ("reference", "onnxruntime-float"):
        with Engine.open(bundle.path, backend) as engine:
            replies.append("".join(engine.generate([BOS, *b"hello"], max_tokens=12)))
    assert replies[0] == replies[1]


def test_conditions_reach_the_bundle(export):
    bundle = export(mimo_spec(), quant=uniform(), conditions=Conditions(output_bias=False, own_scales=False))
    assert not bundle.spec.output_bias
    assert json.loads(bundle.file(CALIBRATION).read_text())["inputs"].keys() == {"model"}


def test_the_choice_is_calibrated_for_itself_and_measured_last(export):
    bundle = export(replace(gemma_spec(), max_context=60), budget=0.5)
    report = json.loads(bundle.file(QUANTIZATION).read_text())
    last = report["measured"][-1]
    assert last["quant"] == report["quant"] and len(report["measured"]) >= 2
    assert report["quant"]["attention"]["bits"] == 4 and bundle.spec.output_bias


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "gptq", "calib": None}, "method gptq needs calibration text"),
        ({"method": "rtn"}, "method rtn does not calibrate"),
        ({"method": "magic"}, "unknown quantisation method 'magic' .known: rtn, gptq"),
        ({"calib_tokens": 10_000}, "fewer than --calib-tokens 10000"),
        ({"lines": 0}, "is empty"),
        ({"lines": 1}, "too few"),
    ],
)
def test_bad_requests_leave_nothing(options, message, export, tmp_path):
    with pytest.raises(BadInputError, match=message):
        export(mimo_spec(), quant=uniform(), **options)
    assert {p.name for p in tmp_path.iterdir()} == {"calib.jsonl"}


def test_tokens_of_no_text():
    result = CliRunner().invoke(cli, ["export", "model", "-o", "out", "--calib-tokens", "5000"])
    assert result.exit_code == 2 and "give --calib too" in result.output
