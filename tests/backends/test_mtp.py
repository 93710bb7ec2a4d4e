"""MTP heads against blocks assembled from transformers' own layers (transformers has no MTP of its own)."""

from dataclasses import replace

import pytest
import torch
from specs import RandomWeights, mimo_spec, qwen_spec
from transformers import MiMoV2FlashConfig, Qwen2Config
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import (
    MiMoV2FlashDecoderLayer,
    MiMoV2FlashRotaryEmbedding,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from mimo_edge.backends import oracle
from mimo_edge.spec import MtpSpec

ROWS = 23


def norm(x, w, eps):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), w, eps)


def fill(module, weights, prefix, a, ffn_norm):
    """Copies one block's canonical parameters into a transformers layer."""
    q, k, v = weights.get(f"{prefix}.qkv").split([a.q_rows, a.k_rows, a.v_rows])
    gate, up = weights.get(f"{prefix}.gate_up").chunk(2)
    state = {
        "self_attn.q_proj.weight": q,
        "self_attn.k_proj.weight": k,
        "self_attn.v_proj.weight": v,
        "self_attn.o_proj.weight": weights.get(f"{prefix}.o"),
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": weights.get(f"{prefix}.down"),
        "input_layernorm.weight": weights.get(f"{prefix}.attn_norm"),
        "post_attention_layernorm.weight": weights.get(f"{prefix}.ffn_norm"),
    }
    if a.sinks:
        state["self_attn.sinks"] = weights.get(f"{prefix}.sinks")
    if a.qkv_bias:
        for name, part in zip(
            "qkv", weights.get(f"{prefix}.qkv.bias").split([a.q_rows, a.k_rows, a.v_rows]), strict=True
        ):
            state[f"self_attn.{name}_proj.bias"] = part
    module.load_state_dict(state)
    return module.eval()


def causal(n, window=None):
    q, k = torch.arange(n)[:, None], torch.arange(n)[None, :]
    seen = (k <= q) & (k > q - window if window else True)
    return torch.where(seen, 0.0, -torch.inf)[None, None]


def inputs(spec, seed):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, spec.hidden_size, generator=g)
    tokens = torch.randint(0, spec.vocab_size, (ROWS,), generator=g)
    return hidden, tokens, torch.arange(ROWS)


def test_mimo_v2_head_equals_a_transformers_layer():
    spec = mimo_spec(mtp=3)
    a, weights = spec.attention["window"], RandomWeights(spec, 1)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334}
    config = MiMoV2FlashConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=1, head_dim=12, v_head_dim=8, sliding_window=a.window, layer_types=["sliding_attention"],
        mlp_layer_types=["dense"], attention_value_scale=0.707, rms_norm_eps=1e-5,
        rope_parameters={"sliding_attention": rope},
    )  # fmt: skip
    config._attn_implementation = "eager"
    hidden, tokens, positions = inputs(spec, 2)
    for m in range(3):
        layer = fill(MiMoV2FlashDecoderLayer(config, 0), weights, f"mtp.{m}.layer", a, "ffn_norm")
        e = norm(weights.get("embed")[tokens], weights.get(f"mtp.{m}.token_norm"), 1e-5)
        h = norm(hidden, weights.get(f"mtp.{m}.hidden_norm"), 1e-5)
        x = (torch.cat([e, h], -1) @ weights.get(f"mtp.{m}.proj").T)[None]
        cos_sin = MiMoV2FlashRotaryEmbedding(config)(x, positions[None], "sliding_attention")
        with torch.no_grad():
            y = layer(x, attention_mask=causal(ROWS, a.window), position_embeddings=cos_sin)
        y = y[0] if isinstance(y, tuple) else y
        want = norm(y.reshape(ROWS, -1), weights.get(f"mtp.{m}.norm"), 1e-5) @ weights.get("head").T
        got, own, _, _ = oracle.mtp(spec, weights, m, hidden, tokens, positions, None)
        assert torch.linalg.norm(got - want) / torch.linalg.norm(want) < 1e-5
        assert own.shape == hidden.shape


def test_mimo_7b_head_equals_a_transformers_layer():
    spec = replace(qwen_spec(), mtp=MtpSpec(1, "full", "dense", order="hidden_first", zero_first=True))
    a, weights = spec.attention["full"], RandomWeights(spec, 3)
    config = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    config._attn_implementation = "eager"
    layer = fill(Qwen2DecoderLayer(config, 0), weights, "mtp.0.layer", a, "ffn_norm")
    hidden, tokens, positions = inputs(spec, 4)
    e = weights.get("embed")[tokens].clone()
    e[0] = 0
    e = norm(e, weights.get("mtp.0.token_norm"), 1e-6)
    h = norm(hidden, weights.get("mtp.0.hidden_norm"), 1e-6)
    x = (torch.cat([h, e], -1) @ weights.get("mtp.0.proj").T)[None]
    with torch.no_grad():
        cos_sin = Qwen2RotaryEmbedding(config)(x, positions[None])
        y = layer(x, attention_mask=causal(ROWS), position_embeddings=cos_sin)
    y = y[0] if isinstance(y, tuple) else y
    want = norm(y.reshape(ROWS, -1), weights.get("mtp.0.norm"), 1e-6) @ weights.get("head").T
    got = oracle.mtp(spec, weights, 0, hidden, tokens, positions, None)[0]
    assert torch.linalg.norm(got - want) / torch.linalg.norm(want) < 1e-5


@pytest.mark.parametrize("chunks", [[1] * ROWS, [5, 17, 1]])
def test_a_head_on_its_own_past_equals_one_pass(chunks):
    spec = mimo_spec(window=6, mtp=1)
    weights = RandomWeights(spec, 5)
    hidden, tokens, positions = inputs(spec, 6)
    want = oracle.mtp(spec, weights, 0, hidden, tokens, positions, None)[0]
    keys, values, rows, at = [], [], [], 0
    for size in chunks:
        part = slice(at, at + size)
        past = oracle.Past(torch.cat(keys), torch.cat(values), positions[:at]) if at else None
        logits, _, k, v = oracle.mtp(spec, weights, 0, hidden[part], tokens[part], positions[part], past)
        keys.append(k), values.append(v), rows.append(logits)
        at += size
    assert torch.linalg.norm(torch.cat(rows) - want) / torch.linalg.norm(want) < 1e-5
