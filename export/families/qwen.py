"""Qwen2 (bias on q, k, v) and Qwen3 (norm on q and k).

Windows: with use_sliding_window, layers from max_window_layers on (or as layer_types says) see `sliding_window` keys,
the query's own included, as transformers counts; without it all layers are full.
"""

from __future__ import annotations

from collections.abc import Collection

from mimo_edge.errors import BadInputError
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


def _kinds(config: Fields, count: int) -> list[str]:
    if config.has("layer_types"):
        return layer_types(config, count)
    if not config.flag("use_sliding_window", False) or not config.has("sliding_window"):
        return ["full"] * count
    if not config.has("max_window_layers"):
        raise BadInputError(f"{config.where}: use_sliding_window without layer_types or max_window_layers")
    first = config.integer("max_window_layers")
    return ["window" if i >= first else "full" for i in range(count)]


def qwen_spec(config: Fields) -> ModelSpec:
    """Also the trunk of MiMo-7B."""
    family = config.text("model_type")
    config.allow("attention_bias", *((True, False) if family == "mimo" else (False,)))
    kinds = _kinds(config, config.integer("num_hidden_layers"))
    if "window" in kinds and config.has("use_sliding_window") and not config.flag("use_sliding_window"):
        raise BadInputError(f"{config.where}: layer_types has sliding_attention but use_sliding_window is false")
    widths = {"full": None, "window": window(config, kinds)}
    size = config.integer("head_dim", 128) if family == "qwen3" else head_dim(config)
    rope = read_rope(config)
    attention = {
        k: plain_attention(config, rope, size, window=widths[k], qk_norm=family == "qwen3", qkv_bias=family != "qwen3")
        for k in sorted(set(kinds))
    }
    return ModelSpec(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_context=config.integer("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps"),
        attention=attention,
        ffn={"dense": FeedForwardSpec(config.integer("intermediate_size"), activation(config))},
        layers=tuple(LayerSpec(k, "dense") for k in kinds),
        tied=config.flag("tie_word_embeddings", False),
    )


def _spec(config: Fields, names: Collection[str]) -> ModelSpec:
    return qwen_spec(config)


def _layout(spec: ModelSpec, config: Fields, names: Collection[str]) -> Layout:
    return plain_layout(spec, hf_naming())


FAMILY = Family(("qwen2", "qwen3"), _spec, _layout)
