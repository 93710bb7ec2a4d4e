"""MiMo-7B: a Qwen2 trunk with full attention and one released MTP layer.

The layer's input is proj([norm(h), norm(e)]), hidden state first, h before the final norm, e zeroed at position 0
(vLLM and SGLang, mimo_mtp.py). Its tensors are model.mtp_layers.0.*; without them the spec has no MTP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from mimo_edge.errors import UnsupportedError
from mimo_edge.export.families.decoder import Family, hf_naming
from mimo_edge.export.families.fields import Fields
from mimo_edge.export.families.layout import Layout, plain_layout
from mimo_edge.export.families.qwen import qwen_spec
from mimo_edge.spec import ModelSpec, MtpSpec

_HEADS = "model.mtp_layers."
_HEAD_PARTS = {
    "token_norm": ("token_layernorm.weight",),
    "hidden_norm": ("hidden_layernorm.weight",),
    "proj": ("input_proj.weight",),
    "norm": ("final_layernorm.weight",),
}


def _spec(config: Fields, names: Collection[str]) -> ModelSpec:
    spec = qwen_spec(config)
    if set(spec.attention) != {"full"}:
        raise UnsupportedError(f"{config.where}: a sliding window is not supported for model_type 'mimo'")
    heads = config.integer("num_nextn_predict_layers", 0)
    if not heads or not any(n.startswith(_HEADS) for n in names):
        return spec
    return dataclasses.replace(spec, mtp=MtpSpec(heads, "full", "dense", order="hidden_first", zero_first=True))


def _layout(spec: ModelSpec, config: Fields, names: Collection[str]) -> Layout:
    naming = dataclasses.replace(hf_naming(), heads=f"{_HEADS}{{}}.", head_parts=_HEAD_PARTS)
    return plain_layout(spec, naming)


FAMILY = Family(("mimo",), _spec, _layout)
