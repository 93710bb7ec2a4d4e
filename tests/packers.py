"""Writers of 4-bit checkpoints, one for each format, from the same integers. Written from the formats' definitions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fakes import BOS, EOS, byte_tokenizer
from safetensors.torch import save_file

FORMATS = ("awq", "gptq", "gptq_v2", "compressed-tensors")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
ONES = np.uint32(0x11111111)


@dataclass
class Linear:
    """levels uint8 [N, K], scales float32 [N, K/G] of float16 values, zeros uint8 [N, K/G]."""

    levels: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray

    @property
    def group(self) -> int:
        return self.levels.shape[1] // self.zeros.shape[1]

    def weight(self) -> np.ndarray:
        """Exact: computed in float64, a product of 11 and 5 bits."""
        off = self.levels.astype(np.float64) - self.zeros.repeat(self.group, 1)
        return (off * self.scales.repeat(self.group, 1)).astype(np.float32)


def random_linear(rng, n: int, k: int, group: int, symmetric: bool = False) -> Linear:
    """Rounded normal weights; about one group in eight is all positive (zero 0), as many all negative (zero 15)."""
    w = rng.normal(0, k**-0.5, (n, k // group, group))
    lucky = rng.integers(0, 8, (n, k // group, 1))
    w = np.where(lucky == 0, abs(w), np.where(lucky == 1, -abs(w), w))
    if symmetric:
        scales, zeros = abs(w).max(-1) / 7.5, np.full(w.shape[:2], 8)
    else:
        low, high = np.minimum(w.min(-1), 0), np.maximum(w.max(-1), 0)
        scales = (high - low) / 15
        zeros = np.rint(-low / scales)
    scales = scales.astype(np.float16).astype(np.float64)
    levels = np.clip(np.rint(w / scales[..., None]) + zeros[..., None], 0, 15).reshape(n, k)
    return Linear(levels.astype(np.uint8), scales.astype(np.float32), zeros.astype(np.uint8))


def words(values: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """uint8 [R, C] -> uint32 [R, ceil(C/8)]: nibble i from below holds column order[i] of its eight."""
    rows, columns = values.shape
    padded = np.zeros((rows, -(-columns // 8) * 8), np.uint32)
    padded[:, :columns] = values
    eights = padded.reshape(rows, -1, 8)
    out = np.zeros(eights.shape[:2], np.uint32)
    for i, column in enumerate(order):
        out |= eights[:, :, column] << np.uint32(4 * i)
    return out


def int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values).view(np.int32))


def pack(w: Linear, kind: str, dtype: torch.dtype = torch.float16, symmetric: bool = False) -> dict[str, torch.Tensor]:
    """The parts of one layer by their last names."""
    scales = torch.from_numpy(w.scales).to(dtype)
    if kind == "compressed-tensors":
        out = {"weight_packed": int32(words(w.levels)), "weight_scale": scales,
               "weight_shape": torch.tensor(w.levels.shape)}  # fmt: skip
        return out if symmetric else out | {"weight_zero_point": int32(words(w.zeros.T).T)}
    if kind == "awq":
        qweight, qzeros = words(w.levels.T, AWQ_ORDER), words(w.zeros.T, AWQ_ORDER)
        return {"qweight": int32(qweight), "qzeros": int32(qzeros), "scales": scales.T.contiguous()}
    qzeros = words(w.zeros.T) - (ONES if kind == "gptq" else np.uint32(0))
    g_idx = torch.arange(w.levels.shape[1], dtype=torch.int32) // w.group
    return {"qweight": int32(words(w.levels).T), "qzeros": int32(qzeros), "scales": scales.T.contiguous(),
            "g_idx": g_idx}  # fmt: skip


def quantization_config(kind: str, group: int, symmetric: bool = False) -> dict:
    if kind == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": not symmetric, "version": "gemm",
                "modules_to_not_convert": None}  # fmt: skip
    if kind == "compressed-tensors":
        weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group,
                   "dynamic": False, "actorder": None, "observer": "minmax"}  # fmt: skip
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {"quant_method": kind, "format": "pack-quantized", "quantization_status": "compressed",
                "config_groups": {"group_0": scheme}, "ignore": ["lm_head"], "kv_cache_scheme": None}  # fmt: skip
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric, "desc_act": False,
            "checkpoint_format": kind, "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:5.0.0"]}}  # fmt: skip


@dataclass
class Model:
    """A Qwen2 of two layers: linear layers by name, and the float tensors."""

    linears: dict[str, Linear]
    floats: dict[str, torch.Tensor]
    config: dict
    symmetric: bool = False

    def write(self, folder: Path, kind: str, dtype: torch.dtype = torch.float16) -> Path:
        folder.mkdir(exist_ok=True)
        group = next(iter(self.linears.values())).group
        config = self.config | {"quantization_config": quantization_config(kind, group, self.symmetric)}
        (folder / "config.json").write_text(json.dumps(config))
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        packed = {f"{layer}.{part}": t for layer, w in self.linears.items()
                  for part, t in pack(w, kind, dtype, self.symmetric).items()}  # fmt: skip
        save_file(packed | self.floats, folder / "model.safetensors")
        return folder

    def state(self) -> dict[str, torch.Tensor]:
        """The state dict of the same model in float32."""
        return {f"{n}.weight": torch.from_numpy(w.weight()) for n, w in self.linears.items()} | {
            n: t.float() for n, t in self.floats.items()
        }


def random_model(seed: int, group: int = 32, symmetric: bool = False) -> Model:
    rng = np.random.default_rng(seed)
    hidden, inter, kv, layers = max(64, group), 3 * max(32, group), max(32, group // 2), 2
    config = {
        "model_type": "qwen2", "vocab_size": 258, "hidden_size": hidden, "intermediate_size": inter,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": hidden // 4,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False,
        "hidden_act": "silu", "bos_token_id": BOS, "eos_token_id": EOS,
    }  # fmt: skip
    sizes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
             "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inter, hidden), "mlp.up_proj": (inter, hidden),
             "mlp.down_proj": (hidden, inter)}  # fmt: skip

    def half(*shape: int, mean: float = 0.0, size: float = 0.1) -> torch.Tensor:
        return torch.from_numpy(rng.normal(mean, size, shape)).half()

    linears = {f"model.layers.{i}.{n}": random_linear(rng, *size, group, symmetric)
               for i in range(layers) for n, size in sizes.items()}  # fmt: skip
    floats = {"model.embed_tokens.weight": half(258, hidden, size=1), "lm_head.weight": half(258, hidden, size=0.2),
              "model.norm.weight": half(hidden, mean=1)}  # fmt: skip
    for i in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            floats[f"model.layers.{i}.{name}.weight"] = half(hidden, mean=1)
        for name in "qkv":
            floats[f"model.layers.{i}.self_attn.{name}_proj.bias"] = half(sizes[f"self_attn.{name}_proj"][0])
    return Model(linears, floats, config, symmetric)
