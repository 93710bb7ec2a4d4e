"""All ops by name."""

from __future__ import annotations

from mimo_edge.trt_plugins.int4_embedding import Int4Embedding
from mimo_edge.trt_plugins.int4_gate_up import Int4GateUp
from mimo_edge.trt_plugins.int4_head import Int4Head
from mimo_edge.trt_plugins.int4_linear import Int4Linear
from mimo_edge.trt_plugins.op import Op
from mimo_edge.trt_plugins.rotation import Rotation
from mimo_edge.trt_plugins.sparse_ffn import SparseFfn
from mimo_edge.trt_plugins.windowed_attention import WindowedAttention

OPS: dict[str, type[Op]] = {
    op.kind: op for op in (Int4Embedding, Rotation, Int4Linear, Int4GateUp, SparseFfn, WindowedAttention, Int4Head)
}
