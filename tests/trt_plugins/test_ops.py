"""Ops without TensorRT: the same launches as the cuda backend's programs, fields both ways, and what is refused."""

import subprocess
import sys
from collections import Counter
from dataclasses import fields as dataclass_fields
from dataclasses import replace

import numpy as np
import pytest
from specs import gemma_spec, mimo_spec, qwen_spec
from tiny_weights import quantised

from mimo_edge.bundle import BUILT_IN, Bundle
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.export.graph.schemas import DOMAIN, op_of
from mimo_edge.export.graph.tensorrt import emit_tensorrt
from mimo_edge.export.programs import lower
from mimo_edge.export.programs.tuning import tuning
from mimo_edge.kernels.launch import Launch
from mimo_edge.spec import QuantSpec, TensorQuant
from mimo_edge.trt_plugins import fields
from mimo_edge.trt_plugins.enqueue import queue, scratch_places, work_of
from mimo_edge.trt_plugins.int4_linear import Int4Linear
from mimo_edge.trt_plugins.ops import OPS
from mimo_edge.trt_plugins.windowed_attention import WindowedAttention

BESIDE = ("sampling", "mtp")  # of a step, but of no engine
MIXED = QuantSpec(TensorQuant(8, 32), TensorQuant(4, 32), TensorQuant(8, 32), TensorQuant(4, 32))
SPECS = {
    "mimo": quantised(mimo_spec(), MIXED),
    "gated": quantised(replace(mimo_spec(gate=True), output_bias=True)),
    "gemma": quantised(gemma_spec((5, 11))),
    "qwen": quantised(replace(qwen_spec(), output_bias=True), MIXED),
    "reference": Bundle.open(BUILT_IN, verify=False).spec,
}


def ops_of(model):
    return [op_of(OPS[n.op_type], n) for n in model.graph.node if n.domain == DOMAIN]


@pytest.mark.parametrize("target", ["sm_87", "sm_90"])
@pytest.mark.parametrize("name", SPECS)
def test_plugins_launch_what_the_programs_launch(name, target):
    """The same kernels, grids and numbers, as often: so the bundle's cubins serve both."""
    tuned = tuning(target)
    programs = lower(SPECS[name], tuned).programs  # with MTP heads, a step also keeps hidden states
    ops = ops_of(emit_tensorrt(SPECS[name], tuned))
    for rows in (1, 4, 16, 128, 512):
        head = programs["head.1"].launches if rows > 4 else ()  # of a long step the engine makes one row's logits
        wanted = [x for x in (*programs[f"step.{rows}"].launches, *head) if not x.variant.kernel.startswith(BESIDE)]
        made = [w for op in ops for w in work_of(op, 1 if op.kind == "Int4Head" and rows > 4 else rows)]
        assert Counter(map(described, wanted)) == Counter(described(x) for x in made if isinstance(x, Launch))


def described(launch):
    numbers = tuple(v for v in launch.args.values() if not isinstance(v, str))
    return launch.variant.key, launch.grid, numbers


@pytest.mark.parametrize("name", SPECS)
def test_fields_survive_as_tensorrt_keeps_them(name):
    """Numbers as int32 arrays, text as bytes, perhaps with a zero behind; kernels' constants stay what they were."""
    for op in ops_of(emit_tensorrt(SPECS[name], tuning("sm_87"))):
        stored = {
            k: np.frombuffer(v.encode() + b"\0", np.int8) if isinstance(v, str) else np.atleast_1d(np.int32(v))
            for k, v in fields.encode(op).items()
        }
        assert fields.decode(type(op), "x", stored) == op


LINEAR = Int4Linear(96, 64, 4, 32, 0, 0, 0, 0, 1e-6, (1, 4, 4, 0, 0), (16, 4, 64, 2, 3))
ATTENTION = WindowedAttention(4, 2, 16, 16, 8, 5, 0.25, 1.0, 1e-6, 1, 0, 12, 1, (132, 64, 4, 3, 16, 64, 64, 4, 2))
WRONG = [
    (LINEAR, {"bits": 5}, "field bits 5 (allowed: 4, 8)"),
    (LINEAR, {"group": 48}, "field group 48 (allowed: 32, 64, 128)"),
    (LINEAR, {"k": 80}, "field k 80 (allowed: multiples of the group, 32)"),
    (LINEAR, {"n": 0}, "field n 0 (allowed: 1 and more)"),
    (LINEAR, {"bias": 2}, "field bias 2 (allowed: 0, 1)"),
    (LINEAR, {"post_norm": 1}, "field post_norm 1 without residual"),
    (LINEAR, {"cut": (1, 2)}, "field cut (1, 2)"),
    (LINEAR, {"many": (1, 2)}, "field many (1, 2)"),
    (LINEAR, {"eps": "tiny"}, "field eps is no number in text"),
    (LINEAR, {"n": np.zeros(2, np.int32)}, "field n is no whole number (2 numbers)"),
    (LINEAR, {"n": np.float32([3])}, "field n is no whole number (type float32)"),
    (LINEAR, {"k": None}, "field k is missing"),
    (ATTENTION, {"heads": 3}, "field heads 3 (allowed: multiples of kv_heads, 2)"),
    (ATTENTION, {"rotary_dim": 7}, "field rotary_dim 7 (allowed: even, 0 to head_dim 16)"),
    (ATTENTION, {"window": -1}, "field window -1"),
    (ATTENTION, {"blocks": 0}, "field blocks 0"),
    (ATTENTION, {"tuning": (1,)}, "field tuning (1,)"),
]


