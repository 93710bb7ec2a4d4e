"""The CPU form: valid ONNX, equal to the oracle with and without a past, weights by reference, no copy of the past."""

import math
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from specs import ALL, gemma_spec, mimo_spec, qwen_spec
from tiny_weights import INT4, WEIGHTS, quantised, write_weights

from mimo_edge.backends import oracle
from mimo_edge.export.graph import cpu_weights
from mimo_edge.export.graph.cpu import emit_cpu
from mimo_edge.kernels.int4_linear.reference import dequantize
from mimo_edge.kv.windows import past_mask
from mimo_edge.spec import QuantSpec, RopeScaling, TensorQuant
from mimo_edge.tensors import read_tensors

FLOAT = QuantSpec()
INT8 = QuantSpec(*[TensorQuant(8, 32)] * 4)
MIXED = QuantSpec(TensorQuant(8, 32), None, TensorQuant(8, 32), TensorQuant(4, 32))


def with_attention(spec, **changes):
    return replace(spec, attention={k: replace(a, **changes) for k, a in spec.attention.items()})


SPECS = ALL | {
    "no-groups": with_attention(qwen_spec(), kv_heads=4),
    "no-rotation": with_attention(qwen_spec(), rotary_dim=0),
    "norms-without-rotation": with_attention(gemma_spec(), rotary_dim=0),
    "linear-scaling": with_attention(qwen_spec(), rope_scaling=RopeScaling("linear", 8.0)),
    "llama3-scaling": with_attention(qwen_spec(), rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 64)),
    "one-layer": qwen_spec(layers=1),
}


def emit(spec, folder, accuracy_level=1):
    """Session, model and oracle weights of `spec`; 96 hidden make an odd number of groups, so zeros end on a nibble."""
    header, weights = write_weights(spec, folder)
    model = emit_cpu(spec, header, accuracy_level)
    onnx.save(model, folder / "model.onnx")
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return ort.InferenceSession(folder / "model.onnx", options), model, weights


def wide(spec, quant):
    return replace(quantised(spec, quant), hidden_size=96)


def random_past(spec, rng, start):
    """Random rows at scattered positions below `start`, as a ring would hold them."""
    past = []
    held = {kind: rng.permutation(start)[: max(1, start - 3)] for kind in spec.attention}
    for layer in spec.layers:
        a, positions = spec.attention[layer.attention], held[layer.attention]
        k = rng.standard_normal((len(positions), a.kv_heads, a.head_dim), np.float32)
        v = rng.standard_normal((len(positions), a.kv_heads, a.v_head_dim), np.float32)
        past.append(oracle.Past(torch.from_numpy(k), torch.from_numpy(v), torch.from_numpy(positions)))
    return past


def run_graph(spec, session, tokens, start, rows, past):
    positions = np.arange(start, start + len(tokens))
    feeds = {"tokens": tokens, "positions": positions, "logit_rows": rows}
    for i, layer in enumerate(spec.layers):
        p, a = past[i], spec.attention[layer.attention]
        seen = past_mask(positions, np.concatenate([p.positions.numpy(), positions]), a.window)
        feeds |= {f"past_k.{i}": p.k.numpy(), f"past_v.{i}": p.v.numpy()}
        feeds[f"mask.{layer.attention}"] = np.where(seen, 0, -np.inf).astype(np.float32)
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def error(a, b):
    b = b.numpy()
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def compare(spec, session, weights, rows=5, start=9, seed=1):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, spec.vocab_size, rows)
    wanted = rng.permutation(rows)[: max(1, rows - 2)]
    past = random_past(spec, rng, start) if start else [empty_past(spec, i) for i in range(len(spec.layers))]
    got = run_graph(spec, session, tokens, start, wanted, past)
    positions = torch.arange(start, start + rows)
    want = oracle.forward(spec, weights, torch.from_numpy(tokens), positions, past, torch.from_numpy(wanted))
    new = [e for i, (k, v) in enumerate(want.new) for e in (error(got[f"new_k.{i}"], k), error(got[f"new_v.{i}"], v))]
    return error(got["logits"], want.logits), max(new)


def empty_past(spec, i):
    a = spec.attention_of(i)
    return oracle.Past(
        torch.zeros(0, a.kv_heads, a.head_dim),
        torch.zeros(0, a.kv_heads, a.v_head_dim),
        torch.zeros(0, dtype=torch.int64),
    )


@pytest.mark.parametrize("quant", [FLOAT, INT4, INT8, MIXED], ids=["float", "int4", "int8", "mixed"])
@pytest.mark.parametrize("name", SPECS)
def test_equals_the_oracle(name, quant, tmp_path):
    spec = wide(SPECS[name], quant)
    session, _, weights = emit(spec, tmp_path)
    for rows, start in [(7, 0), (1, 1), (1, 9), (5, 9)]:
        assert max(compare(spec, session, weights, rows, start)) < 1e-5, (rows, start)


