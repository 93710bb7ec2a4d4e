"""Llama (1 to 3.2) and Mistral (a window on every layer, or on none when sliding_window is null)."""

from __future__ import annotations

from collections.abc import Collection

from mimo_edge.export.families.decoder import (
    Family,
    activation,
    head_dim,
    hf_naming,
    layer_types,
    plain_attention,
    window,
)
from mimo_edge.export.families.fields import Fields
from mimo_edge.export.families.layout import Layout, plain_layout
from mimo_edge.export.families.rope import read_rope
from mimo_edge.spec import FeedForwardSpec, LayerSpec, ModelSpec


def _spec(config: Fields, names: Collection[str]) -> ModelSpec:
    family = config.text("model_type")
    config.allow("attention_bias", False)  # would put a bias on o_proj too
    config.allow("mlp_bias", False)
    count = config.integer("num_hidden_layers")
    kinds = ["full"] * count
    if config.has("layer_types"):
        kinds = layer_types(config, count)
    elif family == "mistral" and config.has("sliding_window"):
        kinds = ["window"] * count
    rope = read_rope(config, theta=10_000.0)
    widths = {"full": None, "window": window(config, kinds)}
    return ModelSpec(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_context=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps"),
        attention={k: plain_attention(config, rope, head_dim(config), window=widths[k]) for k in sorted(set(kinds))},
        ffn={"dense": FeedForwardSpec(config.integer("intermediate_size"), activation(config))},
        layers=tuple(LayerSpec(k, "dense") for k in kinds),
        tied=config.flag("tie_word_embeddings", False),
    )


def _layout(spec: ModelSpec, config: Fields, names: Collection[str]) -> Layout:
    return plain_layout(spec, hf_naming())


FAMILY = Family(("llama", "mistral"), _spec, _layout)
