"""The table of a model's parameters: one place for names, shapes and kinds.

Names (i a layer, e an expert, m an MTP head; linear weights are [N out, K in]):

    embed                      [vocab, hidden]
    layers.i.attn_norm         [hidden]            layers.i.qkv   [q+k+v rows, hidden]   (.bias [q+k+v rows])
    layers.i.q_norm, k_norm    [head_dim]          layers.i.sinks [heads]
    layers.i.o                 [hidden, heads*v_head_dim]   (.bias [hidden] with output_bias)
    layers.i.post_attn_norm    [hidden]            layers.i.ffn_norm [hidden]
    layers.i.gate_up           [2*intermediate, hidden]: all gate rows, then all up rows
    layers.i.down              [hidden, intermediate]   (.bias [hidden] with output_bias: of the whole feed-forward,
                               experts included)           layers.i.post_ffn_norm [hidden]
    layers.i.router            [experts, hidden]   layers.i.router_bias [experts]
    layers.i.experts.e.gate_up, layers.i.experts.e.down
    layers.i.gate.w1 [rank, hidden]  layers.i.gate.w2 [blocks, rank]  layers.i.gate.bias [blocks]
    norm [hidden]              head [vocab, hidden]
    mtp.m.token_norm, mtp.m.hidden_norm, mtp.m.norm [hidden]      mtp.m.proj [hidden, 2*hidden]
    mtp.m.layer.*              as layers.i.*

A quantised parameter is stored as three tensors (see `stored`): NAME.q, NAME.scales, NAME.zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mimo_edge.spec import ModelSpec, TensorQuant


@dataclass(frozen=True)
class Param:
    """`kind` is attention, ffn, embedding, head (may be quantised) or float (never is)."""

    name: str
    shape: tuple[int, ...]
    kind: str = "float"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Stored:
    """One tensor of weights.safetensors. dtype is F32 or U8."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (4 if self.dtype == "F32" else 1)


def _layer(spec: ModelSpec, prefix: str, attention: str, ffn: str) -> list[Param]:
    a, f, hidden = spec.attention[attention], spec.ffn[ffn], spec.hidden_size
    rows = a.q_rows + a.k_rows + a.v_rows
    out = [Param(f"{prefix}.attn_norm", (hidden,)), Param(f"{prefix}.qkv", (rows, hidden), "attention")]
    if a.qkv_bias:
        out.append(Param(f"{prefix}.qkv.bias", (rows,)))
    if a.qk_norm:
        out += [Param(f"{prefix}.q_norm", (a.head_dim,)), Param(f"{prefix}.k_norm", (a.head_dim,))]
    if a.sinks:
        out.append(Param(f"{prefix}.sinks", (a.heads,)))
    out.append(Param(f"{prefix}.o", (hidden, a.heads * a.v_head_dim), "attention"))
    if spec.output_bias:
        out.append(Param(f"{prefix}.o.bias", (hidden,)))
    if spec.post_norms:
        out.append(Param(f"{prefix}.post_attn_norm", (hidden,)))
    out.append(Param(f"{prefix}.ffn_norm", (hidden,)))
    if f.moe:
        out += [Param(f"{prefix}.router", (f.moe.experts, hidden)), Param(f"{prefix}.router_bias", (f.moe.experts,))]
    for expert in [f"{prefix}.experts.{e}" for e in range(f.moe.experts)] if f.moe else [prefix]:
        out.append(Param(f"{expert}.gate_up", (2 * f.intermediate, hidden), "ffn"))
        out.append(Param(f"{expert}.down", (hidden, f.intermediate), "ffn"))
    if spec.output_bias:
        out.append(Param(f"{prefix}.down.bias", (hidden,)))
    if f.gate:
        blocks = f.intermediate // f.gate.block
        out += [
            Param(f"{prefix}.gate.w1", (f.gate.rank, hidden)),
            Param(f"{prefix}.gate.w2", (blocks, f.gate.rank)),
            Param(f"{prefix}.gate.bias", (blocks,)),
        ]
    if spec.post_norms:
        out.append(Param(f"{prefix}.post_ffn_norm", (hidden,)))
    return out


def layer_params(spec: ModelSpec, i: int) -> list[Param]:
    """Parameters of layer `i`."""
    return _layer(spec, f"layers.{i}", spec.layers[i].attention, spec.layers[i].ffn)


def mtp_params(spec: ModelSpec, m: int) -> list[Param]:
    """Parameters of MTP head `m`."""
    assert spec.mtp is not None
    hidden, p = spec.hidden_size, f"mtp.{m}"
    return [
        Param(f"{p}.token_norm", (hidden,)),
        Param(f"{p}.hidden_norm", (hidden,)),
        Param(f"{p}.proj", (hidden, 2 * hidden), "attention"),
        *_layer(spec, f"{p}.layer", spec.mtp.attention, spec.mtp.ffn),
        Param(f"{p}.norm", (hidden,)),
    ]


def parameters(spec: ModelSpec) -> list[Param]:
    """Every parameter of the model, in the order in which the bundle stores them."""
    out = [Param("embed", (spec.vocab_size, spec.hidden_size), "embedding")]
    for i in range(len(spec.layers)):
        out += layer_params(spec, i)
    out.append(Param("norm", (spec.hidden_size,)))
    if spec.separate_head:
        out.append(Param("head", (spec.vocab_size, spec.hidden_size), "head"))
    for m in range(spec.mtp.heads if spec.mtp else 0):
        out += mtp_params(spec, m)
    return out


def count(spec: ModelSpec) -> int:
    """Number of weights; a tied head is counted once."""
    return sum(p.elements for p in parameters(spec) if not (p.name == "head" and spec.tied))


def stored(param: Param, quant: TensorQuant | None) -> tuple[Stored, ...]:
    """Tensors that hold `param` in the bundle.

    Quantised [N, K]: q uint8 [N, K/G, G*bits/8], low nibble first, along K; scales float32 [N, K/G] (each a float16
    value, so that all targets dequantise alike); zeros uint8 [N, ceil(K/G*bits/8)], packed like q.
    Weight = (q - zero) * scale. This is also the layout of com.microsoft::MatMulNBits.
    """
    if quant is None:
        return (Stored(param.name, "F32", param.shape),)
    n, k = param.shape
    groups = k // quant.group
    return (
        Stored(f"{param.name}.q", "U8", (n, groups, quant.group * quant.bits // 8)),
        Stored(f"{param.name}.scales", "F32", (n, groups)),
        Stored(f"{param.name}.zeros", "U8", (n, -(-groups * quant.bits // 8))),
    )


def stored_tensors(spec: ModelSpec) -> list[Stored]:
    """Every tensor of weights.safetensors, in file order."""
    return [s for p in parameters(spec) for s in stored(p, spec.quant.of(p.kind))]
