"""The TensorRT form: valid ONNX without functions or weights, and equal to the oracle when onnx.reference runs it."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from specs import ALL
from tiny_weights import INT4, WEIGHTS, quantised, write_weights

from mimo_edge.backends import oracle
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.export.graph.reference_ops import REFERENCE_OPS
from mimo_edge.export.graph.tensorrt import emit_tensorrt
from mimo_edge.params import parameters
from mimo_edge.spec import QuantSpec, TensorQuant
from mimo_edge.tensors import read_tensors

MIXED = QuantSpec(TensorQuant(8, 32), TensorQuant(4, 32), TensorQuant(8, 32), TensorQuant(4, 32))
NUMPY = {onnx.TensorProto.FLOAT16: np.float16, onnx.TensorProto.FLOAT: np.float32}
BLOCK, PAGES, SEQUENCES = 5, 9, 3


def bind(model, stored):
    """Weights for the graph's inputs: the bundle's bytes as INT8, its floats in the type that the graph asks for."""
    feeds = {}
    for i in model.graph.input:
        if i.name in stored:
            array = np.array(stored[i.name])
            element = i.type.tensor_type.elem_type
            feeds[i.name] = array.view(np.int8) if element == onnx.TensorProto.INT8 else array.astype(NUMPY[element])
    return feeds


class Runner:
    """The form under onnx.reference with pools of its own; free slots hold NaN."""

    def __init__(self, spec, folder, dtype):
        write_weights(spec, folder)
        stored = read_tensors(folder / WEIGHTS)
        self.spec, self.weights = spec, BundleWeights(spec, stored, keep=True)
        self.model = emit_tensorrt(spec, dtype)
        self.evaluator = ReferenceEvaluator(self.model, new_ops=REFERENCE_OPS)
        self.feeds = bind(self.model, stored)
        self.ring = max(a.window or 1 for a in spec.attention.values()) + 3
        for i in range(len(spec.layers)):
            a = spec.attention_of(i)
            shape = (PAGES, BLOCK) if a.window is None else (SEQUENCES, self.ring)
            for part, dim in (("k", a.head_dim), ("v", a.v_head_dim)):
                self.feeds[f"{part}_pool.{i}"] = np.full((*shape, a.kv_heads, dim), np.nan, dtype)

    def step(self, tokens, positions, sequences, lengths, pages, rings, logit_rows):
        ints = {
            "tokens": tokens, "positions": positions, "sequences": sequences, "lengths": lengths, "pages": pages,
            "rings": rings, "logit_rows": logit_rows,
        }  # fmt: skip
        names = {i.name for i in self.model.graph.input}
        feeds = self.feeds | {k: np.asarray(v, np.int32) for k, v in ints.items() if k in names}
        outputs = dict(zip(self.evaluator.output_names, self.evaluator.run(None, feeds), strict=True))
        for name in outputs:
            if name != "logits":
                self.feeds[name.removeprefix("new_")] = outputs[name]
        return outputs["logits"]

    def whole(self, tokens):
        positions, past = torch.arange(len(tokens)), [None] * len(self.spec.layers)
        return oracle.forward(self.spec, self.weights, torch.from_numpy(tokens), positions, past).logits.numpy()


def error(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def two_sequences(runner, seed=0):
    """Prefill of two sequences in one step with padding between them, decode of both, then a chunk of one."""
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(0, runner.spec.vocab_size, n) for n in (17, 12))
    tables = {"pages": [[7, 2, 0, 5], [8, 3, 1, 4]], "rings": [[2], [0]]}
    padded = [3, *a[:9], 1, *b[:11], 0]
    positions = [-1, *range(9), -1, *range(11), -1]
    owners = [0, *[0] * 9, 1, *[1] * 11, 0]
    rows = [i for i, p in enumerate(positions) if p >= 0]
    got = [runner.step(padded, positions, owners, [0, 0], **tables, logit_rows=rows)]
    got.append(runner.step([a[9], b[11]], [9, 11], [0, 1], [9, 11], **tables, logit_rows=[1, 0]))
    got.append(runner.step(a[10:], range(10, 17), [0] * 7, [10, 12], **tables, logit_rows=range(7)))
    want_a, want_b = runner.whole(a), runner.whole(b)
    want = [want_a[:9], want_b[:11], want_b[11:], want_a[9:10], want_a[10:]]
    return np.concatenate(got), np.concatenate(want)


@pytest.mark.parametrize("quant", [QuantSpec(), INT4, MIXED], ids=["float", "int4", "mixed"])
@pytest.mark.parametrize("name", ALL)
def test_float32_equals_the_oracle(name, quant, tmp_path):
    runner = Runner(quantised(ALL[name], quant), tmp_path, "float32")
    got, want = two_sequences(runner)
    assert error(got, want) < 1e-5


@pytest.mark.parametrize("name", ["mimo", "mimo-moe", "gemma", "qwen"])
def test_float16_is_close_to_the_oracle(name, tmp_path):
    got, want = two_sequences(Runner(quantised(ALL[name]), tmp_path, "float16"))
    assert 1e-5 < error(got, want) < 2e-2


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ALL)
def test_checker_with_shape_inference_knows_every_value(name, dtype):
    for quant in (QuantSpec(), INT4):
        model = emit_tensorrt(quantised(ALL[name], quant), dtype)
        onnx.checker.check_model(model, full_check=True)
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
        known = {v.name for v in [*inferred.graph.value_info, *inferred.graph.output]}
        assert known >= {o for n in inferred.graph.node for o in n.output}


@pytest.mark.parametrize("name", ALL)
def test_holds_no_weights_no_functions_and_old_opsets_only(name):
    spec = quantised(ALL[name])
    model = emit_tensorrt(spec)
    assert not model.functions
    assert {o.domain: o.version for o in model.opset_import} == {"": 20, "mimo": 1}
    assert sum(len(t.raw_data) for t in model.graph.initializer) < 2000
    inputs = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    for p in parameters(spec):
        quantised_kind = spec.quant.of(p.kind) is not None
        assert (f"{p.name}.q" if quantised_kind else p.name) in inputs
        if quantised_kind:
            assert inputs[f"{p.name}.q"] == inputs[f"{p.name}.zeros"] == onnx.TensorProto.INT8
    assert onnx.TensorProto.UINT8 not in inputs.values()


def test_wrong_shapes_are_found_by_the_ops_inference():
    model = emit_tensorrt(quantised(ALL["qwen"]))
    q = next(i for i in model.graph.input if i.name == "layers.0.down.q")
    q.type.tensor_type.shape.dim[1].dim_value += 1
    with pytest.raises(ValueError, match="rows of 64 times weights of 96 columns"):
        onnx.checker.check_model(model, full_check=True)


def test_gated_feed_forward_is_one_op_and_gates_matter(tmp_path):
    spec = quantised(ALL["mimo-gated"])
    runner = Runner(spec, tmp_path, "float32")
    assert [n.op_type for n in runner.model.graph.node].count("SparseFfn") == len(spec.layers)
    got, _ = two_sequences(runner)
    gated = [name for name in runner.feeds if name.endswith("gate.bias")]
    for name in gated:
        runner.feeds[name] = np.full_like(runner.feeds[name], 1e3)  # every block kept
    assert len(gated) == len(spec.layers) and error(two_sequences(runner)[0], got) > 1e-2


def test_attributes_of_the_attention_reach_the_op():
    spec = ALL["gemma"]
    model = emit_tensorrt(replace(spec, norm_eps=0.125))
    nodes = [n for n in model.graph.node if n.op_type == "WindowedAttention"]
    for i, node in enumerate(nodes):
        a = spec.attention_of(i)
        values = {x.name: onnx.helper.get_attribute_value(x) for x in node.attribute}
        assert values["window"] == (a.window or 0) and values["heads"] == a.heads and values["eps"] == 0.125
        assert node.input[6] == ("pages" if a.window is None else "rings")
    assert len(nodes) == len(spec.layers)
