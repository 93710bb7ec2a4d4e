"""One block of the model, stopping in front of every product: calibration looks at what each is about to multiply.

The arithmetic is mimo_edge.backends.oracle's; only the order of control is turned around.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from mimo_edge.backends import oracle
from mimo_edge.spec import LayerSpec, ModelSpec

Walk = Generator[tuple[str, Tensor], Tensor, Tensor]
# yields (name of the weights, input rows [T, K]); is sent the rows to go on with (the same, or rounded ones) once the
# weights may be read; returns the block's output [T, hidden]


def block(spec: ModelSpec, weights: oracle.Weights, prefix: str, kinds: LayerSpec, x: Tensor) -> Walk:
    """oracle.block on rows x [T, hidden] at positions 0..T-1, without a past."""

    def get(name: str) -> Tensor:
        return weights.get(f"{prefix}.{name}")

    h = oracle.rms_norm(x, get("attn_norm"), spec.norm_eps)
    h = yield f"{prefix}.qkv", h
    attention = spec.attention[kinds.attention]
    y, _, _ = oracle.attended(attention, spec.norm_eps, get, h, torch.arange(len(x)), None)
    y = yield f"{prefix}.o", y
    x = x + _branch(spec, get, y @ get("o").T, "o.bias", "post_attn_norm")
    h = oracle.rms_norm(x, get("ffn_norm"), spec.norm_eps)
    y = yield from _feed_forward(spec, get, prefix, kinds, h)
    return x + _branch(spec, get, y, "down.bias", "post_ffn_norm")


def mtp(spec: ModelSpec, weights: oracle.Weights, m: int, hidden: Tensor, tokens: Tensor) -> Walk:
    """MTP head m on rows 0..T-1: hidden [T, hidden] of the main model, tokens int64 [T] its look-ahead tokens."""
    assert spec.mtp is not None
    pair = oracle.mtp_pair(spec, weights, m, hidden, tokens, torch.arange(len(tokens)))
    pair = yield f"mtp.{m}.proj", pair
    x = pair @ weights.get(f"mtp.{m}.proj").T
    return (yield from block(spec, weights, f"mtp.{m}.layer", LayerSpec(spec.mtp.attention, spec.mtp.ffn), x))


def _branch(spec: ModelSpec, get, y: Tensor, bias: str, norm: str) -> Tensor:
    y = y + get(bias) if spec.output_bias else y
    return oracle.rms_norm(y, get(norm), spec.norm_eps) if spec.post_norms else y


def _feed_forward(spec: ModelSpec, get, prefix: str, kinds: LayerSpec, h: Tensor) -> Walk:
    f = spec.ffn[kinds.ffn]
    if f.moe is None:
        h = yield f"{prefix}.gate_up", h
        h = yield f"{prefix}.down", oracle.activations(f, get, h)
        return h @ get("down").T
    chosen, weight = oracle.route(f.moe, get, h)
    y = torch.zeros_like(h)
    for e in range(f.moe.experts):
        row, rank = (chosen == e).nonzero(as_tuple=True)
        rows = yield f"{prefix}.experts.{e}.gate_up", h[row]
        rows = yield f"{prefix}.experts.{e}.down", oracle.activated(f, get(f"experts.{e}.gate_up"), rows)
        y[row] += (rows @ get(f"experts.{e}.down").T) * weight[row, rank, None]
    return y
