"""Transformer blocks of the CPU form: those of layers and of MTP heads, by the same code."""

from __future__ import annotations

from dataclasses import dataclass

from mimo_edge.backends.oracle import rope_frequencies
from mimo_edge.export.graph.builder import GraphBuilder
from mimo_edge.export.graph.cpu_ffn import feed_forward
from mimo_edge.export.graph.cpu_weights import MS, CpuWeights
from mimo_edge.spec import AttentionSpec, ModelSpec


@dataclass(frozen=True)
class Block:
    """One block: `prefix` of its parameters, `suffix` of its inputs past_k, past_v and outputs new_k, new_v, its kinds.

    With `last_only` rows before the last one leave keys and values alone; the mask has one row.
    """

    prefix: str
    suffix: str
    attention: str
    ffn: str
    last_only: bool = False

    @property
    def rows(self) -> str | int:
        """How many come out."""
        return 1 if self.last_only else "T"


class CpuBlocks:
    """Emits blocks into a graph with the inputs `tokens` and `positions` [T] and mask.<kind> of every kind in use."""

    def __init__(self, g: GraphBuilder, spec: ModelSpec, weights: CpuWeights):
        self._g, self._spec, self._weights = g, spec, weights
        self._rotations: dict[tuple, tuple[str, str]] = {}
        self._masks: dict[str, tuple[str, str]] = {}

    def emit(self, b: Block, x: str, branch: str | None) -> tuple[str, str]:
        """The block on the residual x + branch; returns the next residual, not yet added up: the norms add."""
        p = b.prefix
        x, h = self.norm(x, branch, f"{p}.attn_norm")
        y = self._attention(b, h)
        if b.last_only:
            x = self._last(x, f"{p}.x")
        if self._spec.post_norms:
            y = self.rms(y, f"{p}.post_attn_norm")
        x, h = self.norm(x, y, f"{p}.ffn_norm", b.rows)
        y = feed_forward(self._g, self._weights, self._spec, b.ffn, p, h, b.rows)
        if self._spec.post_norms:
            y = self.rms(y, f"{p}.post_ffn_norm")
        return x, y

    def _last(self, rows: str, name: str) -> str:
        return self._g.op("Gather", rows, self._g.constant([-1]), name=f"{name}.last", axis=0)

    def rms(self, x: str, name: str) -> str:
        """RMS norm with the parameter `name`."""
        gamma = self._weights.vector(self._g, name)
        return self._g.op("RMSNormalization", x, gamma, name=f"{name}.y", axis=-1, epsilon=self._spec.norm_eps)

    def norm(self, x: str, branch: str | None, name: str, rows: str | int = "T") -> tuple[str, str]:
        """(x + branch, its norm), in one op."""
        if branch is None:
            return x, self.rms(x, name)
        total, shape = f"{name}.x", [rows, self._spec.hidden_size]
        h = self._g.node(
            "SkipSimplifiedLayerNormalization", [x, branch, self._weights.vector(self._g, name)],
            outputs=[f"{name}.y", "", "", total], domain=MS, shape=shape, epsilon=self._spec.norm_eps,
        )[0]  # fmt: skip
        self._g.declare(total, shape)
        return total, h

    def _attention(self, b: Block, h: str) -> str:
        g, a, p = self._g, self._spec.attention[b.attention], b.prefix
        rows = self._weights.linear(g, h, f"{p}.qkv", bias=f"{p}.qkv.bias" if a.qkv_bias else None)
        sizes = g.constant([a.q_rows + a.k_rows, a.v_rows])
        qk, v = g.node("Split", [rows, sizes], outputs=[f"{p}.qk", f"{p}.v"], axis=1)
        if a.value_scale != 1:
            v = g.op("Mul", v, g.constant(float(a.value_scale)), name=f"{p}.v.scaled")
        v = g.op("Reshape", v, g.constant([-1, a.kv_heads, a.v_head_dim]), outputs=[f"new_v{b.suffix}"])
        q, k = self._queries_and_keys(b, a, qk)
        g.output(k, ["T", a.kv_heads, a.head_dim])
        g.output(v, ["T", a.kv_heads, a.v_head_dim])
        bias = f"{p}.o.bias" if self._spec.output_bias else None
        if b.last_only:
            q = self._last(q, f"{p}.q")
        return self._weights.linear(g, self._attend(b, a, q, k, v), f"{p}.o", rows=b.rows, bias=bias)

    def _queries_and_keys(self, b: Block, a: AttentionSpec, qk: str) -> tuple[str, str]:
        """Norm and rotation, of queries and keys at once: [T, heads, D] and the output new_k [T, kv_heads, D]."""
        g, p, n = self._g, b.prefix, a.heads + a.kv_heads
        heads = g.constant([-1, n, a.head_dim])
        if a.qk_norm:
            x = g.op("Reshape", qk, heads, name=f"{p}.qk.heads")
            qk = g.op("RMSNormalization", x, self._qk_gamma(p, a), name=f"{p}.qk.norm", epsilon=self._spec.norm_eps)
        if a.rotary_dim:
            x = g.op("Reshape", qk, g.constant([1, -1, n * a.head_dim]), name=f"{p}.qk.flat")
            partial = {} if a.rotary_dim == a.head_dim else {"rotary_embedding_dim": a.rotary_dim}
            qk = g.op(
                "RotaryEmbedding", x, g.constant([0]), *self._rotation(a), name=f"{p}.qk.rotated", domain=MS,
                shape=[1, "T", n * a.head_dim], num_heads=n, **partial,
            )  # fmt: skip
        if a.rotary_dim or not a.qk_norm:
            qk = g.op("Reshape", qk, heads, name=f"{p}.qk.rows")
        q, k = g.node("Split", [qk, g.constant([a.heads, a.kv_heads])], outputs=[f"{p}.q", f"new_k{b.suffix}"], axis=1)
        return q, k

    def _qk_gamma(self, p: str, a: AttentionSpec) -> str:
        """Norm weights of all heads [1, heads + kv_heads, D]; ONNX Runtime folds this into a constant."""
        g, parts = self._g, []
        for part, n in (("q_norm", a.heads), ("k_norm", a.kv_heads)):
            shape = g.constant([1, n, a.head_dim])
            parts.append(g.op("Expand", self._weights.vector(g, f"{p}.{part}"), shape, name=f"{p}.{part}.heads"))
        return g.op("Concat", *parts, name=f"{p}.qk_norm", axis=1)

    def _rotation(self, a: AttentionSpec) -> tuple[str, str]:
        """cos and sin [T, rotary_dim/2] of this step's positions, shared by all layers that rotate alike."""
        key = (a.rope_theta, a.rotary_dim, a.rope_scaling)
        if key not in self._rotations:
            g, name = self._g, f"rope{len(self._rotations)}"
            column = g.op("Unsqueeze", "positions", g.constant([1]), name=f"{name}.column")
            angles = g.op(
                "Mul", g.op("Cast", column, name=f"{name}.float", to=1), g.constant(rope_frequencies(a).numpy()[None]),
                name=f"{name}.angles",
            )  # fmt: skip
            self._rotations[key] = (g.op("Cos", angles, name=f"{name}.cos"), g.op("Sin", angles, name=f"{name}.sin"))
        return self._rotations[key]

    def _attend(self, b: Block, a: AttentionSpec, q: str, k: str, v: str) -> str:
        """Softmax attention over past and new rows without copying the past: [rows, heads * v_head_dim].

        The query heads that share a kv head are the rows of one product [rows * group, D] a kv head; cached rows are
        its right side as they lie in memory (transBatchB reads [P, kv_heads, D] as [kv_heads, P, D]).
        """
        g, p, group = self._g, b.prefix, a.heads // a.kv_heads
        past = self._past(b, a)
        mask, sizes = self._mask(b, a)
        q = self._by_kv_head(q, a.kv_heads, group, a.head_dim, f"{p}.q")
        products = group if b.last_only else f"T*{group}"
        scores = [
            g.op("FusedMatMul", q, x, name=f"{p}.scores", domain=MS, shape=[a.kv_heads, products, dim],
                 alpha=a.scale, transB=1, transBatchB=1)
            for x, dim in ((past[0], f"P{b.suffix}"), (k, "T"))
        ]  # fmt: skip
        if a.sinks:
            scores.append(self._sink_column(b, a))
        masked = g.op("Add", g.op("Concat", *scores, name=f"{p}.all_scores", axis=-1), mask, name=f"{p}.masked")
        probs = g.op("Softmax", masked, name=f"{p}.probs", axis=-1)
        parts = g.node("Split", [probs, sizes], name=f"{p}.probs", outputs=3 if a.sinks else 2, axis=-1)
        y = g.op("Add", *[
            g.op("FusedMatMul", s, x, name=f"{p}.values", domain=MS, shape=[a.kv_heads, products, a.v_head_dim],
                 transBatchB=1)
            for s, x in zip(parts[:2], (past[1], v), strict=True)
        ], name=f"{p}.attended")  # fmt: skip
        if a.kv_heads > 1:
            y = g.op("Reshape", y, g.constant([a.kv_heads, -1, group, a.v_head_dim]), name=f"{p}.attended.heads")
            y = g.op("Transpose", y, name=f"{p}.attended.rows", perm=[1, 0, 2, 3])
        return g.op("Reshape", y, g.constant([-1, a.heads * a.v_head_dim]), name=f"{p}.attended.flat")

    def _past(self, b: Block, a: AttentionSpec) -> tuple[str, str]:
        return (
            self._g.input(f"past_k{b.suffix}", [f"P{b.suffix}", a.kv_heads, a.head_dim]),
            self._g.input(f"past_v{b.suffix}", [f"P{b.suffix}", a.kv_heads, a.v_head_dim]),
        )

    def _by_kv_head(self, q: str, kv_heads: int, group: int, dim: int, name: str) -> str:
        """[T, heads, D] -> [kv_heads, T * group, D]; a copy only where there are several kv heads."""
        g = self._g
        if kv_heads > 1:
            q = g.op("Reshape", q, g.constant([-1, kv_heads, group, dim]), name=f"{name}.groups")
            q = g.op("Transpose", q, name=f"{name}.groups", perm=[1, 0, 2, 3])
        return g.op("Reshape", q, g.constant([kv_heads, -1, dim]), name=f"{name}.by_kv_head")

    def _sink_column(self, b: Block, a: AttentionSpec) -> str:
        """The sinks as one more column of scores, [kv_heads, rows * group, 1]."""
        g, p, group = self._g, b.prefix, a.heads // a.kv_heads
        flat = self._weights.vector(g, f"{p}.sinks")
        sinks = g.op("Reshape", flat, g.constant([a.kv_heads, 1, group]), name=f"{p}.sinks.by_kv")
        if not b.last_only:
            shape = g.constant([a.kv_heads]), self._count("tokens"), g.constant([group])
            rows = g.op("Concat", *shape, name=f"{p}.sinks.shape", axis=0)
            sinks = g.op("Expand", sinks, rows, name=f"{p}.sinks.rows")
        return g.op("Reshape", sinks, g.constant([a.kv_heads, -1, 1]), name=f"{p}.sinks.column")

    def _count(self, value: str) -> str:
        return self._g.op("Shape", value, name=f"{value}.count", start=0, end=1)

    def _mask(self, b: Block, a: AttentionSpec) -> tuple[str, str]:
        """(mask [rows * group, columns of scores], sizes of their parts); once a kind, at its first block."""
        kind = b.attention
        if kind not in self._masks:
            g, group, name = self._g, a.heads // a.kv_heads, f"mask.{kind}"
            mask = name
            sizes = [self._count(f"past_k{b.suffix}"), self._count("tokens")]
            if a.sinks:  # a sink is visible to every row
                pads = g.constant([0, 0, 0, 1])
                mask = g.op("Pad", mask, pads, g.constant(0.0), name=f"{name}.padded")
                sizes.append(g.constant([1]))
            if group > 1:
                mask = g.op("Unsqueeze", mask, g.constant([1]), name=f"{name}.rows")
                mask = g.op("Tile", mask, g.constant([1, group, 1]), name=f"{name}.tiled")
                columns = g.op("Shape", mask, name=f"{name}.columns", start=2, end=3)
                shape = g.op("Concat", g.constant([-1]), columns, name=f"{name}.shape", axis=0)
                mask = g.op("Reshape", mask, shape, name=f"{name}.by_group")
            self._masks[kind] = (mask, g.op("Concat", *sizes, name=f"{name}.sizes", axis=0))
        return self._masks[kind]
