"""The form of the model that ONNX Runtime runs on a CPU.

One sequence a run: T new rows, M rows of logits. Inputs and outputs (float32 unless said otherwise; kinds are the
spec's attention kinds, i the layers):

    tokens int64 [T]   positions int64 [T]   logit_rows int64 [M]
    mask.<kind>  [T, P+T]   added to scores: 0, or a large negative number where a key is not visible
    past_k.i     [P, kv_heads, head_dim]     past_v.i [P, kv_heads, v_head_dim]     written rows only; P may be 0
    logits [M, vocab]       hidden [T, hidden] before the final norm, of models with MTP heads
    new_k.i      [T, kv_heads, head_dim]     new_v.i  [T, kv_heads, v_head_dim]     rotated; scaled by value_scale

An MTP head is a graph of its own, with one past and one mask: T rows, each the hidden state of a position and the token
that this head pairs with it. All rows leave keys and values, the last one logits:

    tokens int64 [T]   positions int64 [T]   hidden [T, hidden]: of the main model, in a chain of the head before
    mask.<kind>  [1, P+T], in a chain [T, P+T]    past_k [P, kv_heads, head_dim]    past_v [P, kv_heads, v_head_dim]
    logits [1, vocab]       new_k, new_v          own [T, hidden] of chained heads: their hidden states
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx import ModelProto

from mimo_edge.bundle import head_graphs
from mimo_edge.export.graph.builder import BOOL, FLOAT, INT64, GraphBuilder
from mimo_edge.export.graph.cpu_block import Block, CpuBlocks
from mimo_edge.export.graph.cpu_weights import MS, CpuWeights, Entry
from mimo_edge.spec import ModelSpec

OPSET = 23  # the first with RMSNormalization
IR_VERSION = 10


def emit_cpu(
    spec: ModelSpec,
    header: Mapping[str, Entry],
    accuracy_level: int = 4,
    location: str = "weights.safetensors",
) -> ModelProto:
    """The CPU form; `header` says where in the file `location` each tensor of params.stored_tensors(spec) lies.

    accuracy_level 4 lets quantised products round activations to 8 bits (fast), 1 keeps them float32.
    """
    g, w = GraphBuilder(), CpuWeights(spec, header, accuracy_level, location)
    blocks = CpuBlocks(g, spec, w)
    for name, dim in (("tokens", "T"), ("positions", "T"), ("logit_rows", "M")):
        g.input(name, [dim], INT64)
    for kind in dict.fromkeys(layer.attention for layer in spec.layers):
        g.input(f"mask.{kind}", ["T", f"S.{kind}"])
    x, branch = _embedded(g, w, spec), None
    for i, layer in enumerate(spec.layers):
        x, branch = blocks.emit(Block(f"layers.{i}", f".{i}", layer.attention, layer.ffn), x, branch)
    if spec.mtp:
        x, branch = _hidden(g, spec, x, branch, "hidden"), None
    # only the rows whose logits are wanted go through the final norm and the head
    x = g.op("Gather", x, "logit_rows", name="last.x", axis=0)
    branch = branch and g.op("Gather", branch, "logit_rows", name="last.y", axis=0)
    _, h = blocks.norm(x, branch, "norm", rows="M")
    w.head(g, h, "M")
    g.output("logits", ["M", spec.vocab_size])
    return g.model("mimo-edge.cpu", {"": OPSET, MS: 1}, IR_VERSION)


def emit_cpu_head(
    spec: ModelSpec,
    header: Mapping[str, Entry],
    m: int,
    accuracy_level: int = 4,
    location: str = "weights.safetensors",
) -> ModelProto:
    """MTP head m, as oracle.mtp computes it; arguments as emit_cpu's."""
    assert spec.mtp is not None
    mtp, p = spec.mtp, f"mtp.{m}"
    g, w = GraphBuilder(), CpuWeights(spec, header, accuracy_level, location)
    blocks = CpuBlocks(g, spec, w)
    for name in ("tokens", "positions"):
        g.input(name, ["T"], INT64)
    h = g.input("hidden", ["T", spec.hidden_size])
    block = Block(f"{p}.layer", "", mtp.attention, mtp.ffn, last_only=not mtp.chained)
    g.input(f"mask.{mtp.attention}", [block.rows, "S"])
    x, branch = blocks.emit(block, w.linear(g, _pair(g, w, blocks, spec, p, h), f"{p}.proj"), None)
    if mtp.chained:
        own = _hidden(g, spec, x, branch, "own")
        x, branch = g.op("Gather", own, g.constant([-1]), name="last.x", axis=0), None
    _, h = blocks.norm(x, branch, f"{p}.norm", rows=1)
    w.head(g, h, 1)
    g.output("logits", [1, spec.vocab_size])
    return g.model(f"mimo-edge.cpu.mtp{m}", {"": OPSET, MS: 1}, IR_VERSION)


def emit_graphs(
    spec: ModelSpec, header: Mapping[str, Entry], name: str, accuracy_level: int
) -> Iterator[tuple[str, ModelProto]]:
    """(file name, graph) of the model, whose file is `name`, and of its MTP heads."""
    yield name, emit_cpu(spec, header, accuracy_level)
    for m, file in enumerate(head_graphs(name, spec)):
        yield file, emit_cpu_head(spec, header, m, accuracy_level)


def _embedded(g: GraphBuilder, w: CpuWeights, spec: ModelSpec) -> str:
    x = w.embedding(g, "tokens")
    return g.op("Mul", x, g.constant(float(spec.embed_scale)), name="embed.scaled") if spec.embed_scale != 1 else x


def _hidden(g: GraphBuilder, spec: ModelSpec, x: str, branch: str | None, name: str) -> str:
    """The output `name`: all rows of the residual, added up."""
    assert branch is not None
    g.op("Add", x, branch, outputs=[name])
    return g.output(name, ["T", spec.hidden_size])


def _pair(g: GraphBuilder, w: CpuWeights, blocks: CpuBlocks, spec: ModelSpec, p: str, hidden: str) -> str:
    """What a head's projection sees (oracle.mtp_pair): [T, 2 * hidden]."""
    mtp = spec.mtp
    assert mtp is not None
    e = _embedded(g, w, spec)
    if mtp.zero_first:
        kept = g.op("Cast", g.op("Cast", "positions", to=BOOL), name="embed.kept", to=FLOAT)
        e = g.op("Mul", e, g.op("Unsqueeze", kept, g.constant([1])), name="embed.kept.rows")
    if mtp.hidden == "post_norm":
        hidden = blocks.rms(hidden, "norm")
    halves = [blocks.rms(e, f"{p}.token_norm"), blocks.rms(hidden, f"{p}.hidden_norm")]
    return g.op("Concat", *(halves if mtp.order == "token_first" else halves[::-1]), name=f"{p}.pair", axis=1)
