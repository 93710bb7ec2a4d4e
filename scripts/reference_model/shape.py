"""The reference model's shape, and a tiny one for tests."""

from __future__ import annotations

from mimo_edge.spec import AttentionSpec, FeedForwardSpec, GateSpec, LayerSpec, ModelSpec, MtpSpec
from scripts.reference_model.chat import BOS, END, SPECIAL
from scripts.reference_model.tokenizer import VOCAB


def reference_spec() -> ModelSpec:
    """29.9M parameters: MiMo-V2's shape, dense; five window layers to one full layer."""
    return build(hidden=256, layers=18, ffn=1536, mtp_ffn=384, window=128, gate=GateSpec(block=32, rank=24))


def tiny_spec(vocab: int = 300) -> ModelSpec:
    """The same structure at a size for CPU tests."""
    return build(
        hidden=32, layers=4, ffn=64, mtp_ffn=48, window=7, gate=GateSpec(block=16, rank=8), vocab=vocab, period=3
    )


def build(
    *,
    hidden: int,
    layers: int,
    ffn: int,
    mtp_ffn: int,
    window: int,
    gate: GateSpec,
    vocab: int = VOCAB,
    period: int = 6,
) -> ModelSpec:
    """Heads of 64 (keys) and 32 (values) at hidden 256, scaled with it; every `period`-th layer has full attention."""
    d = hidden // 4
    common = {"heads": 8, "kv_heads": 2, "head_dim": d, "v_head_dim": d // 2, "rotary_dim": d // 2, "scale": d**-0.5}
    return ModelSpec(
        family="reference",
        vocab_size=vocab,
        hidden_size=hidden,
        max_context=8192,
        norm_eps=1e-5,
        attention={
            "full": AttentionSpec(**common, rope_theta=640_000.0, value_scale=0.707),
            "window": AttentionSpec(**common, rope_theta=10_000.0, value_scale=0.707, window=window, sinks=True),
        },
        ffn={"dense": FeedForwardSpec(ffn, gate=gate), "mtp": FeedForwardSpec(mtp_ffn)},
        layers=tuple(LayerSpec("full" if i % period == period - 1 else "window", "dense") for i in range(layers)),
        tied=True,
        embed_scale=float(hidden) ** 0.5,
        bos_id=SPECIAL.index(BOS),
        eos_ids=(SPECIAL.index(END),),
        mtp=MtpSpec(heads=3, attention="window", ffn="mtp"),
    )
