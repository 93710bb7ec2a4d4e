"""The model in plain PyTorch, float32: what every other backend is compared with. Read it top to bottom.

Rows are flat: T new rows of one sequence, each with a position. Past keys and values are given as tensors with
the position that each slot holds; positions make the mask, so the order of slots does not matter.

    x = embed(tokens) * embed_scale
    for every layer:  x = x + attention(norm(x));  x = x + feed_forward(norm(x))
    logits = head(norm(x))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mimo_edge.spec import AttentionSpec, FeedForwardSpec, GateSpec, ModelSpec, MoeSpec


class Weights(Protocol):
    """Canonical parameters (mimo_edge/params.py) as float32 tensors, dequantised where they are stored quantised."""

    def get(self, name: str) -> Tensor: ...

    def rows(self, name: str, index: Tensor) -> Tensor:
        """Rows `index` of a 2-D parameter; the embedding is looked up without dequantising all of it."""
        ...


@dataclass(frozen=True)
class Past:
    """Committed rows of one layer: k [P, kv_heads, head_dim] rotated, v [P, kv_heads, v_head_dim] scaled,
    positions int64 [P]."""

    k: Tensor
    v: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Output:
    """logits [M, vocab] of the rows asked for; hidden [T, hidden] before the final norm; new (k, v) of every layer."""

    logits: Tensor
    hidden: Tensor
    new: list[tuple[Tensor, Tensor]]


def forward(
    spec: ModelSpec,
    weights: Weights,
    tokens: Tensor,
    positions: Tensor,
    past: Sequence[Past | None],
    logit_rows: Tensor | None = None,
) -> Output:
    """Evaluates rows `tokens` int64 [T] at `positions` int64 [T] against `past` (one entry a layer).

    Changes nothing. `logit_rows` int64 [M] picks the rows whose logits are computed; None means all.
    """
    x = weights.rows("embed", tokens) * spec.embed_scale
    new = []
    for i, kinds in enumerate(spec.layers):
        x, k, v = block(spec, weights, f"layers.{i}", kinds.attention, kinds.ffn, x, positions, past[i])
        new.append((k, v))
    rows = x if logit_rows is None else x[logit_rows]
    return Output(head(spec, weights, rms_norm(rows, weights.get("norm"), spec.norm_eps)), x, new)


def head(spec: ModelSpec, weights: Weights, x: Tensor) -> Tensor:
    """Logits [M, vocab] of normed hidden rows [M, hidden]."""
    return x @ weights.get("head" if spec.separate_head else "embed").T


def block(
    spec: ModelSpec,
    weights: Weights,
    prefix: str,
    attention_kind: str,
    ffn_kind: str,
    x: Tensor,
    positions: Tensor,
    past: Past | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One transformer block on x [T, hidden]. Returns the new x and this block's new k and v rows."""
    x, k, v = add_attention(spec, weights, prefix, attention_kind, x, positions, past)
    return add_feed_forward(spec, weights, prefix, ffn_kind, x), k, v


def add_attention(
    spec: ModelSpec, weights: Weights, prefix: str, kind: str, x: Tensor, positions: Tensor, past: Past | None
) -> tuple[Tensor, Tensor, Tensor]:
    """First half of a block: x with attention's output added, and the new k and v rows."""

    def get(name: str) -> Tensor:
        return weights.get(f"{prefix}.{name}")

    h = rms_norm(x, get("attn_norm"), spec.norm_eps)
    y, k, v = attention(spec.attention[kind], spec.norm_eps, get, h, positions, past)
    y = y + get("o.bias") if spec.output_bias else y
    return x + (rms_norm(y, get("post_attn_norm"), spec.norm_eps) if spec.post_norms else y), k, v


