"""The trainable model. In evaluation it equals mimo_edge.backends.oracle (a test holds the two together).

Parameters carry the canonical names of mimo_edge/params.py. Batches are [B, S]; documents within a row do not see each
other, and rotary positions start anew in each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mimo_edge.spec import AttentionSpec, FeedForwardSpec, ModelSpec
from scripts.reference_model.attention import attend
from scripts.reference_model.gates import BlockGate, GateStats, GateUse


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotary_table(a: AttentionSpec, length: int) -> Tensor:
    """float32 [2, length, rotary_dim / 2]: cosines and sines."""
    freqs = 1.0 / (a.rope_theta ** (torch.arange(0, a.rotary_dim, 2, dtype=torch.float32) / a.rotary_dim))
    angles = torch.arange(length, dtype=torch.float32)[:, None] * freqs
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates the first dimensions of x [B, S, n, D]; table [2, B, S, half]."""
    half = table.shape[-1]
    cos, sin = table[0, :, :, None], table[1, :, :, None]
    x1, x2, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([(x1 * cos - x2 * sin).to(x.dtype), (x2 * cos + x1 * sin).to(x.dtype), rest], dim=-1)


class Block(nn.Module):
    """One layer. forward: x [B, S, hidden] -> (x, gate statistics or None)."""

    def __init__(self, spec: ModelSpec, a: AttentionSpec, f: FeedForwardSpec):
        super().__init__()
        self.a, self.f, self.eps = a, f, spec.norm_eps
        h = spec.hidden_size
        self.attn_norm = nn.Parameter(torch.ones(h))
        self.qkv = nn.Parameter(torch.randn(a.q_rows + a.k_rows + a.v_rows, h) * h**-0.5)
        if a.sinks:
            self.sinks = nn.Parameter(torch.zeros(a.heads))
        self.o = nn.Parameter(torch.zeros(h, a.heads * a.v_head_dim))
        self.register_parameter("o_bias", None)  # training has neither; a calibrated quantisation may add both
        self.register_parameter("down_bias", None)
        self.ffn_norm = nn.Parameter(torch.ones(h))
        self.gate_up = nn.Parameter(torch.randn(2 * f.intermediate, h) * h**-0.5)
        self.down = nn.Parameter(torch.zeros(h, f.intermediate))
        self.gate = BlockGate(f.gate, h, f.intermediate) if f.gate else None

    def forward(self, x: Tensor, table: Tensor, mask, use: GateUse) -> tuple[Tensor, GateStats | None]:
        x = x + self._attention(rms_norm(x, self.attn_norm, self.eps), table, mask)
        y, stats = self._feed_forward(rms_norm(x, self.ffn_norm, self.eps), use)
        return x + y, stats

    def _attention(self, x: Tensor, table: Tensor, mask) -> Tensor:
        a = self.a
        q, k, v = F.linear(x, self.qkv).split([a.q_rows, a.k_rows, a.v_rows], dim=-1)
        q = rotate(q.unflatten(-1, (a.heads, a.head_dim)), table)
        k = rotate(k.unflatten(-1, (a.kv_heads, a.head_dim)), table)
        v = v.unflatten(-1, (a.kv_heads, a.v_head_dim)) * a.value_scale
        y = attend(mask, q, k, v, a.scale, self.sinks if a.sinks else None)
        return F.linear(y.flatten(2), self.o, self.o_bias)

    def _feed_forward(self, x: Tensor, use: GateUse) -> tuple[Tensor, GateStats | None]:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        h = F.silu(gate) * up
        if self.gate is None:
            return F.linear(h, self.down, self.down_bias), None
        keep, stats = self.gate(x, use)
        h = (h.unflatten(-1, (keep.shape[-1], -1)) * keep[..., None].to(h.dtype)).flatten(-2)
        return F.linear(h, self.down, self.down_bias), stats


class MtpHead(nn.Module):
    """Predicts further ahead from the main model's hidden state of row p and a later token's embedding."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        assert spec.mtp
        h, self.eps = spec.hidden_size, spec.norm_eps
        self.token_norm, self.hidden_norm, self.norm = (nn.Parameter(torch.ones(h)) for _ in range(3))
        self.proj = nn.Parameter(torch.randn(h, 2 * h) * (2 * h) ** -0.5)
        self.layer = Block(spec, spec.attention[spec.mtp.attention], spec.ffn[spec.mtp.ffn])

    def enter(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        pair = [rms_norm(embedded, self.token_norm, self.eps), rms_norm(hidden, self.hidden_norm, self.eps)]
        return F.linear(torch.cat(pair, dim=-1), self.proj)


class Model(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        h = spec.hidden_size
        self.embed = nn.Parameter(torch.randn(spec.vocab_size, h) * h**-0.5)
        self.layers = nn.ModuleList(Block(spec, spec.attention_of(i), spec.ffn_of(i)) for i in range(len(spec.layers)))
        self.norm = nn.Parameter(torch.ones(h))
        self.mtp = nn.ModuleList(MtpHead(spec) for _ in range(spec.mtp.heads if spec.mtp else 0))
        self.tables = {kind: rotary_table(a, spec.max_context) for kind, a in spec.attention.items()}

    def hidden(
        self, tokens: Tensor, position: Tensor, masks: dict, use: GateUse
    ) -> tuple[list[Tensor], list[GateStats]]:
        """tokens int64 [B, S + heads], position int64 [B, S], masks by kind of attention.

        Returns the normed hidden states [B, S, hidden] that give the logits of the main model and of every head, and
        the gates' statistics of every layer.
        """
        length = position.shape[1]
        tables = {kind: t.to(position.device)[:, position] for kind, t in self.tables.items()}
        embedded = F.embedding(tokens, self.embed) * self.spec.embed_scale
        x, stats = embedded[:, :length], []
        for layer, kinds in zip(self.layers, self.spec.layers, strict=True):
            x, s = layer(x, tables[kinds.attention], masks[kinds.attention], use)
            stats.append(s)
        out = [rms_norm(x, self.norm, self.spec.norm_eps)]
        for i, head in enumerate(self.mtp):
            kind = self.spec.mtp.attention
            y = head.enter(x, embedded[:, 1 + i : 1 + i + length])
            y, _ = head.layer(y, tables[kind], masks[kind], use)
            out.append(rms_norm(y, head.norm, self.spec.norm_eps))
        return out, [s for s in stats if s is not None]
