"""The form of the model that TensorRT builds: `mimo` ops, which plugins implement, and opset 20 between them.

Rows of B sequences are flat. All integers are int32; D is `dtype` (float16, or float32 for exact comparisons):

    tokens, positions, sequences [T]   positions -1 marks padding; sequences says to which of the B a row belongs
    lengths [B]   committed rows of each sequence       logit_rows [M]
    pages [B, N]  pages of its full layers              rings [B, 1]   its ring in every window layer
    k_pool.i, v_pool.i D [blocks, block, kv_heads, head_dim or v_head_dim]   blocks are pages, or rings of R slots
    logits float32 [M, vocab]    new_k_pool.i, new_v_pool.i   to be bound to the same memory as the inputs

Every stored tensor is an input of its own name, bound at run time, so that building an engine needs no weights:
packed ones are INT8 with the bundle's bytes; scales (float16 values), unquantised products' weights and products'
biases are D; norms, sinks, routers, gates and the feed-forward's output bias are float32. The residual stream and the
norms are float32: float16 overflows on Gemma.
"""

from __future__ import annotations

from onnx import ModelProto

from mimo_edge.backends.oracle import rope_frequencies
from mimo_edge.export.graph import schemas
from mimo_edge.export.graph.builder import FLOAT, FLOAT16, INT8, INT32, GraphBuilder
from mimo_edge.export.graph.routing import block_mask, expert_weights
from mimo_edge.params import Param, parameters, stored
from mimo_edge.spec import FeedForwardSpec, ModelSpec, MoeSpec

OPSET = 20
IR_VERSION = 9


def emit_tensorrt(spec: ModelSpec, dtype: str = "float16") -> ModelProto:
    """The TensorRT form; `dtype` is "float16" or "float32"."""
    return _TensorRtForm(spec, {"float16": FLOAT16, "float32": FLOAT}[dtype]).emit()


class _Weights:
    """Stored tensors as graph inputs, and the products made with them."""

    def __init__(self, spec: ModelSpec, dtype: int):
        self._spec = spec
        self._dtype = dtype
        self._params = {p.name: p for p in parameters(spec)}
        self._known: set[str] = set()

    def vector(self, g: GraphBuilder, name: str) -> str:
        return self._input(g, name, self._params[name].shape, FLOAT)

    def embedding(self, g: GraphBuilder, tokens: str) -> str:
        param = self._params["embed"]
        quant = self._spec.quant.of(param.kind)
        if quant is None:
            return g.op("Gather", self._input(g, "embed", param.shape, self._dtype), tokens, name="embed.rows", axis=0)
        return self._mimo(g, "Int4Embedding", tokens, *self.packed(g, param), name="embed.rows", bits=quant.bits)

    def linear(self, g: GraphBuilder, x: str, name: str, bias: str | None = None) -> str:
        """x D [rows, K] times the transposed parameter [N, K], plus a bias parameter [N]: D [rows, N]."""
        param = self._params[name]
        quant = self._spec.quant.of(param.kind)
        extra = [self._input(g, bias, self._params[bias].shape, self._dtype)] if bias else []
        if quant is None:
            weight = self._input(g, name, param.shape, self._dtype)
            return g.op("Gemm", x, weight, *extra, name=f"{name}.product", transB=1)
        return self._mimo(g, "Int4Linear", x, *self.packed(g, param), *extra, name=f"{name}.product", bits=quant.bits)

    def packed(self, g: GraphBuilder, param: Param | str) -> list[str]:
        """q, scales and zeros of a quantised parameter."""
        param = self._params[param] if isinstance(param, str) else param
        parts = stored(param, self._spec.quant.of(param.kind))
        return [self._input(g, s.name, s.shape, INT8 if s.dtype == "U8" else self._dtype) for s in parts]

    def _mimo(self, g: GraphBuilder, op: str, *inputs: str, **kwargs) -> str:
        return g.op(op, *inputs, domain=schemas.DOMAIN, **kwargs)

    def _input(self, g: GraphBuilder, name: str, shape: tuple[int, ...], dtype: int) -> str:
        if name not in self._known:
            self._known.add(name)
            g.input(name, shape, dtype)
        return name


