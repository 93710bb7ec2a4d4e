"""Gemma 3: the text model, alone or inside the multimodal checkpoint.

Five window layers, then a full one; theta 10,000 in windows and 1,000,000 elsewhere; scaling of positions on full
layers only. `sliding_window` counts the query itself (transformers). Norms multiply by 1 + w in the checkpoint and
become plain multipliers here. Published text_config objects leave out what equals transformers' defaults.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

from mimo_edge.export.families.decoder import Family, activation, hf_naming, layer_types, plain_attention, window
from mimo_edge.export.families.fields import Fields
from mimo_edge.export.families.layout import Layout, plain_layout
from mimo_edge.export.families.rope import Rope, read_rope
from mimo_edge.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec

PATTERN = 6  # layers 6, 12, 18 ... are full
LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window_pattern": PATTERN,
}
_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
_PARTS = {
    "post_attn_norm": ("post_attention_layernorm.weight",),
    "ffn_norm": ("pre_feedforward_layernorm.weight",),
    "post_ffn_norm": ("post_feedforward_layernorm.weight",),
}


def _text(config: Fields) -> Fields:
    nested = config.sub("text_config")
    if nested is None:
        return config
    given = {k: v for k, v in nested.data.items() if v is not None}
    return Fields({**_DEFAULTS, **given}, nested.where)


def kinds_of(count: int, pattern: int) -> list[str]:
    """Every `pattern`-th layer is full."""
    return ["window" if (i + 1) % pattern else "full" for i in range(count)]


def _attention(config: Fields, kinds: list[str]) -> dict[str, AttentionSpec]:
    scale = config.number("query_pre_attn_scalar") ** -0.5
    local_theta = config.number("rope_local_base_freq", LOCAL_THETA)
    ropes = {
        "full": read_rope(config, "full_attention", GLOBAL_THETA),
        "window": Rope(local_theta, None, 1.0),
    }
    by_type = config.sub("rope_parameters")
    if by_type and by_type.has("sliding_attention"):
        ropes["window"] = read_rope(config, "sliding_attention", local_theta)
    widths = {"full": None, "window": window(config, kinds)}
    return {
        k: plain_attention(config, ropes[k], config.integer("head_dim"), window=widths[k], scale=scale, qk_norm=True)
        for k in sorted(set(kinds))
    }


def _spec(config: Fields, names: Collection[str]) -> ModelSpec:
    text = _text(config)
    text.allow("attention_bias", False)
    text.allow("use_bidirectional_attention", False)
    text.allow("final_logit_softcapping")
    text.allow("attn_logit_softcapping")
    count, hidden = text.integer("num_hidden_layers"), text.integer("hidden_size")
    if text.has("layer_types"):
        kinds = layer_types(text, count)
    else:
        kinds = kinds_of(count, text.integer("sliding_window_pattern"))
    return ModelSpec(
        family="gemma3",
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden,
        max_context=text.integer("max_position_embeddings"),
        norm_eps=text.number("rms_norm_eps"),
        attention=_attention(text, kinds),
        ffn={"dense": FeedForwardSpec(text.integer("intermediate_size"), activation(text, "hidden_activation"))},
        layers=tuple(LayerSpec(k, "dense") for k in kinds),
        tied=text.flag("tie_word_embeddings", config.flag("tie_word_embeddings", True)),
        embed_scale=math.sqrt(hidden),
        post_norms=True,
    )


def _prefix(names: Collection[str]) -> str:
    return next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in names), _PREFIXES[0])


def _layout(spec: ModelSpec, config: Fields, names: Collection[str]) -> Layout:
    prefix = _prefix(names)
    head = "language_model.lm_head.weight" if prefix == "language_model.model." else "lm_head.weight"
    layout = plain_layout(spec, hf_naming(prefix, head, **_PARTS))
    for name, pieces in layout.items():
        if name.endswith("norm"):
            layout[name] = tuple(dataclasses.replace(p, add=1.0) for p in pieces)
    return layout


FAMILY = Family(
    ("gemma3_text", "gemma3"), _spec, _layout, lambda names: f"{_prefix(names)}layers.", ("<image_soft_token>",)
)
