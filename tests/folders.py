"""Tiny checkpoints for the importer tests: saved by transformers, or written by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from mimo_edge.export.families import Checkpoint
from mimo_edge.params import parameters
from mimo_edge.spec import ModelSpec


def save_tokenizer(folder: Path, size: int) -> None:
    """A word tokenizer with ids 0 .. size - 1."""
    vocab = {f"w{i}": i for i in range(size)}
    Tokenizer(models.WordLevel(vocab, unk_token="w0")).save(str(folder / "tokenizer.json"))


def save_model(model_class, config, folder: Path, shard: str = "50GB", seed: int = 0) -> dict[str, torch.Tensor]:
    """Saves a model with fresh random weights (biases, norms and sinks too) and returns its state, float32."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for n, b in model.named_buffers() if "correction_bias" in n)]:
            tensor.normal_(0, 0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    save_tokenizer(folder, config.get_text_config().vocab_size)
    return {k: v.float() for k, v in model.state_dict().items()}


def write_folder(folder: Path, config: dict, tensors: dict[str, torch.Tensor], vocab: int | None = None) -> None:
    """A folder written by hand: config.json, one safetensors file, a tokenizer."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    save_tokenizer(folder, config["vocab_size"] if vocab is None else vocab)


def edit_json(path: Path, **changes) -> None:
    """Sets keys of a JSON file; None removes the key."""
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


def assert_same(checkpoint: Checkpoint, expected: dict[str, torch.Tensor]) -> None:
    """Every parameter equals `expected` exactly, read whole and read in uneven blocks of rows."""
    names = [p.name for p in parameters(checkpoint.spec)]
    assert sorted(names) == sorted(expected)
    for name in names:
        want = expected[name].float().numpy()
        got = checkpoint.source.read(name)
        assert got.dtype == np.float32 and got.flags.c_contiguous and got.shape == want.shape, name
        assert np.array_equal(got, want), name
        if want.ndim == 2:
            cuts = [0, 1, *range(6, len(want), 11), len(want)]
            blocks = [checkpoint.source.read(name, a, b) for a, b in itertools.pairwise(cuts)]
            assert np.array_equal(np.concatenate(blocks), want), name


def expected_parameters(state: dict[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Canonical parameters put together from a transformers state dict, by hand."""
    gemma = spec.family == "gemma3"
    norm = 1.0 if gemma else 0.0
    out = {"embed": state["model.embed_tokens.weight"], "norm": state["model.norm.weight"] + norm}
    if not spec.tied:
        out["head"] = state["lm_head.weight"]
    for i in range(len(spec.layers)):
        layer = {k.split(f"layers.{i}.")[1]: v for k, v in state.items() if f"model.layers.{i}." in k}
        attn = {k.removeprefix("self_attn."): v for k, v in layer.items()}
        out[f"layers.{i}.attn_norm"] = layer["input_layernorm.weight"] + norm
        out[f"layers.{i}.qkv"] = torch.cat([attn[f"{n}_proj.weight"] for n in "qkv"])
        out[f"layers.{i}.o"] = attn["o_proj.weight"]
        if "q_proj.bias" in attn:
            out[f"layers.{i}.qkv.bias"] = torch.cat([attn[f"{n}_proj.bias"] for n in "qkv"])
        for n in "qk":
            if f"{n}_norm.weight" in attn:
                out[f"layers.{i}.{n}_norm"] = attn[f"{n}_norm.weight"] + norm
        if "sinks" in attn:
            out[f"layers.{i}.sinks"] = attn["sinks"]
        ffn_norm = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        out[f"layers.{i}.ffn_norm"] = layer[f"{ffn_norm}.weight"] + norm
        if gemma:
            out[f"layers.{i}.post_attn_norm"] = layer["post_attention_layernorm.weight"] + norm
            out[f"layers.{i}.post_ffn_norm"] = layer["post_feedforward_layernorm.weight"] + norm
        if "mlp.experts.gate_up_proj" in layer:
            out[f"layers.{i}.router"] = layer["mlp.gate.weight"]
            out[f"layers.{i}.router_bias"] = layer["mlp.gate.e_score_correction_bias"]
            for e, (gate_up, down) in enumerate(
                zip(layer["mlp.experts.gate_up_proj"], layer["mlp.experts.down_proj"], strict=True)
            ):
                out[f"layers.{i}.experts.{e}.gate_up"], out[f"layers.{i}.experts.{e}.down"] = gate_up, down
        else:
            out[f"layers.{i}.gate_up"] = torch.cat([layer["mlp.gate_proj.weight"], layer["mlp.up_proj.weight"]])
            out[f"layers.{i}.down"] = layer["mlp.down_proj.weight"]
    return out
