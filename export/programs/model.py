"""The main model's parts of a step: tokens to hidden rows, and hidden rows to logits and their best tokens."""

from __future__ import annotations

from mimo_edge.export.programs.layer import Layer
from mimo_edge.export.programs.step import Step
from mimo_edge.kernels.int4_embedding import variants as embedding
from mimo_edge.kernels.int4_linear import variants as linear
from mimo_edge.kernels.sampling import variants as sampling
from mimo_edge.kernels.windowed_attention import variants as attention


def body(s: Step, tokens: str = "tokens", first: int = 0) -> None:
    """From the tokens at `first` and behind to the hidden rows x."""
    spec = s.spec
    assert spec.quant.embedding is not None
    n, k, quant = spec.vocab_size, spec.hidden_size, spec.quant.embedding
    s.buffer("x", "fp32", (s.rows, k), "output")
    names = {"tokens": tokens, "w": "embed", "y": "x"}
    s.add(embedding.embed(s.rows, n, k, quant, scale=spec.embed_scale, first=first, **names))
    for kind in dict.fromkeys(layer.attention for layer in spec.layers):
        rotation(s, kind)
    for i, kinds in enumerate(spec.layers):
        Layer(s, f"layers.{i}", kinds).add()


def rotation(s: Step, kind: str, positions: str = "positions") -> None:
    """Angles of the rows' positions, for all layers of a kind of attention."""
    a, out = s.spec.attention[kind], f"rotation.{kind}"
    s.buffers[out] = attention.rotation_buffer(s.rows, a)
    s.add(attention.rotation(s.rows, a, positions=positions, frequencies=f"frequencies.{kind}", out=out))


def logits(s: Step, x: str, rows: int, norm: str = "norm", first: int = 0) -> None:
    """From hidden rows, `first` and behind, to logits float32 [rows, vocab] and the best of each of their parts."""
    spec = s.spec
    w = "head" if spec.separate_head else "embed"
    quant = spec.quant.head if spec.separate_head else spec.quant.embedding
    assert quant is not None
    n, k, tuned = spec.vocab_size, spec.hidden_size, s.tuning.product("head", spec.vocab_size, spec.hidden_size)
    parts = linear.head_programs(n, tuned)
    names = {
        "x": x,
        "w": w,
        "y": s.buffer("logits", "fp32", (rows, n), "output"),
        "best": s.buffer("head.best", "fp32", (rows, parts)),
        "best_index": s.buffer("head.ids", "i32", (rows, parts)),
        "norm": norm,
        "normed": s.buffer("normed", "fp16", (rows, k)),
    }
    s.add(linear.decode_head(rows, n, k, quant, first=first, eps=spec.norm_eps, tuned=tuned, **names))


def best(s: Step, rows: int, tokens: str, first: int = 0) -> None:
    """Behind `logits`: the best token of each row."""
    spec = s.spec
    parts = linear.head_programs(spec.vocab_size, s.tuning.product("head", spec.vocab_size, spec.hidden_size))
    s.add(sampling.best(rows, parts, values="head.best", ids="head.ids", tokens=tokens, first=first))
