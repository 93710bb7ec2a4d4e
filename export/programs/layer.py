"""One transformer block as launches; lower.py shows the order."""

from __future__ import annotations

from dataclasses import dataclass

from mimo_edge.export.programs.step import Step
from mimo_edge.kernels.int4_linear import variants as linear
from mimo_edge.kernels.norm import variants as norm
from mimo_edge.kernels.sparse_ffn import variants as sparse
from mimo_edge.kernels.windowed_attention import variants as attention
from mimo_edge.spec import GateSpec, LayerSpec, TensorQuant


@dataclass(frozen=True)
class Rows:
    """The inputs that say which rows a layer evaluates. `ring` is the entry of ProgramSet.rings for its keys and
    values, where that is not its kind of attention; `held` as windowed_attention's decode has it."""

    positions: str = "positions"
    lengths: str = "lengths"
    counts: str = "counts"
    ring: str | None = None
    held: bool = False


class Layer:
    """Adds the layer whose parameters begin with `prefix` to a step; its keys and values are PREFIX.k and PREFIX.v."""

    def __init__(self, step: Step, prefix: str, kinds: LayerSpec, rows: Rows | None = None):
        spec = step.spec
        self._step, self._spec, self._prefix, self._rows = step, spec, prefix, rows or Rows()
        self._kind = kinds.attention
        self._a, self._f = spec.attention[kinds.attention], spec.ffn[kinds.ffn]

    def add(self) -> None:
        self._qkv()
        self._attention()
        self._behind("o", self._a.heads * self._a.v_head_dim, "attended", self._spec.quant.attention, "post_attn_norm")
        self._feed_forward()

    def add_keys(self) -> None:
        """Of a long step, keys and values alone: what later rows need of these."""
        self._qkv()
        self._attention(attend=False)

    def _feed_forward(self) -> None:
        if self._f.gate:
            self._gated(self._f.gate)
        else:
            self._gate_up()
            self._behind("down", self._f.intermediate, "h", self._spec.quant.ffn, "post_ffn_norm")

    def _name(self, part: str) -> str:
        return f"{self._prefix}.{part}"

    def _normed(self) -> dict[str, str]:
        """Scratch for the rows behind a norm."""
        return {"normed": self._step.buffer("normed", "fp16", (self._step.rows, self._spec.hidden_size))}

    def _qkv(self) -> None:
        s, a, hidden, quant = self._step, self._a, self._spec.hidden_size, self._spec.quant.attention
        assert quant is not None
        n = a.q_rows + a.k_rows + a.v_rows
        y = s.buffer("qkv", "fp16", (s.rows, n))
        bias = self._name("qkv.bias") if a.qkv_bias else None
        names = {"x": "x", "w": self._name("qkv"), "y": y, "norm": self._name("attn_norm"), "bias": bias}
        eps = self._spec.norm_eps
        if s.short:
            tuned = s.tuning.product("linear", n, hidden)
            s.add(linear.decode(s.rows, n, hidden, quant, eps=eps, tuned=tuned, **names, **self._normed()))
        else:
            tuned = s.tuning.many(s.rows)
            s.add(linear.prefill(s.rows, n, hidden, quant, eps=eps, tuned=tuned, **names, **self._normed()))

    def _attention(self, attend: bool = True) -> None:
        s, a, kind, rows = self._step, self._a, self._kind, self._rows
        ring = s.rings.get(rows.ring or kind)
        pool = attention.Pool(1, s.pages, 64) if ring is None else attention.Pool(1, 1, ring)
        where = {
            "positions": rows.positions,
            "sequences": "sequences",
            "lengths": rows.lengths,
            "table": "table.pages" if ring is None else "table.rings",
            "k_pool": self._name("k"),
            "v_pool": self._name("v"),
        }
        names = {
            **where,
            "qkv": "qkv",
            "rotation": f"rotation.{kind}",
            "y": s.buffer("attended", "fp16", (s.rows, a.heads * a.v_head_dim)),
            "sinks": self._name("sinks") if a.sinks else None,
            "q_norm": self._name("q_norm") if a.qk_norm else None,
            "k_norm": self._name("k_norm") if a.qk_norm else None,
        }
        eps, tuned = self._spec.norm_eps, s.tuning.attention
        if s.short:
            scratch = s.keep(attention.decode_scratch(s.rows, a, pool, tuned), f".{kind}")
            s.add(attention.decode(s.rows, a, pool, eps, held=rows.held, tuned=tuned, **names, **scratch))
            return
        scratch = attention.prefill_scratch(s.rows, a)
        new = {n: b for n, b in scratch.items() if n.endswith("_new")}  # kept until commit, so of this layer alone
        new = s.keep(new, f".{self._prefix}")
        shared = s.keep({n: b for n, b in scratch.items() if n not in new}, "")
        launches = attention.prefill(s.rows, a, pool, eps, held=rows.held, tuned=tuned, **names, **shared, **new)
        s.add(launches if attend else launches[0])
        if ring is not None:
            s.commit.append(attention.commit(s.rows, a, pool, counts=rows.counts, **where, **new))

    def _behind(self, part: str, k: int, x: str, quant: TensorQuant | None, post_norm: str) -> None:
        """The product that ends a half of the layer, and its way into the residual stream."""
        s, n = self._step, self._spec.hidden_size
        assert quant is not None
        bias = self._name(f"{part}.bias") if self._spec.output_bias else None
        post = self._spec.post_norms
        y = s.buffer("y", "fp16", (s.rows, n)) if post else "x"
        names = {"x": x, "w": self._name(part), "y": y, "bias": bias, "residual": None if post else "x"}
        out = "fp16" if post else "fp32"
        if s.short:
            s.add(linear.decode(s.rows, n, k, quant, out=out, tuned=s.tuning.product("linear", n, k), **names))
        else:
            s.add(linear.prefill(s.rows, n, k, quant, out=out, tuned=s.tuning.many(s.rows), **names))
        if post:
            s.add(norm.add_norm(s.rows, n, self._spec.norm_eps, y=y, w=self._name(post_norm), x="x"))

    def _gate_up(self) -> None:
        s, n, k, quant = self._step, self._f.intermediate, self._spec.hidden_size, self._spec.quant.ffn
        assert quant is not None
        h = s.buffer("h", "fp16", (s.rows, n))
        names = {"x": "x", "w": self._name("gate_up"), "h": h, "norm": self._name("ffn_norm")}
        options = {"eps": self._spec.norm_eps, "activation": self._f.activation}
        if s.short:
            tuned = s.tuning.product("gate_up", n, k)
            s.add(linear.decode_gate_up(s.rows, n, k, quant, tuned=tuned, **names, **options, **self._normed()))
        else:
            tuned = s.tuning.many(s.rows)
            s.add(linear.prefill_gate_up(s.rows, n, k, quant, tuned=tuned, **names, **options, **self._normed()))

    def _gated(self, gate: GateSpec) -> None:
        """The gate's masks, then both products over the blocks that some row keeps."""
        s, n, k, quant = self._step, self._f.intermediate, self._spec.hidden_size, self._spec.quant.ffn
        assert quant is not None
        names = {
            "x": "x",
            "norm": self._name("ffn_norm"),
            "eps": self._spec.norm_eps,
            "w1": self._name("gate.w1"),
            "w2": self._name("gate.w2"),
            "bias": self._name("gate.bias"),
            **self._normed(),
            "ranks": s.buffer("ranks", "fp32", (s.rows, gate.rank)),
            "keep": s.buffer("keep", "u8", (s.rows, n // gate.block)),
            "gate_up": self._name("gate_up"),
            "down": self._name("down"),
            "h": s.buffer("h", "fp16", (s.rows, n)),
            "down_bias": self._name("down.bias") if self._spec.output_bias else None,
            "residual": "x",
            "y": "x",
            "activation": self._f.activation,
        }
        if s.short:
            behind = s.tuning.product("down_listed", k, n)
            names["listed"] = s.buffer("listed", "i32", (sparse.listed_size(n, gate.block, behind),))
            cuts = {"tuned_gate_up": s.tuning.product("gate_up_listed", n, k), "tuned_down": behind}
            s.add(sparse.decode_sparse(s.rows, n, k, quant, gate, **names, **cuts))
        else:
            s.add(sparse.prefill_sparse(s.rows, n, k, quant, gate, tuned=s.tuning.many(s.rows), **names))
