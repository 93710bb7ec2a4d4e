"""Tiny model specs, one for each shape that matters, and random weights for them."""

from dataclasses import replace

import torch

from mimo_edge.params import parameters
from mimo_edge.spec import AttentionSpec, FeedForwardSpec, GateSpec, LayerSpec, ModelSpec, MoeSpec, MtpSpec

FULL, WINDOW = LayerSpec("full", "dense"), LayerSpec("window", "dense")


def mimo_spec(window: int = 8, moe: bool = False, gate: bool = False, mtp: int = 0) -> ModelSpec:
    """MiMo-V2's shape: more kv heads in window layers, sinks, value scale, partial rotary, v heads of another size."""
    full = AttentionSpec(4, 1, 12, 8, 4, 5e6, 12**-0.5, value_scale=0.707)
    dense = FeedForwardSpec(64, gate=GateSpec(16, 8) if gate else None)
    ffn = {"dense": dense, "experts": FeedForwardSpec(32, moe=MoeSpec(4, 2))} if moe else {"dense": dense}
    layers = (FULL, WINDOW, WINDOW, LayerSpec("window", "experts" if moe else "dense"), FULL)
    if mtp:
        ffn["mtp"] = FeedForwardSpec(32)
    return ModelSpec(
        family="mimo_v2",
        vocab_size=97,
        hidden_size=32,
        max_context=256,
        norm_eps=1e-5,
        attention={"full": full, "window": replace(full, kv_heads=2, rope_theta=1e4, window=window, sinks=True)},
        ffn=ffn,
        layers=layers,
        mtp=MtpSpec(mtp, "window", "mtp") if mtp else None,
    )


def gemma_spec(windows: tuple[int, int] = (8, 8)) -> ModelSpec:
    """Gemma 3's shape: q/k norms, norms behind both halves, tied embedding with a scale, tanh GELU; two windows."""
    w = AttentionSpec(4, 1, 16, 16, 16, 1e4, 16**-0.5, window=windows[0], qk_norm=True)
    return ModelSpec(
        family="gemma3",
        vocab_size=128,
        hidden_size=32,
        max_context=256,
        norm_eps=1e-6,
        attention={
            "window": w,
            "wide": replace(w, window=windows[1]),
            "full": replace(w, window=None, rope_theta=1e6),
        },
        ffn={"dense": FeedForwardSpec(64, "gelu_tanh")},
        layers=(WINDOW, LayerSpec("wide", "dense"), FULL, WINDOW),
        tied=True,
        embed_scale=32**0.5,
        post_norms=True,
    )


def qwen_spec(layers: int = 3) -> ModelSpec:
    """Only full layers, biases on q, k and v."""
    return ModelSpec(
        family="qwen2",
        vocab_size=97,
        hidden_size=32,
        max_context=256,
        norm_eps=1e-6,
        attention={"full": AttentionSpec(4, 2, 8, 8, 8, 1e6, 8**-0.5, qkv_bias=True)},
        ffn={"dense": FeedForwardSpec(64)},
        layers=(FULL,) * layers,
    )


def window_only_spec(window: int = 3) -> ModelSpec:
    """No full layers at all."""
    return replace(mimo_spec(window), layers=(WINDOW,) * 3)


ALL = {
    "mimo": mimo_spec(),
    "mimo-moe": mimo_spec(moe=True),
    "mimo-gated": mimo_spec(gate=True),
    "gemma": gemma_spec(),
    "two-windows": gemma_spec((5, 11)),
    "qwen": qwen_spec(),
    "window-only": window_only_spec(),
    "window-of-one": window_only_spec(1),
    "biased": replace(mimo_spec(moe=True, gate=True), output_bias=True),
    "biased-gemma": replace(gemma_spec(), output_bias=True),
}


class RandomWeights:
    """oracle.Weights with random values: norms near 1, the rest of a size that keeps activations near 1."""

    def __init__(self, spec: ModelSpec, seed: int):
        g = torch.Generator().manual_seed(seed)
        self.tensors = {}
        for p in parameters(spec):
            noise = torch.randn(p.shape, generator=g)
            norm = p.name.endswith("norm") and len(p.shape) == 1
            self.tensors[p.name] = (
                1 + 0.1 * noise if norm else noise * (p.shape[-1] ** -0.5 if len(p.shape) > 1 else 0.5)
            )

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def rows(self, name: str, index: torch.Tensor) -> torch.Tensor:
        return self.tensors[name][index]
