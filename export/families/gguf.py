"""GGUF files of llama.cpp: gemma3, qwen2, qwen3 and llama.

What the file does not say is llama.cpp's own rule for the architecture (src/models/gemma3.cpp, llama-model.cpp):
Gemma 3 has a full layer every sixth, theta 10,000 in window layers, norms already 1 + w, and attention scale
head_dim ** -0.5 except in its 27B (62 layers). llama.cpp masks a key iff q - k >= n_swa: the window counts the query.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families.checkpoint import Checkpoint
from mimo_edge.export.families.decoder import Activation, with_ids
from mimo_edge.export.families.fields import Fields
from mimo_edge.export.families.gemma3 import LOCAL_THETA, PATTERN, kinds_of
from mimo_edge.export.families.gguf_file import GgufFile, read_gguf
from mimo_edge.export.families.gguf_tokenizer import end_ids, tokenizer_json
from mimo_edge.export.families.layout import Layout, LayoutSource, Naming, attention_at, check_layout, plain_layout
from mimo_edge.export.families.tensors import read_rows
from mimo_edge.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, RopeScaling

_NAMING = Naming(
    top={"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"},
    layer="blk.{}.",
    parts={
        "attn_norm": ("attn_norm.weight",),
        "qkv": ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
        "qkv.bias": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
        "q_norm": ("attn_q_norm.weight",),
        "k_norm": ("attn_k_norm.weight",),
        "o": ("attn_output.weight",),
        "post_attn_norm": ("post_attention_norm.weight",),
        "ffn_norm": ("ffn_norm.weight",),
        "gate_up": ("ffn_gate.weight", "ffn_up.weight"),
        "down": ("ffn_down.weight",),
        "post_ffn_norm": ("post_ffw_norm.weight",),
    },
)


class _Model:
    """The architecture's own keys, and sizes that only tensors give."""

    def __init__(self, file: GgufFile, path: Path):
        self.file = file
        general = Fields(file.metadata, str(path))
        self.arch = general.text("general.architecture")
        prefix = f"{self.arch}."
        own = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
        self.keys = Fields(own, f"{path}: {self.arch}")
        embed = file.tensors.get("token_embd.weight")
        if embed is None or len(embed.shape) != 2:
            raise BadInputError(f"tensor token_embd.weight is missing or not 2-D in {path}")
        self.vocab_size = embed.shape[0]

    def attention(
        self,
        *,
        theta: float | None = None,
        scaling: RopeScaling | None = None,
        scale: float | None = None,
        window: int | None = None,
    ) -> AttentionSpec:
        keys, heads = self.keys, self.keys.integer("attention.head_count")
        head_dim = keys.integer("attention.key_length", keys.integer("embedding_length") // heads)
        if keys.integer("rope.dimension_count", head_dim) != head_dim:
            raise UnsupportedError(f"{keys.where}: rope.dimension_count differs from the head size {head_dim}")
        return AttentionSpec(
            heads=heads,
            kv_heads=keys.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            v_head_dim=keys.integer("attention.value_length", head_dim),
            rotary_dim=head_dim,
            rope_theta=keys.number("rope.freq_base", 10_000.0) if theta is None else theta,
            scale=head_dim**-0.5 if scale is None else scale,
            window=window,
            rope_scaling=scaling,
            qk_norm="blk.0.attn_q_norm.weight" in self.file.tensors,
            qkv_bias="blk.0.attn_q.bias" in self.file.tensors,
        )

    def scaling(self) -> RopeScaling | None:
        self.keys.allow("rope.scaling.type", "none", "linear")
        factor = self.keys.number("rope.scaling.factor", self.keys.number("rope.scale_linear", 1.0))
        return RopeScaling("linear", factor) if factor != 1.0 else None


def _dense(
    model: _Model, attention: dict[str, AttentionSpec], kinds: list[str], activation: Activation = "silu"
) -> ModelSpec:
    keys = model.keys
    return ModelSpec(
        family=model.arch,
        vocab_size=model.vocab_size,
        hidden_size=keys.integer("embedding_length"),
        max_context=keys.integer("context_length"),
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        attention=attention,
        ffn={"dense": FeedForwardSpec(keys.integer("feed_forward_length"), activation)},
        layers=tuple(LayerSpec(k, "dense") for k in kinds),
        tied="output.weight" not in model.file.tensors,
    )


def _gemma3(model: _Model) -> ModelSpec:
    keys, count = model.keys, model.keys.integer("block_count")
    kinds = kinds_of(count, keys.integer("attention.sliding_window_pattern", PATTERN))
    scale = None if count != 62 else (keys.integer("embedding_length") / keys.integer("attention.head_count")) ** -0.5
    attention = {
        "full": model.attention(scaling=model.scaling(), scale=scale),
        "window": model.attention(
            theta=keys.number("rope.freq_base_swa", LOCAL_THETA),
            scale=scale,
            window=keys.integer("attention.sliding_window"),
        ),
    }
    spec = _dense(model, {k: attention[k] for k in sorted(set(kinds))}, kinds, "gelu_tanh")
    return dataclasses.replace(spec, embed_scale=math.sqrt(spec.hidden_size), post_norms=True)


def _full(model: _Model) -> ModelSpec:
    """qwen2, qwen3, llama: full attention everywhere."""
    scaling = model.scaling()
    if "rope_freqs.weight" in model.file.tensors:
        scaling = _llama3_scaling(model)
    model.keys.allow("attention.sliding_window", 0)
    model.keys.allow("expert_count", 0)
    return _dense(model, {"full": model.attention(scaling=scaling)}, ["full"] * model.keys.integer("block_count"))


def _llama3_scaling(model: _Model) -> RopeScaling:
    """The file stores each frequency's divisor; finds Llama 3.1's rule (low 1, high 4, context 8192) behind them."""
    tensor = model.file.tensors["rope_freqs.weight"]
    divisors = read_rows(tensor, 0, tensor.rows).ravel().astype(np.float64)
    factor, theta = round(float(divisors.max()), 3), model.keys.number("rope.freq_base", 10_000.0)
    rule = RopeScaling("llama3", factor)
    turns = rule.original_context * theta ** -(np.arange(divisors.size) / divisors.size) / (2 * np.pi)
    smooth = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    expected = 1 / ((1 - np.clip(smooth, 0, 1)) / factor + np.clip(smooth, 0, 1))
    if 2 * divisors.size != model.attention().head_dim or not np.allclose(divisors, expected, rtol=1e-3):
        raise UnsupportedError(f"{tensor} scales rotary frequencies by a rule other than Llama 3.1's")
    return rule


_ARCHITECTURES: dict[str, Callable[[_Model], ModelSpec]] = {
    "gemma3": _gemma3,
    "llama": _full,
    "qwen2": _full,
    "qwen3": _full,
}


def open_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file; reads its header and rebuilds its tokenizer, no weights.

    Raises BadInputError for a damaged, truncated or contradictory file, UnsupportedError for an unknown architecture,
    tokenizer or setting.
    """
    file = read_gguf(path)
    general = Fields(file.metadata, str(path))
    arch = general.text("general.architecture")
    if arch not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise UnsupportedError(f"{path}: unknown general.architecture {arch!r} (known: {known})")
    model = _Model(file, path)
    model.keys.allow("final_logit_softcapping")
    model.keys.allow("attn_logit_softcapping")
    bos = general.ids("tokenizer.ggml.bos_token_id")
    spec = with_ids(_ARCHITECTURES[arch](model), bos, end_ids(general), str(path))
    layout = _layout(spec)
    check_layout(spec, file.tensors, layout, "blk.", None)
    return Checkpoint(
        spec=spec,
        source=LayoutSource(spec, file.tensors, layout),
        tokenizer_json=tokenizer_json(general, spec.vocab_size),
        chat_template=general.text("tokenizer.chat_template") if general.has("tokenizer.chat_template") else None,
        name=general.text("general.name", path.stem),
    )


def _layout(spec: ModelSpec) -> Layout:
    layout = plain_layout(spec, _NAMING)
    if spec.family != "llama":
        return layout
    for name, pieces in layout.items():  # llama.cpp stores q and k of this architecture for interleaved rotation
        if name.endswith((".qkv", ".qkv.bias")):
            head = attention_at(spec, name).head_dim
            q, k, v = pieces
            layout[name] = (dataclasses.replace(q, head=head), dataclasses.replace(k, head=head), v)
    return layout
