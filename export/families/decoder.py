"""What the Hugging Face decoder families share: tensor names, layer types, the plain attention block."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families.fields import Fields
from mimo_edge.export.families.layout import Layout, Naming
from mimo_edge.export.families.rope import Rope
from mimo_edge.spec import AttentionSpec, ModelSpec

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
LAYER_PARTS: dict[str, tuple[str, ...]] = {
    "attn_norm": ("input_layernorm.weight",),
    "qkv": tuple(f"{n}.weight" for n in QKV),
    "qkv.bias": tuple(f"{n}.bias" for n in QKV),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "o": ("self_attn.o_proj.weight",),
    "ffn_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}


@dataclass(frozen=True)
class Family:
    """One model family. `spec(config, names)` and `layout(spec, config, names)` get the names of the tensors at hand.

    `layer_prefix(names)` is where a layer's tensors begin. `stray_tokens` may have ids beyond the vocabulary: text-only
    checkpoints that ship a multimodal tokenizer; they are dropped.
    """

    model_types: tuple[str, ...]
    spec: Callable[[Fields, Collection[str]], ModelSpec]
    layout: Callable[[ModelSpec, Fields, Collection[str]], Layout]
    layer_prefix: Callable[[Collection[str]], str] = lambda names: "model.layers."
    stray_tokens: tuple[str, ...] = ()


def hf_naming(prefix: str = "model.", head: str = "lm_head.weight", **parts: tuple[str, ...]) -> Naming:
    """Names of transformers' decoders; `parts` adds to or replaces LAYER_PARTS."""
    top = {"embed": f"{prefix}embed_tokens.weight", "norm": f"{prefix}norm.weight", "head": head}
    return Naming(top, f"{prefix}layers.{{}}.", {**LAYER_PARTS, **parts})


def layer_types(config: Fields, count: int, name: str = "layer_types") -> list[str]:
    """One of full, window a layer, from transformers' layer_types."""
    kinds = {"full_attention": "full", "sliding_attention": "window"}
    values = config.items(name, count)
    for value in values:
        if value not in kinds:
            raise UnsupportedError(f"{config.where}: {name} has {value!r} (supported: {', '.join(kinds)})")
    return [kinds[v] for v in values]


def window(config: Fields, kinds: list[str]) -> int | None:
    """`sliding_window` where a layer needs one. transformers masks keys at q - sliding_window and older
    (masking_utils.py, sliding_window_overlay), so it counts the query itself, as ModelSpec does."""
    if "window" not in kinds:
        return None
    if not config.has("sliding_window"):
        raise BadInputError(
            f"{config.where}: layer {kinds.index('window')} is a window layer but there is no sliding_window"
        )
    return config.integer("sliding_window")


def activation(config: Fields, name: str = "hidden_act") -> Activation:
    config.allow(name, *ACTIVATIONS)
    return ACTIVATIONS[config.text(name)]


def plain_attention(
    config: Fields,
    rope: Rope,
    head_dim: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    qk_norm: bool = False,
    qkv_bias: bool = False,
) -> AttentionSpec:
    """Attention with one head size, as in Llama, Qwen and Gemma. `scale` defaults to head_dim ** -0.5."""
    heads = config.integer("num_attention_heads")
    if rope.partial != 1.0:
        raise UnsupportedError(f"{config.where}: partial_rotary_factor {rope.partial} is not supported in this family")
    return AttentionSpec(
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        v_head_dim=head_dim,
        rotary_dim=head_dim,
        rope_theta=rope.theta,
        scale=head_dim**-0.5 if scale is None else scale,
        window=window,
        rope_scaling=rope.scaling,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
    )


def with_ids(spec: ModelSpec, bos: tuple[int, ...], eos: tuple[int, ...], where: str) -> ModelSpec:
    """The spec with its first token and the tokens that end a reply. Raises BadInputError on ids it does not have."""
    for name, ids in (("bos_token_id", bos), ("eos_token_id", eos)):
        if max(ids, default=0) >= spec.vocab_size:
            raise BadInputError(f"{where}: {name} {max(ids)} is outside the vocabulary of {spec.vocab_size}")
    return replace(spec, bos_id=next(iter(bos), None), eos_ids=eos)


def head_dim(config: Fields) -> int:
    return config.integer("head_dim", config.integer("hidden_size") // config.integer("num_attention_heads"))