@pytest.mark.parametrize("name", SPECS)
def test_onnx_checker_with_shape_inference(name, tmp_path):
    for quant in (FLOAT, INT4):
        emit(wide(SPECS[name], quant), tmp_path)
        onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)


def test_8_bit_activations_are_close_and_not_exact(tmp_path):
    spec = wide(mimo_spec(), INT4)
    session, _, weights = emit(spec, tmp_path, accuracy_level=4)
    assert 1e-4 < compare(spec, session, weights)[0] < 0.1


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("groups", [3, 4])
def test_embedding_is_dequantised_exactly(bits, group, groups, tmp_path):
    quant = TensorQuant(bits, group)
    spec = replace(qwen_spec(1), hidden_size=groups * group, quant=QuantSpec(embedding=quant), embed_scale=1.0)
    header, _ = write_weights(spec, tmp_path)
    model = emit_cpu(spec, header)
    onnx.save(model, tmp_path / "model.onnx")
    onnx.utils.extract_model(tmp_path / "model.onnx", tmp_path / "lookup.onnx", ["tokens"], ["embed.rows"])
    tokens = np.array([0, spec.vocab_size - 1, 5, 5])
    (got,) = ort.InferenceSession(tmp_path / "lookup.onnx").run(None, {"tokens": tokens})
    parts = [
        torch.from_numpy(np.array(read_tensors(tmp_path / WEIGHTS)[f"embed.{p}"])) for p in ("q", "scales", "zeros")
    ]
    assert np.array_equal(got, dequantize(*parts, bits)[torch.from_numpy(tokens)].numpy())


@pytest.mark.parametrize("tied", [False, True])
def test_head_in_pieces_equals_the_head(tied, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_weights, "HEAD_PIECE_BYTES", 1000)
    spec = replace(wide(mimo_spec(), INT4), tied=tied)
    session, model, weights = emit(spec, tmp_path)
    products = [n for n in model.graph.node if n.op_type == "MatMulNBits" and n.name.startswith(("head.", "embed."))]
    assert len(products) > 2
    assert compare(spec, session, weights)[0] < 1e-5


@pytest.mark.parametrize("name", SPECS)
def test_the_past_is_read_by_products_alone(name, tmp_path):
    spec = SPECS[name]
    _, model, _ = emit(spec, tmp_path)
    past = {i.name for i in model.graph.input if i.name.startswith("past_")}
    assert len(past) == 2 * len(spec.layers)
    assert {n.op_type for n in model.graph.node if past & set(n.input)} == {"FusedMatMul", "Shape"}


@pytest.mark.parametrize("quant", [FLOAT, INT4], ids=["float", "int4"])
def test_every_stored_byte_is_referenced_and_none_is_inside_the_model(quant, tmp_path):
    spec = wide(replace(mimo_spec(moe=True, gate=True), tied=False), quant)
    header, _ = write_weights(spec, tmp_path)
    model = emit_cpu(spec, header)
    ranges = set()
    for t in model.graph.initializer:
        size = math.prod(t.dims) * (4 if t.data_type == onnx.TensorProto.FLOAT else 1)
        if t.data_location != onnx.TensorProto.EXTERNAL:
            assert math.prod(t.dims) < 64, t.name
            continue
        where = {e.key: e.value for e in t.external_data}
        assert where["location"] == WEIGHTS and int(where["length"]) == size
        ranges.add((int(where["offset"]), size))
    assert ranges == {(place.offset, place.nbytes) for place in header.values()}


def test_an_expert_that_no_row_uses_is_not_computed(tmp_path):
    spec = wide(mimo_spec(moe=True), INT4)
    header, weights = write_weights(spec, tmp_path)
    layer = next(i for i, kinds in enumerate(spec.layers) if kinds.ffn == "experts")
    stored = np.memmap(tmp_path / WEIGHTS, mode="r+")

    def overwrite(name, value):
        place = header[name]
        view = stored[place.offset : place.offset + place.nbytes].view("<f4")
        view[...] = value

    overwrite(f"layers.{layer}.router_bias", [5, 5, -1e9, -1e9])
    overwrite(f"layers.{layer}.experts.2.down.scales", np.nan)
    stored.flush()
    onnx.save(emit_cpu(spec, header, 1), tmp_path / "model.onnx")
    session = ort.InferenceSession(tmp_path / "model.onnx")
    assert max(compare(spec, session, weights)) < 1e-5
