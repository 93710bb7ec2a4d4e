"""Graphs of MTP heads: valid, their own weights by reference, no copy of the past; hidden states of the model's."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from heads import HEADS
from rows import error
from specs import mimo_spec
from tiny_weights import INT4, WEIGHTS, quantised, write_weights

from mimo_edge.backends import oracle
from mimo_edge.export.graph.cpu import emit_graphs
from mimo_edge.kv.windows import past_mask
from mimo_edge.params import mtp_params
from mimo_edge.spec import QuantSpec


def emit(spec, folder):
    """Name -> graph, all saved; header and oracle weights."""
    header, weights = write_weights(spec, folder)
    graphs = dict(emit_graphs(spec, header, "model.onnx", accuracy_level=1))
    for name, graph in graphs.items():
        onnx.save(graph, folder / name)
    return graphs, header, weights


@pytest.mark.parametrize("name", HEADS)
def test_onnx_checker_with_shape_inference(name, tmp_path):
    for quant in (QuantSpec(), INT4):
        graphs = emit(quantised(HEADS[name], quant), tmp_path)[0]
        assert len(graphs) == 1 + HEADS[name].mtp.heads
        for file in graphs:
            onnx.checker.check_model(tmp_path / file, full_check=True)


@pytest.mark.parametrize("name", HEADS)
def test_the_past_is_read_by_products_alone(name, tmp_path):
    graphs = emit(HEADS[name], tmp_path)[0]
    past = {"past_k", "past_v"}
    for graph in [g for file, g in graphs.items() if "mtp" in file]:
        assert past < {i.name for i in graph.graph.input}
        assert {n.op_type for n in graph.graph.node if past & set(n.input)} == {"FusedMatMul", "Shape"}


@pytest.mark.parametrize("quant", [QuantSpec(), INT4], ids=["float", "int4"])
def test_a_head_reads_its_own_weights_embedding_and_head_and_nothing_else(quant, tmp_path):
    spec = quantised(mimo_spec(mtp=3), quant)
    graphs, header, _ = emit(spec, tmp_path)
    shared = {n for n in header if n.split(".")[0] in ("embed", "head")}
    for m in range(3):
        own = {n for n in header if n.removesuffix(".q").startswith(f"mtp.{m}.")}
        assert len(own) >= len(mtp_params(spec, m))
        where = [{e.key: e.value for e in t.external_data} for t in graphs[f"model.mtp{m}.onnx"].graph.initializer]
        read = {(int(w["offset"]), int(w["length"])) for w in where if w}
        assert {w["location"] for w in where if w} == {WEIGHTS}
        assert read == {(header[n].offset, header[n].nbytes) for n in own | shared}


@pytest.mark.parametrize("name", ["mimo", "gemma"])
def test_the_model_gives_hidden_states_of_all_rows_beside_the_logits_wanted(name, tmp_path):
    spec = quantised(HEADS[name])
    _, _, weights = emit(spec, tmp_path)
    session = ort.InferenceSession(tmp_path / "model.onnx")
    tokens, positions = np.random.default_rng(1).integers(0, spec.vocab_size, 9), np.arange(9)
    feeds = {"tokens": tokens, "positions": positions, "logit_rows": np.array([8])}
    for i, layer in enumerate(spec.layers):
        a = spec.attention[layer.attention]
        feeds[f"past_k.{i}"] = np.zeros((0, a.kv_heads, a.head_dim), np.float32)
        feeds[f"past_v.{i}"] = np.zeros((0, a.kv_heads, a.v_head_dim), np.float32)
        feeds[f"mask.{layer.attention}"] = np.where(past_mask(positions, positions, a.window), 0, -np.inf).astype("f4")
    logits, hidden = session.run(["logits", "hidden"], feeds)
    want = oracle.forward(
        spec, weights, torch.from_numpy(tokens), torch.from_numpy(positions), [None] * len(spec.layers)
    )
    assert error(logits, want.logits.numpy()[8:]) < 1e-5 and error(hidden, want.hidden.numpy()) < 1e-5


def test_a_model_without_heads_gives_none(tmp_path):
    (graph,) = emit(mimo_spec(), tmp_path)[0].values()
    assert "hidden" not in {o.name for o in graph.graph.output}
