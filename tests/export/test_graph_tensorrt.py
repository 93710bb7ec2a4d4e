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
from mimo_edge.backends.cuda_memory import read_places
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.errors import UnsupportedError
from mimo_edge.export.graph.reference_ops import REFERENCE_OPS
from mimo_edge.export.graph.schemas import op_of
from mimo_edge.export.graph.tensorrt import emit_tensorrt
from mimo_edge.export.programs import write_device_weights
from mimo_edge.spec import QuantSpec, TensorQuant
from mimo_edge.tensors import read_tensors
from mimo_edge.trt_plugins.ops import OPS

MIXED = QuantSpec(TensorQuant(8, 32), TensorQuant(4, 32), TensorQuant(8, 32), TensorQuant(4, 32))
SPECS = {name: spec for name, spec in ALL.items() if not any(f.moe for f in spec.ffn.values())}
NUMPY = {
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.INT8: np.dtype(np.int8),
}
PAGES, SEQUENCES = 9, 3


def weights_of(model, folder):
    """What the cuda backend would have on the device, as the graph's inputs."""
    places, data = read_places(folder / "weights.json"), (folder / "weights.bin").read_bytes()
    feeds = {}
    for i in model.graph.input:
        if i.name in places:
            offset, nbytes = places[i.name]
            shape = [d.dim_value for d in i.type.tensor_type.shape.dim]
            wanted = NUMPY[i.type.tensor_type.elem_type]
            stored = np.dtype(np.float16) if i.name.endswith(".scales") else wanted
            array = np.frombuffer(data, stored, nbytes // stored.itemsize, offset)
            feeds[i.name] = array.reshape(shape).astype(wanted)
    return feeds


class Runner:
    """The form under onnx.reference with pools of its own; free slots hold NaN."""

    def __init__(self, spec, folder, dtype):
        write_weights(spec, folder)
        stored = read_tensors(folder / WEIGHTS)
        write_device_weights(spec, stored, folder / "weights.bin", folder / "weights.json")
        self.spec, self.weights = spec, BundleWeights(spec, stored, keep=True)
        self.model = emit_tensorrt(spec, dtype=dtype)
        self.evaluator = ReferenceEvaluator(self.model, new_ops=REFERENCE_OPS)
        self.feeds = weights_of(self.model, folder)
        for i in self.model.graph.input:
            dims = i.type.tensor_type.shape.dim
            if dims[0].dim_param in ("pages", "sequences"):
                count = PAGES if dims[0].dim_param == "pages" else SEQUENCES
                self.feeds[i.name] = np.full((count, *(d.dim_value for d in dims[1:])), np.nan, dtype)

    def step(self, tokens, positions, length, logit_rows):
        pages = [7, 2, 0, 5]
        ints = {
            "tokens": tokens, "positions": positions, "sequences": [0] * len(tokens), "lengths": [length],
            "table.pages": [pages], "table.rings": [[2]], "logit_rows": logit_rows,
        }  # fmt: skip
        names = {i.name for i in self.model.graph.input}
        feeds = self.feeds | {k: np.asarray(v, np.int32) for k, v in ints.items() if k in names}
        outputs = dict(zip(self.evaluator.output_names, self.evaluator.run(None, feeds), strict=True))
        self.feeds |= {name[:-4]: value for name, value in outputs.items() if name[:-4] in self.feeds}
        best = outputs["head.best"].argmax(1)
        rows = np.arange(len(logit_rows))
        assert (outputs["head.ids"][rows, best] == outputs["logits"].argmax(1)).all()
        return outputs["logits"]

    def whole(self, tokens):
        positions, past = torch.arange(len(tokens)), [None] * len(self.spec.layers)
        return oracle.forward(self.spec, self.weights, torch.from_numpy(tokens), positions, past).logits.numpy()


def error(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def three_steps(runner, seed=0):
    """Two chunks with padding between and behind their rows, then drafts; windows and rings wrap."""
    tokens = np.random.default_rng(seed).integers(0, runner.spec.vocab_size, 24)
    got = [runner.step([3, *tokens[:9], 0], [-1, *range(9), -1], 0, range(1, 10))]
    got.append(runner.step(tokens[9:20], range(9, 20), 9, range(11)))
    got.append(runner.step(tokens[20:], range(20, 24), 20, [3, 2, 1, 0])[::-1])
    return np.concatenate(got), runner.whole(tokens)


CASES = [(name, INT4) for name in SPECS] + [(name, MIXED) for name in ("mimo-gated", "biased-gemma")]


@pytest.mark.parametrize(("name", "quant"), CASES, ids=[f"{n}-{'int4' if q is INT4 else 'mixed'}" for n, q in CASES])
def test_float32_equals_the_oracle(name, quant, tmp_path):
    got, want = three_steps(Runner(quantised(SPECS[name], quant), tmp_path, "float32"))
    assert error(got, want) < 1e-5


@pytest.mark.parametrize("name", ["mimo", "gemma", "qwen"])
def test_float16_is_close_to_the_oracle(name, tmp_path):
    got, want = three_steps(Runner(quantised(SPECS[name]), tmp_path, "float16"))
    assert 1e-5 < error(got, want) < 2e-2


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", SPECS)
def test_checker_with_shape_inference_knows_every_value(name, dtype):
    model = emit_tensorrt(quantised(SPECS[name]), dtype=dtype)
    onnx.checker.check_model(model, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    known = {v.name for v in [*inferred.graph.value_info, *inferred.graph.output]}
    assert known >= {o for n in inferred.graph.node for o in n.output}


@pytest.mark.parametrize("name", SPECS)
def test_holds_no_weights_no_functions_and_old_opsets_only(name):
    model = emit_tensorrt(quantised(SPECS[name]))
    assert not model.functions and not model.graph.initializer
    assert {o.domain: o.version for o in model.opset_import} == {"": 20, "mimo": 1}
    inputs = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
    packed = [n for n in inputs if n.endswith((".q", ".zeros"))]
    assert packed and {inputs[n] for n in packed} == {onnx.TensorProto.INT8}
    assert onnx.TensorProto.UINT8 not in inputs.values()
    assert [n.op_type for n in model.graph.node if not n.domain] == ["Gather"]


def test_what_has_no_kernels_is_refused():
    for spec, what in ((quantised(ALL["mimo-moe"]), "mixture-of-experts"), (ALL["qwen"], "float weights")):
        with pytest.raises(UnsupportedError, match=what):
            emit_tensorrt(spec)


@pytest.mark.parametrize(
    ("name", "dim", "message"),
    [
        ("layers.0.down.q", 1, r"input w.q is INT8 \[1, 3, 512\] \(allowed: i8 \(1, 2, 512\)\)"),
        ("layers.1.o.scales", 0, r"input w.scales is FLOAT16 \[2, 1, 32\]"),
        ("layers.2.k", 2, r"input k_pool is FLOAT16 \['pages', 64, 3, 8\]"),
    ],
)
def test_wrong_shapes_are_found_by_the_ops_inference(name, dim, message):
    model = emit_tensorrt(quantised(ALL["qwen"]))
    given = next(i for i in model.graph.input if i.name == name)
    given.type.tensor_type.shape.dim[dim].dim_value += 1
    with pytest.raises(ValueError, match=message):
        onnx.checker.check_model(model, full_check=True)


def test_gated_feed_forward_is_one_op_and_gates_matter(tmp_path):
    spec = quantised(ALL["mimo-gated"])
    runner = Runner(spec, tmp_path, "float32")
    assert [n.op_type for n in runner.model.graph.node].count("SparseFfn") == len(spec.layers)
    got, _ = three_steps(runner)
    gated = [name for name in runner.feeds if name.endswith("gate.bias")]
    for name in gated:
        runner.feeds[name] = np.full_like(runner.feeds[name], 1e3)  # every block kept
    assert len(gated) == len(spec.layers) and error(three_steps(runner)[0], got) > 1e-2


def test_attributes_of_the_attention_reach_the_op():
    spec = quantised(ALL["gemma"])
    model = emit_tensorrt(replace(spec, norm_eps=0.1))
    nodes = [n for n in model.graph.node if n.op_type == "WindowedAttention"]
    for i, node in enumerate(nodes):
        a, op = spec.attention_of(i), op_of(OPS[node.op_type], node)
        assert op.spec == replace(a, rope_theta=1.0, rope_scaling=None, qkv_bias=False)  # those are not its own
        assert op.eps == 0.1  # exactly: constants of kernels may not be rounded to float32
        assert node.input[7] == ("table.pages" if a.window is None else "table.rings")
    assert len(nodes) == len(spec.layers)
