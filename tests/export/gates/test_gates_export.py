"""The whole way: calibration text, gates, curve, bundle, and the same logits from ONNX Runtime as from the oracle."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import BOS, EOS, TEMPLATE, byte_tokenizer
from rows import error, feed, whole
from specs import RandomWeights, gemma_spec, mimo_spec

from mimo_edge.backends.onnxruntime import FLOAT_MODEL, OnnxRuntimeBackend
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.bundle import WEIGHTS, read_tensors
from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export import pipeline
from mimo_edge.export.families import Checkpoint
from mimo_edge.export.gates import GateRequest, add
from mimo_edge.export.gates.add import SHARES, gated_spec
from mimo_edge.export.gates.calibrate import Prepared, head_of
from mimo_edge.export.gates.curve import AtK, CurvePoint, Measured, Meter, gate_visit, layer_uses, oracle_visit
from mimo_edge.export.gates.source import Gate, GatedSource
from mimo_edge.export.pipeline import GATES, export_bundle, uniform
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.pools import KvPools
from mimo_edge.params import parameters
from mimo_edge.spec import FeedForwardSpec, GateSpec, MtpSpec

WORDS = ["the", "old", "lighthouse", "stood", "over", "a", "calm", "sea", "while", "gulls", "turned", "above", "it"]
SMALL = replace(
    gemma_spec(),
    vocab_size=258,
    bos_id=BOS,
    eos_ids=(EOS,),
    hidden_size=64,
    ffn={"dense": FeedForwardSpec(256, "silu")},
)


class Source:
    def __init__(self, spec, seed=0):
        self.weights = RandomWeights(spec, seed)

    def read(self, name, start=0, stop=None):
        return self.weights.get(name)[start:stop].numpy().copy()


def checkpoint(spec=SMALL):
    return Checkpoint(spec, Source(spec), byte_tokenizer().to_str(), TEMPLATE, "tiny")


@pytest.fixture
def calib(tmp_path):
    """JSON lines of some 2,000 tokens."""
    rng = np.random.default_rng(1)
    lines = [json.dumps({"text": " ".join(rng.choice(WORDS, 40))}) for _ in range(10)]
    (tmp_path / "calib.jsonl").write_text("\n".join(lines))
    return tmp_path / "calib.jsonl"


@pytest.fixture
def export(tmp_path, calib, monkeypatch):
    """Exports SMALL to tmp_path/b."""
    monkeypatch.setattr(pipeline, "open_checkpoint", lambda src: checkpoint(run.spec))

    def run(request, out="b", **options):
        return export_bundle("src", tmp_path / out, gates=request, **({"calib": calib, "quant": uniform()} | options))

    run.spec = SMALL
    return run


def test_export_with_a_share_and_onnxruntime_equals_the_oracle(export):
    steps = []
    bundle = export(GateRequest(32, skip=0.3), progress=lambda *s: steps.append(s))
    f = bundle.spec.ffn["dense"]
    assert f.gate is not None and f.gate.block == 32
    report = json.loads(bundle.file(GATES).read_text())
    assert (report["block"], report["rank"]) == (32, f.gate.rank) and 0 < report["byte_share"] < 0.05
    assert [p["asked"] for p in report["curve"]] == list(SHARES) and report["chosen"]["asked"] == 0.3
    for p in report["curve"]:
        for kind in ("gate", "oracle"):
            assert abs(p[kind]["skipped"] - p["asked"]) < 0.2, "thresholds come from other text"
    assert len(report["layers"]) == 4 and set(report["chosen"]["gate"]["losses"]) == {"prose", "docs"}
    skipped = np.mean([layer["skipped"] for layer in report["layers"]])
    assert skipped == pytest.approx(report["chosen"]["gate"]["skipped"], abs=1e-6)
    assert {what.split(":")[0] for *_, what in steps} >= {"gates", "weights"}

    weights = BundleWeights(bundle.spec, read_tensors(bundle.file(WEIGHTS)), keep=True)
    backend = OnnxRuntimeBackend(bundle.spec, bundle.file(FLOAT_MODEL), threads=1)
    layout = plan_layout(bundle.spec, 64, sequences=1, page_size=5)
    backend.allocate(layout)
    tokens = np.random.default_rng().integers(0, 258, 33)
    got = feed(backend, KvPools(layout).admit(33), tokens, [9, 1, 1, 22])
    want = whole(bundle.spec, weights, tokens)
    assert error(got, want) < 1e-4
    dense = replace(bundle.spec, ffn={"dense": replace(f, gate=None)})
    assert error(want, whole(dense, weights, tokens)) > 0.01, "something is skipped"


def test_the_bundle_holds_the_checkpoints_weights_in_another_order(export):
    bundle = export(GateRequest(16, skip=0.5), quant=uniform(8))
    weights = BundleWeights(bundle.spec, read_tensors(bundle.file(WEIGHTS)))
    source = Source(SMALL)
    for i in range(4):
        got, want = weights.get(f"layers.{i}.gate_up").numpy(), source.read(f"layers.{i}.gate_up")
        order = np.abs(got[:256, None] - want[None, :256]).sum(-1).argmin(1)
        assert sorted(order) == list(range(256)) and not np.array_equal(order, np.arange(256))
        assert error(got, np.concatenate([want[:256][order], want[256:][order]])) < 0.02
        assert error(weights.get(f"layers.{i}.down").numpy(), source.read(f"layers.{i}.down")[:, order]) < 0.02


def test_the_same_text_gives_the_same_bundle(export):
    prints = [export(GateRequest(32, skip=0.3), out).fingerprint for out in ("a", "b")]
    assert prints[0] == prints[1]


def square(share):
    """A point that loses share^2 with gates."""
    return CurvePoint(share, Measured(share, {"a": share**2, "b": 0.0}), Measured(share, {"a": 0.0, "b": 0.0}))


@pytest.mark.parametrize(("most", "asked"), [(0.1601, 0.4), (0.2, 0.4375), (0.0101, 0.1), (0.9, 0.8)])
def test_the_most_skipped_within_a_loss(most, asked):
    request, steps = GateRequest(32, max_loss=most), []
    points = add._curve(square, request, lambda *s: steps.append(s))
    assert add._chosen(points, request).asked == pytest.approx(asked)
    assert [p.asked for p in points] == sorted(p.asked for p in points) and {0.1, 0.8} <= {p.asked for p in points}
    assert [done for done, *_ in steps] == list(range(1, len(points) + 1))


def test_a_loss_that_every_share_exceeds():
    request = GateRequest(32, max_loss=0.005)
    with pytest.raises(BadInputError, match=r"--gate-loss 0\.005: skipping 10\.0% loses 1\.0% already: allow more"):
        add._chosen([square(s) for s in SHARES], request)
    points = add._curve(square, request, lambda *_: None)  # a smaller share than the first is tried
    assert add._chosen(points, request).asked == pytest.approx(0.0625)


def test_a_share_asked_for_is_one_of_the_points():
    request = GateRequest(32, skip=0.25)
    points = add._curve(square, request, lambda *_: None)
    assert add._chosen(points, request) == square(0.25) and len(points) == len(SHARES) + 1


def test_heads_keep_a_feed_forward_without_gates():
    spec = replace(SMALL, mtp=MtpSpec(2, "window", "dense"))
    gated = gated_spec(spec, GateSpec(32, 2))
    names = [p.name for p in parameters(gated)]
    assert "layers.3.gate.w1" in names and not any(n.startswith("mtp") and ".gate." in n for n in names)
    assert gated.mtp is not None and gated.ffn[gated.mtp.ffn] == spec.ffn["dense"]
    own = replace(SMALL, ffn={**SMALL.ffn, "mtp": FeedForwardSpec(32)}, mtp=MtpSpec(2, "window", "mtp"))
    assert gated_spec(own, GateSpec(32, 2)).mtp == own.mtp


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GateRequest(32), "say how much to skip"),
        (lambda: GateRequest(32, 0.2, 0.1), "say how much to skip"),
        (lambda: GateRequest(32, 0.0), "--skip 0.0: a share of feed-forward work, above 0 and at most 0.8"),
        (lambda: GateRequest(32, 0.81), "--skip 0.81"),
        (lambda: GateRequest(32, float("nan")), "--skip nan"),
        (lambda: GateRequest(32, max_loss=-0.1), "--gate-loss -0.1"),
        (lambda: GateRequest(32, max_loss=float("inf")), "--gate-loss inf"),
    ],
)
def test_requests_that_cannot_be(make, message):
    with pytest.raises(BadInputError, match=message) as e:
        make()
    assert "\n" not in str(e.value)


def test_exports_that_cannot_have_gates(export, tmp_path):
    request = GateRequest(32, skip=0.3)
    with pytest.raises(BadInputError, match=r"gates are trained on calibration text: give it with --calib FILE\.jsonl"):
        export(request, calib=None)
    export.spec = replace(mimo_spec(moe=True), vocab_size=258, bos_id=BOS, eos_ids=(EOS,))
    with pytest.raises(UnsupportedError, match="layer 3 has a mixture of experts"):
        export(request)
    export.spec = replace(SMALL, ffn={"dense": FeedForwardSpec(256, gate=GateSpec(32, 2))})
    with pytest.raises(UnsupportedError, match="has a gate already"):
        export(request)
    export.spec = SMALL
    assert [p.name for p in tmp_path.iterdir()] == ["calib.jsonl"]
    bundle = export(None)
    with pytest.raises(BadInputError, match="is a bundle, which is copied as it is"):
        export_bundle(bundle.path, tmp_path / "again", gates=request)


# The curve


def kept(spec, gates_per_layer):
    """Prepared without reordering, under plain lengths, and gates as given."""
    orders = {i: np.arange(spec.ffn_of(i).intermediate) for i in range(len(spec.layers))}
    eye = [torch.eye(spec.hidden_size)] * len(spec.layers)
    return Prepared(32, eye, orders, torch.linspace(0, 1, 101)), dict(enumerate(gates_per_layer))


def constant_gate(keep):
    """Keeps the blocks named, in every row."""
    bias = np.full(8, -1.0, np.float32)
    bias[keep] = 1
    return Gate(np.zeros((1, 64), np.float32), np.zeros((8, 1), np.float32), bias)


def test_gates_that_keep_everything_lose_nothing_and_shares_count_work():
    source = Source(SMALL)
    texts = {"a": torch.randint(0, 258, (21,)), "b": torch.randint(0, 258, (34,))}
    meter = Meter(SMALL, source, texts)
    everything = meter.measure(source, gate_visit(dict.fromkeys(range(4), constant_gate(slice(None)))))
    assert everything.skipped == 0 and all(abs(x) < 1e-6 for x in everything.losses.values())
    uneven = [constant_gate(list(range(n))) for n in (8, 6, 4, 0)]
    measured = meter.measure(source, gate_visit(dict(enumerate(uneven))))
    assert measured.skipped == pytest.approx((0 + 2 + 4 + 8) / 32) and measured.worst != 0
    assert Measured(0.5, {"a": 0.1, "b": -0.2}).worst == 0.1


def test_the_meter_is_the_bundles_own_arithmetic():
    """The gated model run by the oracle has the perplexity that the curve shows."""
    gates = dict(enumerate(constant_gate([0, 2, 5]) for _ in range(4)))
    prepared, _ = kept(SMALL, [])
    source = GatedSource(Source(SMALL), prepared.orders, gates)
    text = torch.randint(0, 258, (40,))
    meter = Meter(SMALL, source, {"a": text})
    loss = meter.measure(source, gate_visit(gates)).losses["a"]

    class Weights:
        def get(self, name):
            return torch.from_numpy(source.read(name))

        def rows(self, name, index):
            return self.get(name)[index]

    nats = []
    for spec in (SMALL, gated_spec(SMALL, GateSpec(32, 1))):
        logits = torch.from_numpy(whole(spec, Weights(), text.numpy()))
        nats.append(torch.nn.functional.cross_entropy(logits[:-1], text[1:]))
    assert float((nats[1] - nats[0]).exp() - 1) == pytest.approx(loss, abs=1e-5)


def test_uses_of_a_layer_by_hand():
    source, text = Source(SMALL), torch.randint(0, 258, (30,))
    prepared, gates = kept(SMALL, [constant_gate([1, 3]) for _ in range(4)])
    uses = layer_uses(SMALL, source, prepared, gates, 0.0, {"a": text[:13], "b": text[13:]})
    for use in uses:  # a price of 0: the oracle keeps everything
        assert (use.skipped, use.union2, use.union4) == (0.75, 0.25, 0.25) and use.agreement == 1
        assert 0 < use.recall < 1
        assert use.at_k == tuple(AtK(k, 1.0, k / 8) for k in (1, 2, 4, 6))
    nothing = layer_uses(SMALL, source, prepared, gates, 1.0, {"a": text[:3]})
    assert all(u.agreement == 0 and u.at_k[0] == AtK(1, 0.0, 1.0) for u in nothing) and nothing[0].union4 == 0.25


def test_the_oracle_keeps_what_is_above_the_price():
    prepared, _ = kept(SMALL, [])

    class Ffn:
        i = 0

    object.__setattr__(prepared, "importance", lambda ffn: torch.tensor([[0.2, 0.4, 0.6]]))
    assert oracle_visit(prepared, 0.5)(Ffn()).tolist() == [[0, 0, 1]]


def test_rows_are_taken_from_the_front():
    texts = [torch.arange(5), torch.arange(7), torch.arange(9)]
    assert [len(t) for t in head_of(texts, 8)] == [5, 3]
    assert [len(t) for t in head_of(texts, 100)] == [5, 7, 9]
