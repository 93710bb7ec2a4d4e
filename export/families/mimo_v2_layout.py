"""Where MiMo-V2's tensors lie: split or fused q, k, v; experts apart or stacked; MTP blocks under model.mtp.layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from mimo_edge.errors import BadInputError
from mimo_edge.export.families.decoder import LAYER_PARTS, hf_naming
from mimo_edge.export.families.fields import Fields
from mimo_edge.export.families.layout import Layout, Naming, Piece, attention_at, plain_layout
from mimo_edge.params import Param, parameters
from mimo_edge.spec import ModelSpec

MTP = "model.mtp.layers."
_HEAD_PARTS = {
    "token_norm": ("enorm.weight",),
    "hidden_norm": ("hnorm.weight",),
    "proj": ("eh_proj.weight",),
    "norm": ("final_layernorm.weight",),
}


def count_heads(config: Fields, names: Collection[str]) -> int:
    """MTP heads to import: as many as the config says, or as there are blocks where it is silent (V2-Flash); none
    when the checkpoint comes without their weights."""
    blocks = {n.removeprefix(MTP).split(".")[0] for n in names if n.startswith(MTP)}
    return config.integer("num_nextn_predict_layers", len(blocks)) if blocks else 0


def mimo_v2_layout(spec: ModelSpec, config: Fields, names: Collection[str]) -> Layout:
    layout = plain_layout(spec, _naming(names))
    for param in parameters(spec):
        pieces = layout[param.name]
        if param.name.startswith("mtp.") and param.name.endswith(".layer.ffn_norm"):
            tensor = pieces[0].tensor.replace("post_attention_layernorm", "pre_mlp_layernorm")
            layout[param.name] = (dataclasses.replace(pieces[0], tensor=tensor),)
        elif param.name.endswith((".qkv", ".qkv.bias")):
            fused = pieces[0].tensor.replace("q_proj", "qkv_proj")
            if fused in names:
                layout[param.name] = _deshard(spec, param, fused, config.integer("num_key_value_heads"))
        elif ".experts." in param.name:
            stacked = _stacked(spec, param, pieces[0].tensor)
            if stacked.tensor in names:
                layout[param.name] = (stacked,)
    return layout


def _naming(names: Collection[str]) -> Naming:
    sinks = next((n for n in names if n.endswith(".self_attn.sinks")), None)
    base = hf_naming(
        sinks=("self_attn.sinks" if sinks else "self_attn.attention_sink_bias",),
        router=("mlp.gate.weight",),
        router_bias=("mlp.gate.e_score_correction_bias",),
        **{
            "experts.gate_up": tuple(n.replace("mlp.", "mlp.experts.{}.") for n in LAYER_PARTS["gate_up"]),
            "experts.down": ("mlp.experts.{}.down_proj.weight",),
        },
    )
    return dataclasses.replace(base, heads=f"{MTP}{{}}.", head_parts=_HEAD_PARTS)


def _stacked(spec: ModelSpec, param: Param, tensor: str) -> Piece:
    """An expert as rows of mlp.experts.gate_up_proj [E, 2I, H] or mlp.experts.down_proj [E, H, I]."""
    layer, expert = int(param.name.split(".")[1]), int(param.name.split(".")[3])
    moe = spec.ffn_of(layer).moe
    assert moe is not None
    name = "gate_up_proj" if param.name.endswith("gate_up") else "down_proj"
    prefix = tensor.split(".experts.")[0]
    return Piece(f"{prefix}.experts.{name}", (moe.experts, *param.shape), param.shape[0], expert * param.shape[0])


def _deshard(spec: ModelSpec, param: Param, tensor: str, chunks: int) -> tuple[Piece, ...]:
    """Rows of a fused qkv_proj, stored in as many chunks [Q_c | K_c | V_c] as full layers have kv heads, in window
    layers and MTP blocks too (vLLM mimo_v2_mtp.py, ckpt_tp; the scale rows of the FP8 releases fit no other count)."""
    a = attention_at(spec, param.name)
    if a.heads % chunks or a.kv_heads % chunks:
        raise BadInputError(f"{tensor}: {a.heads} heads and {a.kv_heads} kv heads do not divide into {chunks} chunks")
    parts = [rows // chunks for rows in (a.q_rows, a.k_rows, a.v_rows)]
    starts = [0, parts[0], parts[0] + parts[1]]
    return tuple(
        Piece(tensor, param.shape, rows, c * sum(parts) + start)
        for rows, start in zip(parts, starts, strict=True)
        for c in range(chunks)
    )
