"""The form of the model that TensorRT builds: `mimo` ops, which plugins implement (trt_plugins).

Inputs have the names and, but for the types below, the shapes of the buffers of a step's programs (export/programs), so
that an engine is bound to the very memory that the cuda backend works in:

    tokens, positions, sequences int32 [rows]   positions -1 marks padding      logit_rows int32 [logit_rows]
    lengths int32 [1]   committed rows     table.pages int32 [1, N], table.rings int32 [1, 1]   the sequence's blocks
    layers.i.k, layers.i.v D [pages or sequences, block, kv_heads, head_dim or v_head_dim]   pools
    x.out float32 [rows, hidden]   the residual stream behind the last layer
    logits float32 [logit_rows, vocab]     head.best, head.ids [logit_rows, programs]   each program's best token
    layers.i.k.out, layers.i.v.out   to be bound to the same memory as the inputs
    k_new.layers.i, v_new.layers.i D [rows, kv_heads * dim]   of window layers: a long step's rows, until `commit`

Every weight is an input of its own name, in the device layout, so that building an engine needs no weights: packed ones
are INT8 (TensorRT has no UINT8 plugin inputs), scales D, all others float32. D is `dtype`: float16, or float32, which
only onnx.reference runs, for exact comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple

from onnx import ModelProto, TensorProto

from mimo_edge.export.graph import schemas
from mimo_edge.export.graph.builder import GraphBuilder
from mimo_edge.export.programs.lower import PAGE, PREFILL_ROWS, SPARE, check_supported
from mimo_edge.export.programs.tuning import Tuning
from mimo_edge.kv.windows import ring_slots
from mimo_edge.spec import ModelSpec, TensorQuant
from mimo_edge.trt_plugins import fields
from mimo_edge.trt_plugins.int4_embedding import Int4Embedding
from mimo_edge.trt_plugins.int4_gate_up import Int4GateUp
from mimo_edge.trt_plugins.int4_head import Int4Head
from mimo_edge.trt_plugins.int4_linear import Int4Linear
from mimo_edge.trt_plugins.op import Op, Tensor, cut_numbers, many_numbers
from mimo_edge.trt_plugins.rotation import Rotation
from mimo_edge.trt_plugins.sparse_ffn import SparseFfn
from mimo_edge.trt_plugins.windowed_attention import WindowedAttention

OPSET = 20
IR_VERSION = 9


def emit_tensorrt(
    spec: ModelSpec,
    tuning: Tuning | None = None,
    prefill_rows: tuple[int, ...] = PREFILL_ROWS,
    dtype: str = "float16",
) -> ModelProto:
    """The TensorRT form for steps of 1, 4 and `prefill_rows` rows. Raises UnsupportedError as `lower` does."""
    check_supported(spec)
    half = {"float16": TensorProto.FLOAT16, "float32": TensorProto.FLOAT}[dtype]
    return _TensorRtForm(spec, tuning or Tuning(), prefill_rows, half).emit()


class _TensorRtForm:
    def __init__(self, spec: ModelSpec, tuning: Tuning, prefill_rows: tuple[int, ...], half: int):
        self._spec, self._tuning = spec, tuning
        self._elements = schemas.ELEMENTS | {"fp16": half}
        self._many = many_numbers({rows: tuning.many(rows) for rows in prefill_rows})
        self._g = GraphBuilder()
        self._known: set[str] = set()  # values that the graph already has

    def emit(self) -> ModelProto:
        spec = self._spec
        (x,) = self._op(
            Int4Embedding(*self._sizes(spec.vocab_size, spec.hidden_size, spec.quant.embedding), spec.embed_scale),
            "embed.rows",
            {"w": "embed"},
        )
        for kind in dict.fromkeys(layer.attention for layer in spec.layers):
            self._op(
                Rotation(spec.attention[kind].rotary_dim),
                f"rotation.{kind}",
                {"frequencies": f"frequencies.{kind}"},
                {"rotation": f"rotation.{kind}"},
            )
        for i in range(len(spec.layers)):
            x = self._layer(i, x)
        self._g.output(x, ["rows", spec.hidden_size])
        self._head(x)
        return self._g.model("mimo-edge.tensorrt", {"": OPSET, schemas.DOMAIN: schemas.VERSION}, IR_VERSION)

    def _layer(self, i: int, x: str) -> str:
        """Block i on the residual x float32 [rows, hidden]."""
        spec, p, hidden = self._spec, f"layers.{i}", self._spec.hidden_size
        a, f = spec.attention_of(i), spec.ffn_of(i)
        n = a.q_rows + a.k_rows + a.v_rows
        qkv = self._linear(f"{p}.qkv", n, hidden, spec.quant.attention, {"x": x, "norm": f"{p}.attn_norm"}, a.qkv_bias)
        y = self._attention(i, qkv)
        x = self._behind(f"{p}.o", a.heads * a.v_head_dim, spec.quant.attention, y, x, f"{p}.post_attn_norm")
        last = "x.out" if i == len(spec.layers) - 1 else f"{p}.x"
        if f.gate:
            return self._gated(i, x, last)
        tuned = self._tuning.product("gate_up", f.intermediate, hidden)
        sizes = self._sizes(f.intermediate, hidden, spec.quant.ffn)
        op = Int4GateUp(*sizes, f.activation, spec.norm_eps, cut_numbers(tuned), self._many)
        (h,) = self._op(op, f"{p}.gate_up.product", {"x": x, "w": f"{p}.gate_up", "norm": f"{p}.ffn_norm"})
        return self._behind(f"{p}.down", f.intermediate, spec.quant.ffn, h, x, f"{p}.post_ffn_norm", last)

    def _behind(
        self, name: str, k: int, quant: TensorQuant | None, x: str, residual: str, post_norm: str, y: str | None = None
    ) -> str:
        """The product that ends a half of a layer, and its way into the residual stream."""
        names = {"x": x, "residual": residual} | ({"post_norm": post_norm} if self._spec.post_norms else {})
        return self._linear(name, self._spec.hidden_size, k, quant, names, self._spec.output_bias, y)

    def _linear(
        self,
        name: str,
        n: int,
        k: int,
        quant: TensorQuant | None,
        names: dict[str, str],
        bias: bool,
        y: str | None = None,
    ) -> str:
        flags = [int("norm" in names), int(bias), int("residual" in names), int("post_norm" in names)]
        cut = cut_numbers(self._tuning.product("linear", n, k))
        op = Int4Linear(*self._sizes(n, k, quant), *flags, self._spec.norm_eps, cut, self._many)
        inputs = {**names, "w": name, "bias": f"{name}.bias"}
        return self._op(op, f"{name}.product", inputs, {"y": y or f"{name}.y"})[0]

    def _attention(self, i: int, qkv: str) -> str:
        spec, p, a, kind = self._spec, f"layers.{i}", self._spec.attention_of(i), self._spec.layers[i].attention
        pages = math.ceil(spec.max_context / PAGE)
        block, blocks = (PAGE, pages) if a.window is None else (ring_slots(a.window, SPARE, spec.max_context), 1)
        op = WindowedAttention(
            a.heads,
            a.kv_heads,
            a.head_dim,
            a.v_head_dim,
            a.rotary_dim,
            a.window or 0,
            a.scale,
            a.value_scale,
            spec.norm_eps,
            int(a.sinks),
            int(a.qk_norm),
            block,
            blocks,
            tuple(astuple(self._tuning.attention)),
        )
        parts = {"k_pool": f"{p}.k", "v_pool": f"{p}.v"}
        inputs = {"qkv": qkv, "rotation": f"rotation.{kind}", "table": "table.rings" if a.window else "table.pages"}
        inputs |= parts | {name: f"{p}.{name}" for name in ("sinks", "q_norm", "k_norm")}
        outputs = {f"new_{name}": f"{at}.out" for name, at in parts.items()} | {"y": f"{p}.attended"}
        outputs |= {"k_new": f"k_new.{p}", "v_new": f"v_new.{p}"}
        y, *others = self._op(op, f"{p}.attention", inputs, outputs)
        for name, tensor in zip(others, op.outputs()[1:], strict=True):
            self._g.output(name, tensor.shape, self._elements[tensor.type])
        return y

    def _gated(self, i: int, x: str, y: str) -> str:
        spec, p, f = self._spec, f"layers.{i}", self._spec.ffn_of(i)
        assert f.gate is not None
        hidden, gate, inner = spec.hidden_size, f.gate, f.intermediate
        cuts = [
            self._tuning.product("gate_up_listed", inner, hidden),
            self._tuning.product("down_listed", hidden, inner),
        ]
        op = SparseFfn(
            *self._sizes(inner, hidden, spec.quant.ffn),
            gate.block,
            gate.rank,
            f.activation,
            int(spec.output_bias),
            spec.norm_eps,
            *map(cut_numbers, cuts),
            self._many,
        )
        inputs = {"x": x, "norm": f"{p}.ffn_norm", "w1": f"{p}.gate.w1", "w2": f"{p}.gate.w2"}
        inputs |= {"gate_bias": f"{p}.gate.bias", "down_bias": f"{p}.down.bias"}
        inputs |= {"gate_up": f"{p}.gate_up", "down": f"{p}.down"}
        return self._op(op, f"{p}.ffn", inputs, {"y": y})[0]

    def _head(self, x: str) -> None:
        spec, g = self._spec, self._g
        rows = g.op("Gather", x, self._input(Tensor("logit_rows", "i32", ("logit_rows",))), name="last.rows", axis=0)
        self._known.add(rows)
        name, quant = ("head", spec.quant.head) if spec.separate_head else ("embed", spec.quant.embedding)
        cut = cut_numbers(self._tuning.product("head", spec.vocab_size, spec.hidden_size))
        op = Int4Head(*self._sizes(spec.vocab_size, spec.hidden_size, quant), spec.norm_eps, cut)
        outputs = {"logits": "logits", "best": "head.best", "ids": "head.ids"}
        for tensor in op.outputs():
            g.output(outputs[tensor.name], tensor.shape, self._elements[tensor.type])
        self._op(op, "head.product", {"x": rows, "w": name, "norm": "norm"}, outputs)

    def _op(self, op: Op, name: str, names: Mapping[str, str], outputs: Mapping[str, str] | None = None) -> list[str]:
        """Appends the op's node. `names` says what its inputs are called here, `outputs` its outputs; a name that no
        node gave yet is an input of the graph."""
        made = [(outputs or {}).get(t.name, f"{name}.{t.name}") for t in op.outputs()]
        inputs = [self._input(t, _renamed(t.name, names)) for t in op.inputs()]
        attributes = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.encode(op).items()}
        self._g.node(op.kind, inputs, outputs=made, domain=schemas.DOMAIN, **attributes, **schemas.PLUGIN)
        self._known.update(made)
        return made

    def _input(self, tensor: Tensor, name: str | None = None) -> str:
        name = name or tensor.name
        if name not in self._known:
            self._known.add(name)
            self._g.input(name, tensor.shape, self._elements[tensor.type])
        return name

    @staticmethod
    def _sizes(n: int, k: int, quant: TensorQuant | None) -> tuple[int, int, int, int]:
        assert quant is not None
        return n, k, quant.bits, quant.group


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """The tensor's name in the graph: of itself, or of the matrix whose part it is ("w.q")."""
    matrix, dot, part = name.partition(".")
    return names.get(matrix, matrix) + dot + part