def add_feed_forward(spec: ModelSpec, weights: Weights, prefix: str, kind: str, x: Tensor) -> Tensor:
    """Second half of a block: x with the feed-forward's output added."""

    def get(name: str) -> Tensor:
        return weights.get(f"{prefix}.{name}")

    y = feed_forward(spec.ffn[kind], get, rms_norm(x, get("ffn_norm"), spec.norm_eps))
    y = y + get("down.bias") if spec.output_bias else y
    return x + (rms_norm(y, get("post_ffn_norm"), spec.norm_eps) if spec.post_norms else y)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def attention(
    a: AttentionSpec, eps: float, get, x: Tensor, positions: Tensor, past: Past | None
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, hidden] -> (y [T, hidden], k [T, kv_heads, head_dim], v [T, kv_heads, v_head_dim])."""
    y, k, v = attended(a, eps, get, x, positions, past)
    return y @ get("o").T, k, v


def attended(
    a: AttentionSpec, eps: float, get, x: Tensor, positions: Tensor, past: Past | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention before its output product: y is [T, heads*v_head_dim]."""
    rows = x @ get("qkv").T
    if a.qkv_bias:
        rows = rows + get("qkv.bias")
    q, k, v = rows.split([a.q_rows, a.k_rows, a.v_rows], dim=-1)
    q, k = q.unflatten(-1, (a.heads, a.head_dim)), k.unflatten(-1, (a.kv_heads, a.head_dim))
    v = v.unflatten(-1, (a.kv_heads, a.v_head_dim)) * a.value_scale
    if a.qk_norm:
        q, k = rms_norm(q, get("q_norm"), eps), rms_norm(k, get("k_norm"), eps)
    q, k = rope(a, q, positions), rope(a, k, positions)
    keys, values, held = (k, v, positions) if past is None else _with_past(past, k, v, positions)
    y = attend(a, q, keys, values, positions, held, get("sinks") if a.sinks else None)
    return y.flatten(1), k, v


def _with_past(past: Past, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.cat([past.k, k]), torch.cat([past.v, v]), torch.cat([past.positions, positions])


def attend(
    a: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, held: Tensor, sinks: Tensor | None
) -> Tensor:
    """Softmax attention: q [T, heads, D], k [S, kv_heads, D], v [S, kv_heads, Dv] -> [T, heads, Dv].

    Query at position q sees a slot holding position p iff q-W < p <= q. The sink is one more logit a head that takes
    probability and gives no value (arXiv 2601.02780, eq. 2-3).
    """
    group = a.heads // a.kv_heads
    scores = torch.einsum("tkgd,skd->tkgs", q.unflatten(1, (a.kv_heads, group)), k) * a.scale
    seen = held[None, :] <= queries[:, None]
    if a.window is not None:
        seen &= held[None, :] > queries[:, None] - a.window
    scores = scores.masked_fill(~seen[:, None, None, :], -math.inf)
    if sinks is not None:
        column = sinks.view(1, a.kv_heads, group, 1).expand(scores.shape[0], -1, -1, -1)
        scores = torch.cat([scores, column], dim=-1)
    probs = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("tkgs,skd->tkgd", probs, v).flatten(1, 2)


def rope_frequencies(a: AttentionSpec) -> Tensor:
    """Inverse frequencies, float32 [rotary_dim / 2]."""
    freqs = 1.0 / (a.rope_theta ** (torch.arange(0, a.rotary_dim, 2, dtype=torch.float32) / max(a.rotary_dim, 1)))
    s = a.rope_scaling
    if s is None:
        return freqs
    if s.kind == "linear":
        return freqs / s.factor
    # llama3: long wavelengths are divided, short ones kept, those between are blended
    turns = s.original_context * freqs / (2 * math.pi)
    keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return freqs * (keep + (1 - keep) / s.factor)


def rope(a: AttentionSpec, x: Tensor, positions: Tensor) -> Tensor:
    """Rotates the first rotary_dim dimensions of x [T, n, D], dimension j paired with j + rotary_dim/2 (NeoX)."""
    half = a.rotary_dim // 2
    angles = positions[:, None].float() * rope_frequencies(a)
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    x1, x2, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest], dim=-1)


