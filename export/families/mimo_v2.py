"""MiMo-V2 (Flash, V2.5, V2.6): hybrid windows, sinks, value scale, mixture of experts, MTP.

Two published forms of config.json:

  transformers form (model_type mimo_v2_flash with layer_types): window layers have twice the kv heads and carry the
  sinks, both by convention. Window: `sliding_window` counts the query itself (its mask drops keys at
  q - sliding_window), so W = sliding_window; a `sliding_window_size` beside it makes the class use that plus one.

  hub form (mimo_v2_flash as released, mimo_v2; hybrid_layer_pattern, 1 = window): swa_* fields give the window layers'
  sizes. Window: Xiaomi's own remote code masks with sliding_window = 128 the transformers way, vLLM passes 128 as the
  number of visible keys, so W = 128. SGLang and transformers' own reading of this field see 129; nothing published
  settles which was trained, and we follow the authors' code.
"""

from __future__ import annotations

from collections.abc import Collection

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families.decoder import Family, activation, layer_types, window
from mimo_edge.export.families.fields import Fields
from mimo_edge.export.families.mimo_v2_layout import count_heads, mimo_v2_layout
from mimo_edge.export.families.rope import Rope, read_rope
from mimo_edge.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, MoeSpec, MtpSpec


def _spec(config: Fields, names: Collection[str]) -> ModelSpec:
    _refuse(config)
    count = config.integer("num_hidden_layers")
    kinds, ffns = _kinds(config, count)
    heads = count_heads(config, names)
    used = set(kinds) | ({"window"} if heads else set())
    hub = config.has("hybrid_layer_pattern") and not config.has("layer_types")
    attention = (_hub_attention if hub else _transformers_attention)(config, used)
    act = activation(config)
    ffn = {}
    if "dense" in ffns or heads:
        ffn["dense"] = FeedForwardSpec(config.integer("intermediate_size"), act)
    if "moe" in ffns:
        ffn["moe"] = FeedForwardSpec(config.integer("moe_intermediate_size"), act, moe=_moe(config))
    eps = "rms_norm_eps" if config.has("rms_norm_eps") else "layernorm_epsilon"
    return ModelSpec(
        family="mimo_v2",
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_context=config.integer("max_position_embeddings"),
        norm_eps=config.number(eps),
        attention=attention,
        ffn=ffn,
        layers=tuple(LayerSpec(k, f) for k, f in zip(kinds, ffns, strict=True)),
        tied=config.flag("tie_word_embeddings", False),
        mtp=MtpSpec(heads, "window", "dense") if heads else None,
    )


def _refuse(config: Fields) -> None:
    config.allow("n_group", 1)
    config.allow("topk_group", 1)
    config.allow("n_shared_experts", 0)
    config.allow("scoring_func", "sigmoid")
    config.allow("topk_method", "noaux_tc")
    config.allow("hybrid_block_size")
    config.allow("attention_projection_layout", "fused_qkv")


def _kinds(config: Fields, count: int) -> tuple[list[str], list[str]]:
    """Attention and feed-forward kind of each layer. Both forms at once must agree."""
    pattern = None
    if config.has("hybrid_layer_pattern"):
        pattern = [
            "window" if _bit(config, "hybrid_layer_pattern", v) else "full"
            for v in config.items("hybrid_layer_pattern", count)
        ]
    if config.has("layer_types"):
        kinds = layer_types(config, count)
        if pattern not in (None, kinds):
            raise BadInputError(f"{config.where}: layer_types and hybrid_layer_pattern contradict each other")
    elif pattern is not None:
        kinds = pattern
    else:
        raise BadInputError(
            f"{config.where}: no layer_types and no hybrid_layer_pattern, so which layers have a window?"
        )
    if config.has("mlp_layer_types"):
        ffns = config.items("mlp_layer_types", count)
        if set(ffns) - {"dense", "sparse"}:
            raise UnsupportedError(f"{config.where}: mlp_layer_types {sorted(set(ffns))} (supported: dense, sparse)")
        return kinds, ["moe" if f == "sparse" else "dense" for f in ffns]
    bits = [_bit(config, "moe_layer_freq", v) for v in config.items("moe_layer_freq", count)]
    return kinds, ["moe" if b else "dense" for b in bits]


def _bit(config: Fields, name: str, value: object) -> bool:
    if value not in (0, 1):
        raise BadInputError(f"{config.where}: {name} has {value!r} (allowed: 0, 1)")
    return bool(value)


def _moe(config: Fields) -> MoeSpec:
    return MoeSpec(
        experts=config.integer("n_routed_experts"),
        top_k=config.integer("num_experts_per_tok"),
        normalize=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", 1.0),
    )


def _attention(
    config: Fields, rope: Rope, heads: int, kv_heads: int, dims: tuple[int, int], width: int | None, sinks: bool
) -> AttentionSpec:
    head_dim, v_head_dim = dims
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        rotary_dim=rope.dims(head_dim),
        rope_theta=rope.theta,
        scale=head_dim**-0.5,
        window=width,
        rope_scaling=rope.scaling,
        value_scale=config.number("attention_value_scale", 1.0),
        sinks=sinks,
        qkv_bias=config.flag("attention_bias", False),
    )


def _transformers_attention(config: Fields, used: set[str]) -> dict[str, AttentionSpec]:
    heads, kv = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
    dims = config.integer("head_dim"), config.integer("v_head_dim")
    out = {}
    if "full" in used:
        out["full"] = _attention(config, read_rope(config), heads, kv, dims, None, False)
    if "window" in used:
        width = window(config, ["window"])
        if config.has("sliding_window_size"):
            width = config.integer("sliding_window_size") + 1
        out["window"] = _attention(config, read_rope(config, "sliding_attention"), heads, 2 * kv, dims, width, True)
    return out


def _hub_attention(config: Fields, used: set[str]) -> dict[str, AttentionSpec]:
    rope, out = read_rope(config), {}
    if "full" in used:
        dims = config.integer("head_dim"), config.integer("v_head_dim", config.integer("head_dim"))
        heads, kv = config.integer("num_attention_heads"), config.integer("num_key_value_heads")
        sinks = config.flag("add_full_attention_sink_bias", False)
        out["full"] = _attention(config, rope, heads, kv, dims, None, sinks)
    if "window" in used:
        dims = config.integer("swa_head_dim"), config.integer("swa_v_head_dim", config.integer("swa_head_dim"))
        heads, kv = config.integer("swa_num_attention_heads"), config.integer("swa_num_key_value_heads")
        local = Rope(config.number("swa_rope_theta"), None, rope.partial)
        sinks = config.flag("add_swa_attention_sink_bias", False)
        out["window"] = _attention(config, local, heads, kv, dims, _hub_window(config), sinks)
    return out


def _hub_window(config: Fields) -> int:
    names = [n for n in ("sliding_window", "sliding_window_size") if config.has(n)]
    sizes = {config.integer(n) for n in names}
    if len(sizes) != 1:
        raise BadInputError(
            f"{config.where}: window layers need one window size, sliding_window gives {sorted(sizes) or 'none'}"
        )
    return sizes.pop()


FAMILY = Family(("mimo_v2_flash", "mimo_v2"), _spec, mimo_v2_layout)
