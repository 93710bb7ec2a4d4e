"""A model's steps as launches.

    step.1, step.4      one token, or a token and its drafts: ends in logits and each row's best token
    step.16, .128, .512 pieces of a prompt: ends in hidden rows; `commit` stores the window layers' keys and values
    head.1, head.4      logits of hidden rows that were picked from a long step

Residual stream x float32 [T, hidden]; other activations float16. The order of launches in a layer:

    [norm +] qkv product, attention, output product + residual, [gate,] [norm +] gate and up product with the
    activation, down product + residual

With norms behind both halves (Gemma) the output and down products go to `y`, and a norm of y is added to x.
"""

from __future__ import annotations

import math

from mimo_edge.errors import UnsupportedError
from mimo_edge.export.programs.layer import Layer
from mimo_edge.export.programs.step import Step
from mimo_edge.export.programs.tuning import Tuning
from mimo_edge.export.programs.weights import device_weights
from mimo_edge.kernels.int4_embedding import variants as embedding
from mimo_edge.kernels.int4_linear import variants as linear
from mimo_edge.kernels.launch import Buffer, Program
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.kernels.sampling import variants as sampling
from mimo_edge.kernels.windowed_attention import variants as attention
from mimo_edge.kv.windows import ring_slots
from mimo_edge.spec import MAX_DRAFTS, ModelSpec

PAGE = 64  # tokens, as kv/layout.py's default
# Short steps write their rows before anybody accepts them. With room for K+1 more, a dropped step overwrites nothing
# that the ring of the layout (kv/layout.py) still holds.
SPARE = 2 * MAX_DRAFTS + 1
DECODE_ROWS = (1, MAX_DRAFTS + 1)
PREFILL_ROWS = (16, 128, 512)


def lower(spec: ModelSpec, tuning: Tuning, prefill_rows: tuple[int, ...] = PREFILL_ROWS) -> ProgramSet:
    """Programs for one sequence a step. Raises UnsupportedError when the model has parts without kernels."""
    check_supported(spec)
    rings = {k: ring_slots(a.window, SPARE, spec.max_context) for k, a in spec.attention.items() if a.window}
    pages = math.ceil(spec.max_context / PAGE)
    programs: dict[str, Program] = {}
    buffers = device_weights(spec) | _inputs(max(*DECODE_ROWS, *prefill_rows), pages) | _pools(spec, rings)
    for rows in DECODE_ROWS:
        step = Step(spec, tuning, rows, pages, rings)
        _body(step)
        _head(step, "x")
        programs[f"step.{rows}"] = step.program()
        head = Step(spec, tuning, rows, pages, rings)
        head.buffer("head_hidden", "fp32", (rows, spec.hidden_size))
        _head(head, "head_hidden")
        programs[f"head.{rows}"] = head.program()
    for rows in prefill_rows:
        step = Step(spec, tuning, rows, pages, rings)
        _body(step)
        programs[f"step.{rows}"] = step.program()
    for program in programs.values():
        for name, b in program.buffers.items():
            if name not in buffers or b.nbytes > buffers[name].nbytes:
                buffers[name] = b
    return ProgramSet(
        PAGE, pages, rings, buffers, {n: Program(p.rows, p.launches, p.commit) for n, p in programs.items()}
    )


def check_supported(spec: ModelSpec) -> None:
    """Raises UnsupportedError, in one line, for what has no kernels."""

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise UnsupportedError(f"targets with a GPU do not support {what}: use --target cpu")

    used = [(spec.attention_of(i), spec.ffn_of(i)) for i in range(len(spec.layers))]
    need(not any(f.moe for _, f in used), "mixture-of-experts layers")
    need(not spec.post_norms or not any(f.gate for _, f in used), "gates together with norms behind the feed-forward")
    head = "head" if spec.separate_head else "embedding"
    for kind in ("attention", "ffn", "embedding", head):
        need(spec.quant.of(kind) is not None, f"float weights ({kind}; give --bits)")


def _inputs(rows: int, pages: int) -> dict[str, Buffer]:
    shapes = {
        "tokens": (rows,),
        "positions": (rows,),
        "sequences": (rows,),
        "lengths": (1,),
        "counts": (1,),
        "table.pages": (1, pages),
        "table.rings": (1, 1),
    }
    return {name: Buffer("i32", shape, "input") for name, shape in shapes.items()}


def _pools(spec: ModelSpec, rings: dict[str, int]) -> dict[str, Buffer]:
    out = {}
    for i, layer in enumerate(spec.layers):
        a = spec.attention_of(i)
        block, per = (PAGE, "page") if a.window is None else (rings[layer.attention], "ring")
        out[f"layers.{i}.k"] = Buffer("fp16", (1, block, a.kv_heads, a.head_dim), "kv", 0, per)  # type: ignore[arg-type]
        out[f"layers.{i}.v"] = Buffer("fp16", (1, block, a.kv_heads, a.v_head_dim), "kv", 0, per)  # type: ignore[arg-type]
    return out


def _body(s: Step) -> None:
    """From tokens to the hidden rows x."""
    spec = s.spec
    assert spec.quant.embedding is not None
    s.buffer("x", "fp32", (s.rows, spec.hidden_size), "output")
    s.add(
        embedding.embed(
            s.rows,
            spec.vocab_size,
            spec.hidden_size,
            spec.quant.embedding,
            tokens="tokens",
            w="embed",
            y="x",
            scale=spec.embed_scale,
        )
    )
    for kind in dict.fromkeys(layer.attention for layer in spec.layers):
        a = spec.attention[kind]
        s.buffers[f"rotation.{kind}"] = attention.rotation_buffer(s.rows, a)
        frequencies, out = f"frequencies.{kind}", f"rotation.{kind}"
        s.add(attention.rotation(s.rows, a, positions="positions", frequencies=frequencies, out=out))
    for i in range(len(spec.layers)):
        Layer(s, i).add()


def _head(s: Step, x: str) -> None:
    """From hidden rows to logits float32 [T, vocab] and the best token of each row."""
    spec = s.spec
    w = "head" if spec.separate_head else "embed"
    quant = spec.quant.head if spec.separate_head else spec.quant.embedding
    assert quant is not None
    n, k, tuned = spec.vocab_size, spec.hidden_size, s.tuning.product("head", spec.vocab_size, spec.hidden_size)
    parts = linear.head_programs(n, tuned)
    s.buffer("logits", "fp32", (s.rows, n), "output")
    s.buffer("head.best", "fp32", (s.rows, parts))
    s.buffer("head.ids", "i32", (s.rows, parts))
    s.buffer("best", "i32", (s.rows,), "output")
    s.add(
        linear.decode_head(
            s.rows,
            n,
            k,
            quant,
            x=x,
            w=w,
            y="logits",
            best="head.best",
            best_index="head.ids",
            norm="norm",
            normed=s.buffer("normed", "fp16", (s.rows, k)),
            eps=spec.norm_eps,
            tuned=tuned,
        )
    )
    s.add(sampling.best(s.rows, parts, values="head.best", ids="head.ids", tokens="best"))
