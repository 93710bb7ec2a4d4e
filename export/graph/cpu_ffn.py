"""Feed-forward of the CPU form: dense, gated, mixture of experts."""

from __future__ import annotations

from mimo_edge.export.graph.builder import GraphBuilder
from mimo_edge.export.graph.cpu_weights import MS, CpuWeights
from mimo_edge.export.graph.routing import block_mask, expert_weights
from mimo_edge.spec import FeedForwardSpec, GateSpec, ModelSpec, MoeSpec


def feed_forward(
    g: GraphBuilder, w: CpuWeights, spec: ModelSpec, kind: str, p: str, x: str, rows: str | int = "T"
) -> str:
    """Feed-forward `kind` with the parameters of block `p` on normalised rows x [rows, hidden]."""
    f = spec.ffn[kind]
    bias = f"{p}.down.bias" if spec.output_bias else None
    if f.moe:
        y = _mixture(g, w, f, f.moe, p, x, rows)
        return g.op("Add", y, w.vector(g, bias), name=f"{p}.moe.biased") if bias else y
    h = _activated(g, w, f, p, x, rows)
    if f.gate:
        h = _masked(g, w, f, f.gate, p, x, h)
    return w.linear(g, h, f"{p}.down", rows=rows, bias=bias)


def _activated(g: GraphBuilder, w: CpuWeights, f: FeedForwardSpec, p: str, x: str, rows: str | int) -> str:
    both = w.linear(g, x, f"{p}.gate_up", rows=rows)
    halves = g.constant([f.intermediate, f.intermediate])
    gate, up = g.node("Split", [both, halves], outputs=[f"{p}.gate_rows", f"{p}.up_rows"], axis=1)
    if f.activation == "silu":  # QuickGelu is x * sigmoid(alpha x)
        gate = g.op("QuickGelu", gate, name=f"{p}.act", domain=MS, shape=[rows, f.intermediate], alpha=1.0)
    else:
        gate = g.op("Gelu", gate, name=f"{p}.act", approximate="tanh")
    return g.op("Mul", gate, up, name=f"{p}.act_up")


def _masked(g: GraphBuilder, w: CpuWeights, f: FeedForwardSpec, gate: GateSpec, p: str, x: str, h: str) -> str:
    """h times each row's own 0/1 block mask."""
    column = g.op("Unsqueeze", block_mask(g, w, p, x), g.constant([2]), name=f"{p}.gate.column")
    blocks = g.op("Reshape", h, g.constant([-1, f.intermediate // gate.block, gate.block]), name=f"{p}.blocks")
    kept = g.op("Mul", blocks, column, name=f"{p}.kept")
    return g.op("Reshape", kept, g.constant([-1, f.intermediate]), name=f"{p}.kept.rows")


def _mixture(g: GraphBuilder, w: CpuWeights, f: FeedForwardSpec, moe: MoeSpec, p: str, x: str, total: str | int) -> str:
    weights = expert_weights(g, w, moe, p, x)
    zero = g.constant(0.0)
    y = g.op("Mul", x, zero, name=f"{p}.moe.start")
    used = g.op("ReduceMax", weights, g.constant([0]), name=f"{p}.moe.used", keepdims=0)
    used = g.op("Greater", used, zero, name=f"{p}.moe.used")
    for e in range(moe.experts):
        condition = g.op("Gather", used, g.constant(e), name=f"{p}.experts.{e}.used", axis=0)
        then, otherwise = g.branch(), g.branch()
        added = _expert(then, w, f, f"{p}.experts.{e}", e, x, weights, y)
        then.output(added, [total, "hidden"])
        otherwise.output(otherwise.op("Identity", y, name=f"{p}.experts.{e}.skipped"), [total, "hidden"])
        y = g.op("If", condition, name=f"{p}.experts.{e}.y", then_branch=then.graph("then"),
                 else_branch=otherwise.graph("else"))  # fmt: skip
    return y


def _expert(g: GraphBuilder, w: CpuWeights, f: FeedForwardSpec, p: str, e: int, x: str, weights: str, y: str) -> str:
    """In a branch: y + expert(x) * weight, computed for the rows that chose expert e only."""
    weight = g.op("Gather", weights, g.constant([e]), name=f"{p}.weight", axis=1)
    column = g.op("Squeeze", weight, g.constant([1]), name=f"{p}.column")
    rows = g.op("NonZero", column, name=f"{p}.nonzero")
    rows = g.op("Squeeze", rows, g.constant([0]), name=f"{p}.rows")
    h = _activated(g, w, f, p, g.op("Gather", x, rows, name=f"{p}.x", axis=0), "rows")
    out = w.linear(g, h, f"{p}.down", rows="rows")
    out = g.op("Mul", out, g.op("Gather", weight, rows, name=f"{p}.row_weight", axis=0), name=f"{p}.weighted")
    at = g.op("Unsqueeze", rows, g.constant([1]), name=f"{p}.at")
    return g.op("ScatterND", y, at, out, name=f"{p}.sum", reduction="add")
