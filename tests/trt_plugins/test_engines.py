"""Engines from the TensorRT form, by TensorRT-RTX, which builds without a GPU.

They prove graph, shapes, types and profiles; nothing about the memory or the time of a build on Orin.
"""

from pathlib import Path

import onnx
import pytest
from specs import ALL
from tiny_weights import quantised

from mimo_edge.backends.tensorrt_build import check_engine
from mimo_edge.bundle import BUILT_IN, Bundle
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.export.families import open_checkpoint
from mimo_edge.export.pipeline import uniform
from mimo_edge.export.programs import lower, write_tensorrt
from mimo_edge.export.programs.tuning import tuning
from mimo_edge.kernels.index import TENSORRT, TENSORRT_INFO, TensorRtForm
from mimo_edge.trt_plugins import compat

pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT-RTX has wheels for Linux on x86-64 alone")


def write_form(folder: Path, spec):
    """The form, its counts and the programs as an export for sm_87 writes them."""
    tuned = tuning("sm_87")
    write_tensorrt(folder, spec, tuned)
    form = TensorRtForm.loads((folder / TENSORRT_INFO).read_bytes(), "")
    return folder / TENSORRT, form, lower(spec, tuned)


def build(folder: Path, spec, change=None):
    """The layers of the engine that is built from the form, once `change` was applied to it."""
    path, form, programs = write_form(folder, spec)
    if change:
        model = onnx.load(path)
        change(model.graph)
        path.write_bytes(model.SerializeToString())
    answer, size = check_engine(path, form, programs, sessions=4)
    assert answer["version"] == compat.load().name and size > 10_000
    return answer["layers"], form.nodes


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIMO_EDGE_CACHE", str(tmp_path / "cache"))
    yield
    assert not list((tmp_path / "cache" / "engines").iterdir())  # nothing is left, whatever happened


def test_the_reference_model_has_a_plugin_for_every_node(tmp_path):
    layers, nodes = build(tmp_path, Bundle.open(BUILT_IN, verify=False).spec)
    assert layers == {**nodes, "GATHER": 1}
    assert nodes == {
        "Int4Embedding": 1, "Rotation": 2, "Int4Linear": 36, "SparseFfn": 18, "WindowedAttention": 18, "Int4Head": 1,
    }  # fmt: skip


def test_gemma_3_270m_has_a_plugin_for_every_node(tmp_path, gemma_gguf):
    spec = open_checkpoint(gemma_gguf).spec
    layers, nodes = build(tmp_path, quantised(spec, uniform()))
    assert layers == {**nodes, "GATHER": 1}
    assert nodes == {
        "Int4Embedding": 1, "Rotation": 2, "Int4Linear": 54, "Int4GateUp": 18, "WindowedAttention": 18, "Int4Head": 1,
    }  # fmt: skip


def attribute(graph, op, name):
    node = next(n for n in graph.node if n.op_type == op)
    return node, next(a for a in node.attribute if a.name == name)


def wrong_field(graph):
    attribute(graph, "Int4Linear", "bits")[1].i = 5


def missing_field(graph):
    node, a = attribute(graph, "WindowedAttention", "window")
    node.attribute.remove(a)


def no_number(graph):
    attribute(graph, "Int4GateUp", "eps")[1].s = b"small"


def missing_plugin(graph):
    next(n for n in graph.node if n.op_type == "Int4GateUp").op_type = "Int4Other"


def uint8_input(graph):
    given = next(i for i in graph.input if i.name == "layers.0.qkv.zeros")
    given.type.tensor_type.elem_type = onnx.TensorProto.UINT8


def changed_shape(graph):
    given = next(i for i in graph.input if i.name == "layers.1.down.q")
    given.type.tensor_type.shape.dim[1].dim_value = 3


def one_input_less(graph):
    node = next(n for n in graph.node if n.op_type == "Int4Head")
    del node.input[-1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (wrong_field, BadInputError, r"plugin Int4Linear, node layers.0.qkv.y: field bits 5 \(allowed: 4, 8\)"),
        (missing_field, BadInputError, "plugin WindowedAttention, node layers.0.attended: field window is missing"),
        (no_number, BadInputError, "field eps is no number in text"),
        (missing_plugin, BadInputError, r"node layers.0.gate_up.product.h \(Int4Other\): .*Plugin not found"),
        (uint8_input, MimoEdgeError, r"input w.zeros is DataType.UINT8 \(allowed: INT8\)"),
        (changed_shape, MimoEdgeError, r"plugin Int4Linear: input w.q is \[1, 3, 512\] \(allowed: \[1, 2, 512\]\)"),
        (one_input_less, MimoEdgeError, r"plugin Int4Head: 4 inputs \(allowed: 5: x, w.q"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_wrong_is_refused_at_parsing(tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        build(tmp_path, quantised(ALL["gemma"]), change)


def test_a_node_without_a_plugin_layer_is_found(tmp_path):
    path, form, programs = write_form(tmp_path, quantised(ALL["qwen"]))
    more = TensorRtForm({**form.nodes, "Int4Linear": form.nodes["Int4Linear"] + 1})
    with pytest.raises(BadInputError, match=r"18 plugin layers \(.*9 Int4Linear.*\) for 19 nodes .*10 Int4Linear"):
        check_engine(path, more, programs, sessions=4)