def feed_forward(f: FeedForwardSpec, get, x: Tensor) -> Tensor:
    """Dense, gated or mixture-of-experts feed-forward on x [T, hidden]."""
    if f.moe:
        return mixture(f, f.moe, get, x)
    return activations(f, get, x) @ get("down").T


def activations(f: FeedForwardSpec, get, x: Tensor) -> Tensor:
    """What the down product of a dense or gated feed-forward sees: [T, intermediate]."""
    h = activated(f, get("gate_up"), x)
    if f.gate:
        h = h * block_mask(f.gate, get, x).repeat_interleave(f.gate.block, dim=-1)
    return h


def activated(f: FeedForwardSpec, gate_up: Tensor, x: Tensor) -> Tensor:
    """act(gate x) * up x."""
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (F.silu(gate) if f.activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def block_mask(g: GateSpec, get, x: Tensor) -> Tensor:
    """0/1 mask [T, blocks]; a row's mask depends on that row alone."""
    return (F.relu(x @ get("gate.w1").T) @ get("gate.w2").T + get("gate.bias") > 0).to(x.dtype)


def mixture(f: FeedForwardSpec, moe: MoeSpec, get, x: Tensor) -> Tensor:
    """The weighted outputs of each row's experts."""
    chosen, weight = route(moe, get, x)
    y = torch.zeros_like(x)
    for e in chosen.unique().tolist():
        row, rank = (chosen == e).nonzero(as_tuple=True)
        h = activated(f, get(f"experts.{e}.gate_up"), x[row])
        y[row] += (h @ get(f"experts.{e}.down").T) * weight[row, rank, None]
    return y


def route(moe: MoeSpec, get, x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's experts int64 [T, top_k] and their weights. Sigmoid router; the bias takes part in the choice of
    experts, not in their weights."""
    scores = (x @ get("router").T).sigmoid()
    chosen = (scores + get("router_bias")).topk(moe.top_k, dim=-1).indices
    weight = scores.gather(-1, chosen)
    if moe.normalize:
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
    return chosen, weight * moe.scale


def mtp(
    spec: ModelSpec,
    weights: Weights,
    m: int,
    hidden: Tensor,
    tokens: Tensor,
    positions: Tensor,
    past: Past | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """MTP head m: row p pairs the main model's hidden state of p with token p+1+m and predicts token p+2+m.

    hidden [T, hidden] as `forward` returns it, tokens int64 [T] the look-ahead tokens. Returns (logits [T, vocab],
    this head's own hidden state for a chained successor, k, v). Source: vllm mimo_v2_mtp.py and mimo_mtp.py.
    """
    s = spec.mtp
    assert s is not None
    x = mtp_pair(spec, weights, m, hidden, tokens, positions) @ weights.get(f"mtp.{m}.proj").T
    x, k, v = block(spec, weights, f"mtp.{m}.layer", s.attention, s.ffn, x, positions, past)
    return head(spec, weights, rms_norm(x, weights.get(f"mtp.{m}.norm"), spec.norm_eps)), x, k, v


def mtp_pair(spec: ModelSpec, weights: Weights, m: int, hidden: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """What MTP head m's projection sees: [T, 2 * hidden]."""
    s = spec.mtp
    assert s is not None
    if s.hidden == "post_norm":
        hidden = rms_norm(hidden, weights.get("norm"), spec.norm_eps)
    e = weights.rows("embed", tokens) * spec.embed_scale
    if s.zero_first:
        e = torch.where(positions[:, None] == 0, torch.zeros_like(e), e)
    e = rms_norm(e, weights.get(f"mtp.{m}.token_norm"), spec.norm_eps)
    h = rms_norm(hidden, weights.get(f"mtp.{m}.hidden_norm"), spec.norm_eps)
    return torch.cat([e, h] if s.order == "token_first" else [h, e], dim=-1)
