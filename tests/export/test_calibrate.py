"""Calibration: walks like the oracle, loses less than round to nearest, and takes back the mean shift."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from specs import ALL, RandomWeights, gemma_spec, mimo_spec

from mimo_edge.backends import oracle
from mimo_edge.export.quantize import walk
from mimo_edge.export.quantize.calibrate import Calibrator, calibrate
from mimo_edge.export.quantize.calibration import Conditions
from mimo_edge.export.quantize.perplexity import LayerWeights, hidden_states
from mimo_edge.export.quantize.rtn import quantize_rows
from mimo_edge.params import parameters
from mimo_edge.spec import QuantSpec, TensorQuant

Q4, Q8 = TensorQuant(4, 32), TensorQuant(8, 32)
FOUR = QuantSpec(Q4, Q4, Q4, Q4)
SPECS = {**ALL, "heads": mimo_spec(mtp=3), "gated-heads": mimo_spec(gate=True, mtp=2)}
DENSE = [n for n, s in SPECS.items() if all(f.moe is None for f in s.ffn.values())]


class Source:
    """Random weights as a checkpoint hands them out; remembers what was read."""

    def __init__(self, spec):
        self.weights, self.names = RandomWeights(spec, np.random.randint(1 << 30)), []

    def read(self, name, start=0, stop=None):
        self.names.append(name)
        value = self.weights.get(name)
        return (value if value.ndim == 1 else value[start:stop]).numpy().copy()


def texts(spec, count=12, length=50):
    return [torch.randint(spec.vocab_size, (length + int(n),)) for n in torch.randint(9, (count,))]


@pytest.fixture
def calibrated(tmp_path):
    def run(spec, quant=FOUR, source=None, sequences=None, progress=lambda *_: None, **conditions):
        run.source = source or Source(spec)
        run.sequences = sequences or texts(spec)
        folder = Path(tmp_path / str(len(list(tmp_path.iterdir()))))
        folder.mkdir()
        return calibrate(spec, run.source, run.sequences, quant, Conditions(**conditions), folder, progress)

    return run


def model(c, quant):
    spec = replace(c.spec, quant=quant)
    return spec, LayerWeights(spec, c.source(quant), c.method(quant), quant)


def hidden(spec, weights, sequences):
    with torch.inference_mode():
        return torch.cat(hidden_states(spec, weights, sequences, lambda *_: None))


def products(spec, weights, sequences, name):
    """Outputs of the product `name` with its bias, in the first layer that has it."""
    rows = []
    for tokens in sequences:
        x = weights.rows("embed", tokens) * spec.embed_scale
        w = walk.block(spec, weights, "layers.0", spec.layers[0], x)
        seen, at = next(w)
        while seen != name:
            seen, at = w.send(at)
        y = at @ weights.get(name).T
        rows.append(y + weights.get(f"{name}.bias") if spec.output_bias else y)
    return torch.cat(rows)


@pytest.mark.parametrize("name", SPECS)
def test_a_walk_is_the_oracles_block(name):
    spec, seen = SPECS[name], []
    weights, [tokens] = RandomWeights(spec, np.random.randint(1 << 30)), texts(spec, 1)
    x = weights.rows("embed", tokens)

    def through(w):
        try:
            at = next(w)
            while True:
                seen.append(at[0])
                at = w.send(at[1])
        except StopIteration as end:
            return end.value

    for i, kinds in enumerate(spec.layers):
        got = through(walk.block(spec, weights, f"layers.{i}", kinds, x))
        x, _, _ = oracle.block(
            spec, weights, f"layers.{i}", kinds.attention, kinds.ffn, x, torch.arange(len(tokens)), None
        )
        assert torch.allclose(got, x, rtol=1e-5, atol=1e-5)
    for m in range(spec.mtp.heads if spec.mtp else 0):
        got = through(walk.mtp(spec, weights, m, x, tokens))
        _, want, _, _ = oracle.mtp(spec, weights, m, x, tokens, torch.arange(len(tokens)), None)
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    linear = {p.name for p in parameters(spec) if p.kind in ("attention", "ffn")}
    assert set(seen) == linear and len(seen) == len(linear)  # every product once


@pytest.mark.parametrize("name", DENSE)
def test_hidden_states_come_closer_than_with_round_to_nearest(name, calibrated):
    c = calibrated(SPECS[name], sequences=texts(SPECS[name], 30))
    spec, fresh = SPECS[name], texts(SPECS[name], 6)
    want = hidden(spec, LayerWeights(spec, calibrated.source, quantize_rows, QuantSpec()), fresh)
    plain = hidden(spec, LayerWeights(spec, calibrated.source, quantize_rows, FOUR), fresh)
    got = hidden(*model(c, FOUR), fresh)
    assert (got - want).norm() < 0.98 * (plain - want).norm()


@pytest.mark.parametrize("name", ["mimo", "gemma", "biased"])
def test_the_mean_shift_is_gone(name, calibrated):
    quant = replace(FOUR, embedding=Q8)  # of the lookup, so that it is as it was during the calibration
    c, spec = calibrated(SPECS[name], quant), SPECS[name]
    exact = LayerWeights(spec, calibrated.source, quantize_rows, QuantSpec())
    rounded_spec, rounded = model(c, quant)
    for product in ("layers.0.o", "layers.0.down"):
        want = products(spec, exact, calibrated.sequences, product).mean(0)
        got = products(rounded_spec, rounded, calibrated.sequences, product).mean(0)
        bias = c.source(quant).read(f"{product}.bias")
        own = calibrated.source.read(f"{product}.bias") if spec.output_bias else 0
        assert (got - want).norm() < 1e-4 * want.norm() + 1e-5
        assert np.linalg.norm(bias - own) > 1e-3 * float(want.norm())  # which it would not be without


def test_biases_of_a_calibration_that_serves_any_quantisation(calibrated):
    spec = mimo_spec()
    c = calibrated(spec, QuantSpec())
    inputs = []
    for tokens in calibrated.sequences:
        weights = LayerWeights(spec, calibrated.source, quantize_rows, QuantSpec())
        w = walk.block(spec, weights, "layers.0", spec.layers[0], weights.rows("embed", tokens))
        inputs.append(w.send(next(w)[1])[1])
    _, rounded = model(c, FOUR)
    lost = weights.get("layers.0.o") - rounded.get("layers.0.o")
    want = lost @ torch.cat(inputs).mean(0)
    assert np.allclose(c.source(FOUR).read("layers.0.o.bias"), want.numpy(), rtol=1e-3, atol=1e-5)
    assert not c.source(QuantSpec()).read("layers.0.o.bias").any()


def test_what_is_not_seen_or_has_8_bits_is_rounded_to_nearest(calibrated):
    quant = QuantSpec(Q8, Q4, Q4, Q8)
    spec = mimo_spec(mtp=1)
    method = calibrated(spec, quant).method(quant)
    for p in parameters(spec):
        if how := quant.of(p.kind):
            rows = calibrated.source.read(p.name)
            pairs = zip(method(rows, how, p.name), quantize_rows(rows, how), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs) == (p.kind != "ffn"), p.name


def test_a_shared_table_is_rounded_alike_wherever_it_is_used(calibrated):
    spec = gemma_spec()
    c = calibrated(spec)
    rows = calibrated.source.read("embed")
    shared, apart = c.method(FOUR), c.method(replace(FOUR, embedding=Q8))
    assert np.array_equal(shared(rows, Q4, "embed")[0], shared(rows, Q4, "head")[0])
    assert not np.array_equal(shared(rows, Q4, "embed")[0], quantize_rows(rows, Q4)[0])
    assert np.array_equal(apart(rows, Q8, "embed")[0], quantize_rows(rows, Q8)[0])
    assert not np.array_equal(apart(rows, Q4, "head")[0], shared(rows, Q4, "head")[0])


def test_the_same_text_gives_the_same_bytes(calibrated):
    spec = mimo_spec(moe=True, gate=True, mtp=2)
    first = calibrated(spec)
    again = calibrated(spec, source=calibrated.source, sequences=calibrated.sequences)
    for p in parameters(first.spec):
        rows = [c.source(FOUR).read(p.name) for c in (first, again)]
        assert np.array_equal(*rows)
        if how := FOUR.of(p.kind):
            pairs = zip(first.method(FOUR)(rows[0], how, p.name), again.method(FOUR)(rows[0], how, p.name), strict=True)
            assert all(np.array_equal(a, b) for a, b in pairs)


def test_one_layer_at_a_time(calibrated):
    """What belongs to a layer is read while that layer walks, and never again."""
    spec, during = mimo_spec(mtp=2), []
    source = Source(spec)

    def progress(done, total, what):
        during.append(set(source.names))
        source.names.clear()
        assert (done, total, what) == (len(during), 7, "calibrating")

    calibrated(spec, source=source, progress=progress)
    owners = [{".".join(n.split(".")[:2]) for n in names if n.startswith(("layers.", "mtp."))} for names in during]
    assert owners == [{f"layers.{i}"} for i in range(5)] + [{f"mtp.{m}"} for m in range(2)]


def test_ranges_are_geometric_means_of_batches(calibrated, monkeypatch):
    from mimo_edge.export.quantize import statistics

    monkeypatch.setattr(statistics, "_BATCH", 10)
    rows = [torch.full((10, 3), value) for value in (1.0, -4.0, 2.0)]
    found = statistics.Statistics.of(rows, rows, hessian=False, cross=False)
    assert found.range.largest == pytest.approx(2.0) and found.range.usual == pytest.approx(2.0)
    assert found.hessian is None and found.means[1].tolist() == pytest.approx([-1 / 3] * 3)


def test_the_report_names_every_product_or_the_whole_model(calibrated):
    spec = mimo_spec(mtp=1)
    own = calibrated(spec).to_json()
    assert own["inputs"].keys() == {p.name for p in parameters(spec) if p.kind in ("attention", "ffn", "head")}
    one = calibrated(spec, source=calibrated.source, sequences=calibrated.sequences, own_scales=False).to_json()
    assert one["inputs"]["model"]["largest"] == max(r["largest"] for r in own["inputs"].values())
    assert one["tokens"] == sum(map(len, calibrated.sequences))


def test_without_a_bias_the_spec_stays(calibrated):
    c = calibrated(mimo_spec(), output_bias=False)
    assert c.spec == mimo_spec() and "layers.0.o.bias" not in {p.name for p in parameters(c.spec)}


def test_a_calibrator_calibrates_again_for_another_quantisation(tmp_path):
    spec = gemma_spec()
    seen = Calibrator(spec, Source(spec), texts(spec), Conditions(), tmp_path / "seen", lambda *_: None)
    first = seen.run(FOUR)
    assert seen.last(FOUR) is first
    other = seen.last(replace(FOUR, attention=Q8))
    assert other is not first and other.quant.attention == Q8 and seen.last(other.quant) is other
