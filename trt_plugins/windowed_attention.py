"""WindowedAttention: rotation, norms, sinks, window and the keys and values' way into their pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mimo_edge.kernels.launch import Buffer
from mimo_edge.kernels.windowed_attention import variants
from mimo_edge.spec import AttentionSpec
from mimo_edge.trt_plugins.op import SHORT, Op, Tensor, Work, check_flags
from mimo_edge.trt_plugins.rotation import angles

_TUNING = 9  # fields of the kernels' Tuning


@dataclass(frozen=True)
class WindowedAttention(Op):
    """y float16 [rows, heads * v_head_dim] of qkv float16 [rows, q + k + v], over the pools and the step's own rows.

    AttentionSpec says what the fields mean; window 0 is none. `blocks` blocks of `block` slots are a sequence's pages,
    or its one ring. Short steps, and long ones of layers without a window, write their rows into the pools, which
    outputs and inputs share. Long steps of window layers leave them in k_new and v_new until the step is committed.
    """

    kind: ClassVar[str] = "WindowedAttention"
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    rotary_dim: int
    window: int
    scale: float
    value_scale: float
    eps: float
    sinks: int
    qk_norm: int
    block: int
    blocks: int
    tuning: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "v_head_dim", "block", "blocks"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} {getattr(self, name)} (allowed: 1 and more)")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} (allowed: multiples of kv_heads, {self.kv_heads})")
        if not 0 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim {self.rotary_dim} (allowed: even, 0 to head_dim {self.head_dim})")
        if self.window < 0 or (self.window and self.blocks != 1):
            raise ValueError(f"window {self.window} (allowed: 0, or more with one block)")
        check_flags(sinks=self.sinks, qk_norm=self.qk_norm)
        if len(self.tuning) != _TUNING or min(self.tuning) < 1:
            raise ValueError(f"tuning {self.tuning} (allowed: {_TUNING} numbers from 1 on)")

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.v_head_dim,
            self.rotary_dim,
            1.0,  # frequencies are an input of Rotation
            self.scale,
            window=self.window or None,
            value_scale=self.value_scale,
            sinks=bool(self.sinks),
            qk_norm=bool(self.qk_norm),
        )

    def _pools(self, prefix: str) -> tuple[Tensor, ...]:
        count = "sequences" if self.window else "pages"
        dims = {"k_pool": self.head_dim, "v_pool": self.v_head_dim}
        return tuple(
            Tensor(prefix + name, "fp16", (count, self.block, self.kv_heads, dim)) for name, dim in dims.items()
        )

    def inputs(self) -> tuple[Tensor, ...]:
        a = self.spec
        norms = (Tensor("q_norm", "fp32", (self.head_dim,)), Tensor("k_norm", "fp32", (self.head_dim,)))
        return (
            Tensor("qkv", "fp16", ("rows", a.q_rows + a.k_rows + a.v_rows)),
            angles(self.rotary_dim),
            *self._pools(""),
            Tensor("positions", "i32", ("rows",)),
            Tensor("sequences", "i32", ("rows",)),
            Tensor("lengths", "i32", (1,)),
            Tensor("table", "i32", (1, self.blocks)),
            *((Tensor("sinks", "fp32", (self.heads,)),) if self.sinks else ()),
            *(norms if self.qk_norm else ()),
        )

    def outputs(self) -> tuple[Tensor, ...]:
        a = self.spec
        new = (Tensor("k_new", "fp16", ("rows", a.k_rows)), Tensor("v_new", "fp16", ("rows", a.v_rows)))
        y = Tensor("y", "fp16", ("rows", self.heads * self.v_head_dim))
        return y, *self._pools("new_"), *(new if self.window else ())

    def in_place(self) -> Mapping[str, str]:
        return {"new_k_pool": "k_pool", "new_v_pool": "v_pool"}

    def scratch(self, rows: int) -> dict[str, Buffer]:
        if rows <= SHORT:
            return variants.decode_scratch(rows, self.spec, self._pool, variants.Tuning(*self.tuning))
        return {"q": variants.prefill_scratch(rows, self.spec)["q"]}

    def work(self, rows: int) -> Work:
        where = ("positions", "sequences", "lengths", "table", "k_pool", "v_pool", "qkv", "rotation", "y")
        names: dict[str, str | None] = {name: name for name in where}
        names |= {"sinks": "sinks" if self.sinks else None}
        names |= {name: name if self.qk_norm else None for name in ("q_norm", "k_norm")}
        a, tuned = self.spec, variants.Tuning(*self.tuning)
        if rows <= SHORT:
            scratch = {"parts": "parts", "counters": "counters"}
            return (variants.decode(rows, a, self._pool, self.eps, tuned=tuned, **names, **scratch),)  # type: ignore[arg-type]
        new = {"k_new": "k_new", "v_new": "v_new"} if self.window else {}
        return variants.prefill(rows, a, self._pool, self.eps, tuned=tuned, q="q", **names, **new)  # type: ignore[arg-type]

    @property
    def _pool(self) -> variants.Pool:
        return variants.Pool(1, self.blocks, self.block)
