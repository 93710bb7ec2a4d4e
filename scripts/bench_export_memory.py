"""Peak memory and time of exporting a large Hugging Face folder of random weights.

    python scripts/bench_export_memory.py [--dir DIR] [--layers N] [--bits 4|8]

The folder has Qwen3-1.7B's shapes in bfloat16 (3.4 GB), is written shard by shard, exported by a child process, and
deleted. Peaks are the child's resident memory (getrusage), imports and pages of mapped files included. Without --bits
the quantisation is chosen by measurement, which is the export's default and its hungriest form.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BOUND_BYTES = 2_500_000_000
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 6144, 16, 8, 128, 151_936
WRITE, EXPORT = "--write", "--export"  # what a child does


def export(src: str, out: str, bits: int | None) -> None:
    """Runs in the child: exports and prints peaks, by phase, as one line of JSON."""
    start, phases = time.perf_counter(), {}

    def mark(phase: str) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        phases[phase] = {"seconds": time.perf_counter() - start, "peak_rss_bytes": peak}

    from mimo_edge.export.pipeline import export_bundle, uniform

    mark("imports")
    bundle = export_bundle(
        src, out, quant=uniform(bits) if bits else None, progress=lambda done, total, what: mark(what.split()[0])
    )
    mark("finish")
    size = sum(f.bytes for f in bundle.manifest.files.values())
    print(json.dumps({"phases": phases, "bundle_bytes": size}))


def write_folder(folder: Path, layers: int) -> None:
    import torch
    from safetensors.torch import save_file

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16) * shape[-1] ** -0.5

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    def layer(i: int) -> dict[str, torch.Tensor]:
        attention = {
            "q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN),
            "k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            "v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            "o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
            "q_norm.weight": ones(HEAD_DIM),
            "k_norm.weight": ones(HEAD_DIM),
        }
        rest = {
            "mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
            "mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN),
            "mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
            "input_layernorm.weight": ones(HIDDEN),
            "post_attention_layernorm.weight": ones(HIDDEN),
        }
        named = {f"self_attn.{name}": t for name, t in attention.items()} | rest
        return {f"model.layers.{i}.{name}": t for name, t in named.items()}

    weight_map: dict[str, str] = {}
    for n in range(layers + 1):
        outer = {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "model.norm.weight": ones(HIDDEN)}
        tensors = layer(n) if n < layers else outer
        shard = f"model-{n + 1:05}-of-{layers + 1:05}.safetensors"
        save_file(tensors, folder / shard)
        weight_map |= dict.fromkeys(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_config(folder: Path, layers: int) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": VOCAB - 1,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_tokenizer(folder: Path) -> None:
    """Bytes and then random pairs of earlier tokens: as large as the real one, because it takes memory too."""
    import random

    from tokenizers import Tokenizer, models, pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    seen, merges = set(tokens), []
    while len(tokens) < VOCAB:
        pair = random.choice(tokens), random.choice(tokens)
        if len("".join(pair)) <= 12 and "".join(pair) not in seen:
            merges.append(pair)
            seen.add("".join(pair))
            tokens.append("".join(pair))
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_checkpoint(folder: Path, layers: int) -> None:
    folder.mkdir()
    write_config(folder, layers)
    write_tokenizer(folder)
    write_folder(folder, layers)


def measure(base: Path, layers: int, bits: int | None) -> dict[str, Any]:
    """Both steps run in children: a process starts with its parent's peak, so this one has to stay small."""
    folder = str(base / "checkpoint")
    print(f"writing a random checkpoint of {layers} layers ...", flush=True)
    subprocess.run([sys.executable, __file__, WRITE, folder, str(layers)], check=True)
    print("exporting ...", flush=True)
    command = [sys.executable, __file__, EXPORT, folder, str(base / "bundle"), str(bits or 0)]
    child = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(child.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == [WRITE]:
        return write_checkpoint(Path(sys.argv[2]), int(sys.argv[3]))
    if sys.argv[1:2] == [EXPORT]:
        return export(sys.argv[2], sys.argv[3], int(sys.argv[4]) or None)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="where to put 5 GB of scratch files [default: the system's]")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--bits", type=int, choices=[4, 8])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as base:
        result = measure(Path(base), args.layers, args.bits)
    print(f"\n{'phase':<12}{'ends after':>12}{'peak RSS so far':>18}")
    for phase, at in result["phases"].items():
        print(f"{phase:<12}{at['seconds']:>10.1f} s{at['peak_rss_bytes'] / 1e6:>15,.0f} MB")
    peak = max(at["peak_rss_bytes"] for at in result["phases"].values())
    print(
        f"peak {peak / 1e6:,.0f} MB of at most {BOUND_BYTES / 1e6:,.0f}: {'ok' if peak < BOUND_BYTES else 'TOO MUCH'}"
    )
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(json.dumps({"layers": args.layers, "bits": args.bits, "peak_rss_bytes": peak, "machine": machine} | result))
    sys.exit(peak >= BOUND_BYTES)


if __name__ == "__main__":
    main()
