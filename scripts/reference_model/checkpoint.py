"""Native checkpoint folders (what mimo_edge.export.families.native reads): writing them, and reading weights back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mimo_edge import params
from mimo_edge.spec import ModelSpec, dumps

SHARD_BYTES = 15 * 2**20


def write(out: Path, spec: ModelSpec, weights: dict[str, Tensor], tokenizer_json: str, chat_template: str) -> None:
    """spec.json, bfloat16 shards of at most SHARD_BYTES with an index, tokenizer.json, chat_template.jinja."""
    out.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    room = SHARD_BYTES
    for p in params.parameters(spec):
        tensor = weights[p.name].detach().to("cpu", torch.bfloat16).contiguous()
        assert tuple(tensor.shape) == p.shape, p.name
        if tensor.nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][p.name] = tensor
        room -= tensor.nbytes
    index: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, out / name)
        index |= dict.fromkeys(shard, name)
    size = sum(t.nbytes for shard in shards for t in shard.values())
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )
    (out / "spec.json").write_text(dumps(spec))
    (out / "tokenizer.json").write_text(tokenizer_json, "utf-8")
    (out / "chat_template.jinja").write_text(chat_template, "utf-8")


def read(folder: Path) -> dict[str, Tensor]:
    """Every parameter of the folder, float32."""
    shards = sorted(folder.glob("model-*.safetensors"))
    return {name: tensor.float() for shard in shards for name, tensor in load_file(shard).items()}