@pytest.mark.parametrize(("op", "change", "message"), WRONG, ids=[f"{o.kind}-{next(iter(c))}" for o, c, _ in WRONG])
def test_a_wrong_field_is_named(op, change, message):
    with pytest.raises(BadInputError) as caught:
        fields.decode(type(op), "layers.3.qkv", fields.encode(op) | change)
    text = str(caught.value)
    assert text.startswith(f"plugin {op.kind}, node layers.3.qkv: {message}") and "\n" not in text


class Recorder:
    """A launcher that notes what it is asked for."""

    def __init__(self):
        self.calls = []

    def launch(self, launch, address, stream):
        named = {k: address[v] for k, v in launch.args.items() if isinstance(v, str)}
        self.calls.append((launch.variant.kernel, named, stream))

    def copy(self, to, source, nbytes, stream):
        self.calls.append(("copy", to, source, nbytes, stream))

    def fill(self, to, byte, nbytes, stream):
        self.calls.append(("fill", to, byte, nbytes, stream))


def shapes_of(op, **sizes):
    return [[d if isinstance(d, int) else sizes[d] for d in t.shape] for t in op.inputs()]


def test_a_product_behind_which_a_norm_is_added_copies_the_residual_first():
    op = replace(LINEAR, residual=1, post_norm=1, many=(16, 4, 64, 2, 3))
    to = Recorder()
    queue(op, to, shapes_of(op, rows=4), [1, 2, 3, 4, 5, 6], [7], 1000, 9)
    product, copy, norm = to.calls
    assert product[0] == "int4_linear.linear" and product[1]["y"] == 1000
    assert copy == ("copy", 7, 5, 4 * 96 * 4, 9)
    assert norm == ("norm.add_norm", {"y": 1000, "w": 6, "x": 7}, 9)


def test_counters_are_zero_before_attention_and_pools_are_one_memory():
    op = ATTENTION
    inputs = list(range(100, 100 + len(op.inputs())))
    shapes, to = shapes_of(op, rows=1, sequences=3), Recorder()
    outputs = [1, inputs[2], inputs[3], 4, 5]
    queue(op, to, shapes, inputs, outputs, 5120, 9)
    places, _ = scratch_places(op.scratch(1))
    assert to.calls[0] == ("fill", 5120 + places["counters"], 0, 8, 9)
    assert to.calls[1][0] == "windowed_attention.decode" and to.calls[1][1]["k_pool"] == inputs[2]
    with pytest.raises(MimoEdgeError, match="new_v_pool must be bound to the memory of v_pool"):
        queue(op, to, shapes, inputs, [1, inputs[2], 3, 4, 5], 5120, 9)


def test_other_shapes_and_rows_are_refused():
    to = Recorder()
    with pytest.raises(MimoEdgeError, match=r"w.q is \[4, 2, 512\] \(allowed: \[3, 2, 512\]\)"):
        queue(LINEAR, to, [[1, 64], [4, 2, 512], [3, 2, 32], [3, 2, 32]], [1] * 4, [2], 0, 9)
    with pytest.raises(MimoEdgeError, match=r"a step of 32 rows .* kernels for 1, 4, 16"):
        queue(LINEAR, to, shapes_of(LINEAR, rows=32), [1] * 4, [2], 0, 9)
    assert not to.calls


@pytest.mark.parametrize("rows", [1, 4, 512])
@pytest.mark.parametrize("name", SPECS)
def test_every_buffer_of_the_work_is_a_tensor_or_scratch(name, rows):
    for op in {type(op): op for op in ops_of(emit_tensorrt(SPECS[name], tuning("sm_87")))}.values():
        count = min(rows, 4) if op.kind == "Int4Head" else rows
        known = {t.name for t in (*op.inputs(), *op.outputs())} | op.scratch(count).keys()
        for item in work_of(op, count):
            names = item.args.values() if isinstance(item, Launch) else (item.source, item.to)
            assert {n for n in names if isinstance(n, str)} <= known
        assert all(f.name in fields.encode(op) for f in dataclass_fields(op))


def test_a_device_needs_neither_torch_nor_onnx_nor_triton_for_the_backend():
    heavy = ("torch", "onnx", "triton", "tensorrt", "tensorrt_rtx_bindings", "safetensors", "gguf")
    code = (
        "import sys, mimo_edge.backends.tensorrt, mimo_edge.backends.tensorrt_build, mimo_edge.trt_plugins.child, "
        f"mimo_edge.trt_plugins.network; sys.exit(str([m for m in {heavy} if m in sys.modules] or '') or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
