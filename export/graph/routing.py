"""Choices a row makes for itself, in standard ONNX ops that every target runs: experts and channel blocks."""

from __future__ import annotations

from typing import Protocol

from mimo_edge.export.graph.builder import FLOAT, GraphBuilder
from mimo_edge.spec import MoeSpec


class Vectors(Protocol):
    def vector(self, g: GraphBuilder, name: str) -> str:
        """A float parameter of any rank, float32."""
        ...


def expert_weights(g: GraphBuilder, w: Vectors, moe: MoeSpec, p: str, x: str) -> str:
    """Each row's weight of every expert, 0 where not chosen: float32 [T, experts]; x is float32 [T, hidden]."""
    router = g.op("Gemm", x, w.vector(g, f"{p}.router"), name=f"{p}.router.product", transB=1)
    scores = g.op("Sigmoid", router, name=f"{p}.router.scores")
    biased = g.op("Add", scores, w.vector(g, f"{p}.router_bias"), name=f"{p}.router.biased")
    chosen = g.node("TopK", [biased, g.constant([moe.top_k])], name=f"{p}.router.top", outputs=2, axis=-1)[1]
    weight = g.op("GatherElements", scores, chosen, name=f"{p}.router.weight", axis=1)
    if moe.normalize:
        total = g.op("ReduceSum", weight, g.constant([1]), name=f"{p}.router.total", keepdims=1)
        weight = g.op("Div", weight, g.op("Add", total, g.constant(1e-20)), name=f"{p}.router.weight")
    if moe.scale != 1:
        weight = g.op("Mul", weight, g.constant(float(moe.scale)), name=f"{p}.router.weight")
    nothing = g.op("Mul", scores, g.constant(0.0), name=f"{p}.router.none")
    return g.op("ScatterElements", nothing, chosen, weight, name=f"{p}.router.weights", axis=1)


def block_mask(g: GraphBuilder, w: Vectors, p: str, x: str) -> str:
    """1 where a row keeps a block of channels, else 0: float32 [T, blocks]; x is float32 [T, hidden]."""
    low = g.op("Relu", g.op("Gemm", x, w.vector(g, f"{p}.gate.w1"), name=f"{p}.gate.low", transB=1))
    score = g.op(
        "Gemm", low, w.vector(g, f"{p}.gate.w2"), w.vector(g, f"{p}.gate.bias"), name=f"{p}.gate.score", transB=1
    )
    return g.op("Cast", g.op("Greater", score, g.constant(0.0)), name=f"{p}.gate.keep", to=FLOAT)