class _TensorRtForm:
    def __init__(self, spec: ModelSpec, dtype: int):
        self._spec = spec
        self._dtype = dtype
        self._weights = _Weights(spec, dtype)
        self._g = GraphBuilder()

    def emit(self) -> ModelProto:
        g, spec = self._g, self._spec
        for name, dim in (("tokens", "T"), ("positions", "T"), ("sequences", "T"), ("lengths", "B")):
            g.input(name, [dim], INT32)
        g.input("logit_rows", ["M"], INT32)
        windows = [spec.attention_of(i).window for i in range(len(spec.layers))]
        if None in windows:
            g.input("pages", ["B", "N"], INT32)
        if any(windows):
            g.input("rings", ["B", 1], INT32)
        x = self._wide(self._weights.embedding(g, "tokens"))
        if spec.embed_scale != 1:
            x = g.op("Mul", x, g.constant(float(spec.embed_scale)), name="embed.scaled")
        for i in range(len(spec.layers)):
            x = self._layer(i, x)
        rows = g.op("Gather", x, "logit_rows", name="last.rows", axis=0)
        h = self._narrow(self._norm(rows, "norm"))
        logits = self._weights.linear(g, h, "head" if spec.separate_head else "embed")
        g.output(g.op("Cast", logits, outputs=["logits"], to=FLOAT), ["M", spec.vocab_size])
        return g.model("mimo-edge.tensorrt", {"": OPSET, schemas.DOMAIN: schemas.VERSION}, IR_VERSION)

    def _layer(self, i: int, x: str) -> str:
        """Block i on the residual x float32 [T, hidden]."""
        g, p = self._g, f"layers.{i}"
        y = self._wide(self._attention(i, self._narrow(self._norm(x, f"{p}.attn_norm"))))
        if self._spec.post_norms:
            y = self._norm(y, f"{p}.post_attn_norm")
        x = g.op("Add", x, y, name=f"{p}.after_attention")
        y = self._feed_forward(self._spec.ffn_of(i), p, self._norm(x, f"{p}.ffn_norm"))
        if self._spec.post_norms:
            y = self._norm(y, f"{p}.post_ffn_norm")
        return g.op("Add", x, y, name=f"{p}.after_ffn")

    def _norm(self, x: str, name: str) -> str:
        """RMS norm, float32 to float32."""
        g = self._g
        square = g.op("ReduceMean", g.op("Mul", x, x, name=f"{name}.square"), g.constant([-1]), name=f"{name}.mean")
        root = g.op("Sqrt", g.op("Add", square, g.constant(self._spec.norm_eps)), name=f"{name}.root")
        unit = g.op("Div", x, root, name=f"{name}.unit")
        return g.op("Mul", unit, self._weights.vector(g, name), name=f"{name}.y")

    def _wide(self, x: str) -> str:
        return x if self._dtype == FLOAT else self._g.op("Cast", x, name=f"{x}.float", to=FLOAT)

    def _narrow(self, x: str) -> str:
        return x if self._dtype == FLOAT else self._g.op("Cast", x, name=f"{x}.half", to=self._dtype)

    def _attention(self, i: int, h: str) -> str:
        g, w, a, p = self._g, self._weights, self._spec.attention_of(i), f"layers.{i}"
        rows = w.linear(g, h, f"{p}.qkv", bias=f"{p}.qkv.bias" if a.qkv_bias else None)
        pools = [
            g.input(f"{part}_pool.{i}", [f"blocks.{i}", f"block.{i}", a.kv_heads, dim], self._dtype)
            for part, dim in (("k", a.head_dim), ("v", a.v_head_dim))
        ]
        table = "pages" if a.window is None else "rings"
        extra = [w.vector(g, f"{p}.sinks")] if a.sinks else [""]
        extra = [*extra, w.vector(g, f"{p}.q_norm"), w.vector(g, f"{p}.k_norm")] if a.qk_norm else extra
        y, k, v = g.node(
            "WindowedAttention",
            [rows, *pools, "positions", "sequences", "lengths", table, g.constant(rope_frequencies(a).numpy()), *extra],
            outputs=[f"{p}.attended", f"new_k_pool.{i}", f"new_v_pool.{i}"], domain=schemas.DOMAIN,
            heads=a.heads, kv_heads=a.kv_heads, head_dim=a.head_dim, v_head_dim=a.v_head_dim, window=a.window or 0,
            scale=a.scale, value_scale=a.value_scale, eps=self._spec.norm_eps,
        )  # fmt: skip
        g.output(k, [f"blocks.{i}", f"block.{i}", a.kv_heads, a.head_dim], self._dtype)
        g.output(v, [f"blocks.{i}", f"block.{i}", a.kv_heads, a.v_head_dim], self._dtype)
        return w.linear(g, y, f"{p}.o", f"{p}.o.bias" if self._spec.output_bias else None)

    def _feed_forward(self, f: FeedForwardSpec, p: str, x: str) -> str:
        """Dense, gated or mixture of experts; x and the result are float32 [T, hidden]."""
        y = self._unbiased_feed_forward(f, p, x)
        if not self._spec.output_bias:
            return y
        return self._g.op("Add", y, self._weights.vector(self._g, f"{p}.down.bias"), name=f"{p}.ffn.biased")

    def _unbiased_feed_forward(self, f: FeedForwardSpec, p: str, x: str) -> str:
        g, w, quant = self._g, self._weights, self._spec.quant.ffn
        if f.moe:
            return self._mixture(f, f.moe, p, x)
        h = self._narrow(x)
        keep = self._narrow(block_mask(g, w, p, x)) if f.gate else None
        if keep is None or quant is None:
            return self._wide(self._dense(f, p, h, keep))
        y = g.op(
            "SparseFfn", h, keep, *w.packed(g, f"{p}.gate_up"), *w.packed(g, f"{p}.down"), name=f"{p}.sparse_ffn",
            domain=schemas.DOMAIN, bits=quant.bits, activation=f.activation,
        )  # fmt: skip
        return self._wide(y)

    def _dense(self, f: FeedForwardSpec, p: str, h: str, keep: str | None = None) -> str:
        g, n = self._g, f.intermediate
        both = self._weights.linear(g, h, f"{p}.gate_up")
        gate, up = g.node("Split", [both, g.constant([n, n])], name=f"{p}.halves", outputs=2, axis=1)
        if f.activation == "silu":
            gate = g.op("Mul", gate, g.op("Sigmoid", gate, name=f"{p}.sigmoid"), name=f"{p}.act")
        else:
            gate = g.op("Gelu", gate, name=f"{p}.act", approximate="tanh")
        h = g.op("Mul", gate, up, name=f"{p}.act_up")
        if keep is not None and f.gate is not None:
            blocks = g.op("Reshape", h, g.constant([-1, n // f.gate.block, f.gate.block]), name=f"{p}.blocks")
            kept = g.op("Mul", blocks, g.op("Unsqueeze", keep, g.constant([2])), name=f"{p}.kept")
            h = g.op("Reshape", kept, g.constant([-1, n]), name=f"{p}.kept.rows")
        return self._weights.linear(g, h, f"{p}.down")

    def _mixture(self, f: FeedForwardSpec, moe: MoeSpec, p: str, x: str) -> str:
        """Every expert on every row, times its weight: right, and as slow as it sounds. A fused op is worth it only
        when a mixture of experts fits a module."""
        g, h = self._g, self._narrow(x)
        weights = expert_weights(g, self._weights, moe, p, x)
        columns = g.node(
            "Split", [weights], name=f"{p}.moe.weight", outputs=moe.experts, axis=1, num_outputs=moe.experts
        )
        parts = [
            g.op("Mul", self._wide(self._dense(f, f"{p}.experts.{e}", h)), column, name=f"{p}.experts.{e}.part")
            for e, column in enumerate(columns)
        ]
        return g.op("Sum", *parts, name=f"{p}.moe.y")
