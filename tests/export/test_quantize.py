"""Round to nearest, the perplexity meter, and the choice made with it."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import BOS, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import ALL, RandomWeights, gemma_spec, mimo_spec, qwen_spec

from mimo_edge.backends import oracle
from mimo_edge.errors import BadInputError
from mimo_edge.export.quantize import choose as choosing
from mimo_edge.export.quantize.choose import Measured, choose, label, read_bytes
from mimo_edge.export.quantize.perplexity import LayerWeights, cross_entropy, hidden_states, restored
from mimo_edge.export.quantize.rtn import pack, quantize_rows
from mimo_edge.kernels.int4_linear.reference import dequantize, unpack
from mimo_edge.params import Param, parameters, stored, stored_tensors
from mimo_edge.spec import MtpSpec, QuantSpec, TensorQuant

FORMATS = [TensorQuant(bits, group) for bits in (4, 8) for group in (32, 64, 128)]
IDS = [f"{q.bits}g{q.group}" for q in FORMATS]


def back(w, quant):
    """float64 [n, K], and scales [n, K/G]."""
    q, scales, zeros = quantize_rows(w, quant)
    value = dequantize(torch.from_numpy(q), torch.from_numpy(scales), torch.from_numpy(zeros), quant.bits)
    return value.double().numpy(), scales.astype(np.float64)


def errors_in_steps(w, quant):
    """|w - dequantised| / scale, float64 [n, K/G, G]; groups of zeros give 0."""
    value, scales = back(w, quant)
    error = np.abs(value - w).reshape(*scales.shape, quant.group)
    return np.divide(error, scales[..., None], out=np.zeros_like(error), where=scales[..., None] > 0)


# Rounding


@pytest.mark.parametrize("quant", FORMATS, ids=IDS)
@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 9), groups=st.integers(1, 5), seed=st.integers(0, 2**32), size=st.floats(1e-3, 1e3))
def test_layout_and_error_bound(quant, n, groups, seed, size):
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((n, groups * quant.group)) * size + rng.normal(0, size)).astype(np.float32)
    parts = quantize_rows(w, quant)
    for part, tensor in zip(parts, stored(Param("w", w.shape, "ffn"), quant), strict=True):
        assert part.shape == tensor.shape and part.dtype == (np.uint8 if tensor.dtype == "U8" else np.float32)
    assert np.array_equal(parts[1], parts[1].astype(np.float16).astype(np.float32))
    assert errors_in_steps(w, quant).max() <= 0.5001


@pytest.mark.parametrize("bits", [4, 8])
@given(st.data())
def test_pack_and_unpack(bits, data):
    values = np.array(data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=33)), np.uint8)
    rows = np.stack([values, values[::-1]])
    packed = pack(rows, bits)
    assert packed.shape == (2, -(-len(values) * bits // 8)) and packed.dtype == np.uint8
    assert np.array_equal(unpack(torch.from_numpy(packed.copy()), bits, len(values)).numpy(), rows)


@pytest.mark.parametrize("quant", FORMATS, ids=IDS)
def test_values_on_the_grid_come_back_exactly(quant):
    rng = np.random.default_rng()
    levels, top = rng.integers(0, 2**quant.bits, (5, 3, quant.group)), 2**quant.bits - 1
    levels[..., 0], levels[..., 1] = 0, top  # the whole range is used
    zero = rng.integers(0, top + 1, (5, 3, 1))
    w = ((levels - zero) * 0.0625).reshape(5, -1).astype(np.float32)
    value, _ = back(w, quant)
    assert np.array_equal(value, w)


@pytest.mark.parametrize("quant", FORMATS, ids=IDS)
def test_groups_of_zeros_are_exact(quant):
    w = np.zeros((3, 3 * quant.group), np.float32)
    w[1, quant.group : 2 * quant.group] = np.random.default_rng().standard_normal(quant.group)
    value, _ = back(w, quant)
    assert np.all(value[w == 0][: quant.group] == 0) and np.any(value[1])
    assert np.all(value[[0, 2]] == 0) and np.all(value[1, : quant.group] == 0)


@pytest.mark.parametrize("quant", FORMATS, ids=IDS)
@pytest.mark.parametrize("tiny", [1e-7, 1e-20, 1e-45], ids=str)
def test_subnormal_ranges_stay_finite(quant, tiny):
    w = np.full((2, quant.group), tiny, np.float32)
    w[1, ::2] *= -1
    value, scales = back(w, quant)
    assert np.isfinite(value).all() and (scales > 0).all()
    assert (np.abs(value - w) <= 0.5001 * scales).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("quant", FORMATS, ids=IDS)
def test_outliers_are_not_clipped(quant, sign):
    w = np.random.default_rng().standard_normal((4, 2 * quant.group)).astype(np.float32)
    w[2, 5] = sign * 60000.0 * (2**quant.bits - 1)
    value, scales = back(w, quant)
    assert errors_in_steps(w, quant).max() <= 0.5001
    assert abs(value[2, 5] - w[2, 5]) <= 0.5001 * scales[2, 0] and scales[2, 1] < 1  # other groups do not suffer


@pytest.mark.parametrize("quant", FORMATS, ids=IDS)
@pytest.mark.parametrize("offset", [3.0, -3.0])
def test_zero_is_a_level_of_one_sided_groups(quant, offset):
    w = (np.random.default_rng().uniform(-0.1, 0.1, (3, quant.group)) + offset).astype(np.float32)
    w[1, 7] = 0
    value, _ = back(w, quant)
    assert value[1, 7] == 0 and errors_in_steps(w, quant).max() <= 0.5001


def test_rows_do_not_depend_on_each_other():
    w = np.random.default_rng().standard_normal((20_011, 64)).astype(np.float32)  # more than one inner chunk
    whole = quantize_rows(w, TensorQuant(4, 32))
    for rows in (slice(0, 1), slice(8190, 8195), slice(20_000, None)):
        for a, b in zip(whole, quantize_rows(w[rows], TensorQuant(4, 32)), strict=True):
            assert np.array_equal(a[rows], b)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("place", [0, 63, 64, 191])
def test_non_finite_weights(bad, place):
    w = np.ones((3, 64), np.float32)
    w.flat[place] = bad
    with pytest.raises(BadInputError, match=r"tensor layers\.3\.down holds NaN or Inf"):
        quantize_rows(w, TensorQuant(4, 32), "layers.3.down")


def test_a_range_that_float16_scales_cannot_hold():
    w = np.zeros((1, 32), np.float32)
    w[0, 3] = 1e6
    with pytest.raises(BadInputError, match=r"tensor x: a group spans 1e\+06"):
        quantize_rows(w, TensorQuant(4, 32), "x")
    w[0, 3], w[0, 4] = 3e38, -3e38  # their difference overflows float32
    with pytest.raises(BadInputError, match="tensor x: a group spans"):
        quantize_rows(w, TensorQuant(8, 32), "x")


@pytest.mark.parametrize(
    ("k", "group", "advice"),
    [(96, 64, "groups of 32 would"), (192, 128, "groups of 32 or 64 would"), (100, 32, "no group would")],
)
def test_k_that_does_not_divide(k, group, advice):
    with pytest.raises(BadInputError, match=f"tensor t: rows of {k} weights .* groups of {group} .{advice}"):
        quantize_rows(np.ones((1, k), np.float32), TensorQuant(4, group), "t")


# Perplexity


class RandomSource:
    """A Source of fresh random weights that records the largest read."""

    def __init__(self, spec, seed=None):
        self.weights = RandomWeights(spec, np.random.default_rng(seed).integers(1 << 30).item())
        self.largest = 0

    def read(self, name, start=0, stop=None):
        rows = self.weights.get(name)[start:stop].numpy().copy()
        self.largest = max(self.largest, rows.nbytes)
        return rows


def byte_spec(spec, context=256):
    return replace(spec, vocab_size=258, max_context=context, bos_id=BOS)


@pytest.mark.parametrize("name", ["mimo", "mimo-moe", "mimo-gated", "gemma", "qwen"])
@pytest.mark.parametrize("mixed", [False, True])
def test_streamed_perplexity_equals_the_oracle(name, mixed):
    quant = QuantSpec(TensorQuant(8, 32), TensorQuant(4, 32), None, TensorQuant(4, 32)) if mixed else QuantSpec()
    spec = ALL[name]
    source = RandomSource(spec)
    texts = [torch.randint(spec.vocab_size, (t,)) for t in (23, 11)]

    class Whole:
        def get(self, param):
            kind = "head" if param == "head" else next(p.kind for p in parameters(spec) if p.name == param)
            name = "embed" if param == "head" and spec.tied else param
            return restored(source.read(name), quant.of(kind), param, quantize_rows)

        def rows(self, param, index):
            return self.get(param)[index]

    weights = LayerWeights(spec, source, quantize_rows, quant)
    states = hidden_states(spec, weights, texts, lambda done, total: None)
    for text, hidden in zip(texts, states, strict=True):
        out = oracle.forward(
            replace(spec, quant=quant), Whole(), text, torch.arange(len(text)), [None] * len(spec.layers)
        )
        expected = torch.nn.functional.cross_entropy(out.logits[:-1].double(), text[1:], reduction="none")
        nats = cross_entropy(spec, source, quantize_rows, quant.head, hidden[:-1], text[1:])
        assert torch.linalg.norm(nats - expected) <= 1e-5 * torch.linalg.norm(expected)


def test_the_head_is_taken_in_blocks(monkeypatch):
    spec = byte_spec(gemma_spec())
    source, hidden, targets = RandomSource(spec), torch.randn(9, spec.hidden_size) * 30, torch.randint(258, (9,))
    whole = cross_entropy(spec, source, quantize_rows, TensorQuant(4, 32), hidden, targets)
    monkeypatch.setattr("mimo_edge.export.quantize.perplexity._HEAD_BYTES", 7 * 4 * spec.hidden_size)
    source.largest = 0
    blocks = cross_entropy(spec, source, quantize_rows, TensorQuant(4, 32), hidden, targets)
    assert source.largest == 7 * 4 * spec.hidden_size
    assert torch.linalg.norm(whole - blocks) <= 1e-5 * torch.linalg.norm(whole)  # NaN and Inf fail too


def test_a_layer_too_large_to_keep_gives_the_same(monkeypatch):
    spec = mimo_spec(moe=True)
    source, text = RandomSource(spec), [torch.arange(30)]
    kept = hidden_states(spec, LayerWeights(spec, source, quantize_rows, QuantSpec()), text, lambda *_: None)
    monkeypatch.setattr("mimo_edge.export.quantize.perplexity._LAYER_BYTES", 0)
    weights = LayerWeights(spec, source, quantize_rows, QuantSpec())
    assert torch.equal(kept[0], hidden_states(spec, weights, text, lambda *_: None)[0]) and not weights._held


# The choice


def loss_model(monkeypatch, cost):
    """Replaces the measurement: a candidate loses the sum of `cost[kind, bits]` (nats) over its kinds."""

    def nats(self, quant):
        total = sum(cost.get((k, q.bits), 0) for k in choosing.KINDS if (q := quant.of(k)))
        return {"prose": 3 + total, "docs": 2 + total / 2}

    monkeypatch.setattr(choosing._Meter, "_nats", nats)


def chosen(spec, budget=0.06):
    source = RandomSource(spec)
    tokenizer = byte_tokenizer().to_str()
    return choose(spec, source, tokenizer, budget=budget, method=quantize_rows, progress=lambda *_: None)


def by_bits(report):
    return tuple(report.quant.of(kind) and report.quant.of(kind).bits for kind in choosing.KINDS)


@pytest.mark.parametrize(
    ("cost", "bits"),
    [
        ({}, (4, 4, 4, 4)),
        ({("ffn", 4): 0.2}, (4, 8, 4, 4)),
        ({("head", 4): 0.2}, (4, 4, 4, 8)),
        ({("embedding", 4): 0.2}, (4, 4, 8, 4)),
        ({("attention", 4): 0.04, ("ffn", 4): 0.04}, (8, 4, 4, 4)),  # one of the two fits; ffn is larger
        ({(k, 4): 0.2 for k in choosing.KINDS}, (8, 8, 8, 8)),
    ],
)
def test_cheapest_mixture_within_the_budget(monkeypatch, cost, bits):
    loss_model(monkeypatch, cost)
    report = chosen(byte_spec(qwen_spec()))
    assert by_bits(report) == bits
    final = next(m for m in report.measured if m.quant == report.quant)
    assert final.worst <= 0.06 and "within the budget of 6.0%" in report.reason and label(report.quant) in report.reason


def test_a_tied_head_may_be_cheaper_than_its_embedding(monkeypatch):
    loss_model(monkeypatch, {("embedding", 4): 0.2})
    spec = byte_spec(gemma_spec())
    report = chosen(spec)
    assert by_bits(report) == (4, 4, 8, 4) and replace(spec, quant=report.quant).separate_head
    loss_model(monkeypatch, {("head", 4): 0.2})
    report = chosen(spec)
    assert by_bits(report) == (4, 4, 8, 8), "one table of 8 bits is read once and stored once"
    assert not replace(spec, quant=report.quant).separate_head


def test_sums_that_promise_too_much_are_measured(monkeypatch):
    """All in 4 bits loses more than its parts: the first promising mixture fails and the next is taken."""
    loss_model(monkeypatch, {("attention", 4): 0.02, ("ffn", 4): 0.02, ("head", 4): 0.2})
    honest = choosing._Meter._nats

    def nats(self, quant):
        both = quant.attention and quant.ffn and quant.attention.bits == quant.ffn.bits == 4
        return {text: n + 0.3 * bool(both) for text, n in honest(self, quant).items()}

    monkeypatch.setattr(choosing._Meter, "_nats", nats)
    report = chosen(byte_spec(qwen_spec()))
    assert by_bits(report) == (8, 4, 4, 8)


def test_no_candidate_within_the_budget_warns(monkeypatch, caplog):
    loss_model(monkeypatch, {(k, b): 0.2 / b for k in choosing.KINDS for b in (4, 8)})
    with caplog.at_level(logging.INFO):
        report = chosen(byte_spec(qwen_spec()))
    assert by_bits(report) == (8, 8, 8, 8)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.getMessage() == report.reason
    assert "is within the budget of 6.0%" in report.reason


def test_large_models_try_coarse_groups_first(monkeypatch):
    spec = byte_spec(replace(qwen_spec(), hidden_size=128))
    spec = replace(spec, ffn={"dense": replace(spec.ffn["dense"], intermediate=192)}, attention=wide(spec))
    monkeypatch.setattr(choosing, "LARGE_MODEL", 1000)
    loss_model(monkeypatch, {})
    report = chosen(spec)
    assert [q.group for q in (report.quant.attention, report.quant.ffn, report.quant.head)] == [128, 64, 128]
    assert report.tokens == {"prose": 256, "docs": 256}
    monkeypatch.undo()
    loss_model(monkeypatch, {})
    assert chosen(spec).quant == QuantSpec(*[TensorQuant(4, 32)] * 4)


def wide(spec):
    return {kind: replace(a, heads=4, head_dim=32, v_head_dim=32, rotary_dim=32) for kind, a in spec.attention.items()}


def test_kinds_that_no_group_divides_stay_float(monkeypatch):
    loss_model(monkeypatch, {})
    spec = byte_spec(qwen_spec())
    spec = replace(spec, ffn={"dense": replace(spec.ffn["dense"], intermediate=50)})
    report = chosen(spec)
    assert by_bits(report) == (4, None, 4, 4) and "ffn float" in report.reason


def test_measured_for_real_on_a_random_model():
    """What a random model loses is random too, so any loss is within this budget, and only 4 bits are told from 8."""
    spec = byte_spec(mimo_spec(), context=60)
    source, steps = RandomSource(spec), []
    report = choose(
        spec, source, byte_tokenizer().to_str(), budget=1e9, method=quantize_rows, progress=lambda *s: steps.append(s)
    )
    assert report.tokens == {"prose": 60, "docs": 60}  # the context of this model
    assert steps[0] == (1, 5, "measuring attention float, ffn float, embedding float, head float")
    assert report.quant == QuantSpec(*[TensorQuant(4, 32)] * 4) and len(report.measured) == 1
    assert report.perplexity["prose"] > 100  # a random model knows nothing of 258 bytes
    meter = choosing._Meter(
        choosing.Uncalibrated(spec, source, quantize_rows),
        choosing.measuring_texts(spec, byte_tokenizer().to_str()),
        print,
    )
    four, eight = (meter.measure(QuantSpec(*[TensorQuant(bits, 32)] * 4)) for bits in (4, 8))
    assert four == report.measured[0] and eight.read_bytes > four.read_bytes and eight.stored_bytes > four.stored_bytes
    assert all(0 < abs(loss) < 0.1 for loss in eight.losses.values()) and all(four.losses.values())
    data = json.loads(json.dumps(report.to_json()))
    assert data["measured"][0]["losses"].keys() == {"prose", "docs"} and data["quant"]["head"]["bits"] in (4, 8)


@pytest.mark.parametrize("budget", [-0.01, float("nan")], ids=str)
def test_budgets_that_mean_nothing(budget):
    with pytest.raises(BadInputError, match="quality budget"):
        chosen(byte_spec(qwen_spec()), budget)


def test_texts_are_long_enough_and_ascii():
    for name in choosing.TEXTS:
        text = choosing.resources.files("mimo_edge.export.quantize").joinpath(f"texts/{name}.txt").read_text("ascii")
        assert len(text.split()) > 700


# Bytes


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("head_bits", [4, 8])
def test_bytes_read_a_token(name, head_bits):
    quant = QuantSpec(TensorQuant(4, 32), TensorQuant(4, 32), TensorQuant(8, 32), TensorQuant(head_bits, 32))
    spec = replace(ALL[name], quant=quant)
    head = "head." if spec.separate_head else "embed."
    expected = 0
    for s in stored_tensors(spec):
        if s.name.startswith(("layers.", "norm", head)):
            expected += s.nbytes // 2 if ".experts." in s.name else s.nbytes  # 2 of 4 experts
    assert read_bytes(spec) == expected
    with_heads = replace(spec, mtp=MtpSpec(2, *(spec.layers[0].attention, spec.layers[0].ffn)))
    assert read_bytes(with_heads) == expected


def test_worst_loss():
    assert Measured(QuantSpec(), 1, 1, {"a": 0.01, "b": 0.02}).worst == 0.02
