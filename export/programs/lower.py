"""A model's steps as launches.

    step.1, step.4      one token, or a token and its drafts: ends in logits and each row's best token
    step.16, .128, .512 pieces of a prompt: ends in hidden rows; `commit` stores the window layers' keys and values
    head.1, head.4      logits of hidden rows that were picked from a long step
    heads.py            MTP heads: drafts, their verification, and rows that heads have missed

Residual stream x float32 [T, hidden]; other activations float16. The order of launches in a layer:

    [norm +] qkv product, attention, output product + residual, [gate,] [norm +] gate and up product with the
    activation, down product + residual

With norms behind both halves (Gemma) the output and down products go to `y`, and a norm of y is added to x.
"""

from __future__ import annotations

import math

from mimo_edge.errors import UnsupportedError
from mimo_edge.export.programs.heads import head_inputs, head_pools, head_programs, head_rings, keep_hidden
from mimo_edge.export.programs.model import best, body, logits
from mimo_edge.export.programs.step import Step
from mimo_edge.export.programs.tuning import Tuning
from mimo_edge.export.programs.weights import device_weights
from mimo_edge.kernels.launch import Buffer, Program
from mimo_edge.kernels.programs import ProgramSet
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
    longest = max(*DECODE_ROWS, *prefill_rows)
    rings = {k: ring_slots(a.window, SPARE, spec.max_context) for k, a in spec.attention.items() if a.window}
    rings |= head_rings(spec, longest)
    pages = math.ceil(spec.max_context / PAGE)
    programs: dict[str, Program] = {}
    buffers = device_weights(spec) | _inputs(longest, pages) | head_inputs(spec, longest)
    buffers |= _pools(spec, rings) | head_pools(spec, rings, PAGE)
    for rows in DECODE_ROWS:
        step = Step(spec, tuning, rows, pages, rings)
        body(step)
        keep_hidden(step)
        _tokens(step, "x")
        programs[f"step.{rows}"] = step.program()
        head = Step(spec, tuning, rows, pages, rings)
        head.buffer("head_hidden", "fp32", (rows, spec.hidden_size))
        _tokens(head, "head_hidden")
        programs[f"head.{rows}"] = head.program()
    for rows in prefill_rows:
        step = Step(spec, tuning, rows, pages, rings)
        body(step)
        keep_hidden(step)
        programs[f"step.{rows}"] = step.program()
    programs |= head_programs(spec, tuning, pages, rings, prefill_rows)
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

    used = [spec.ffn_of(i) for i in range(len(spec.layers))] + ([spec.ffn[spec.mtp.ffn]] if spec.mtp else [])
    need(not any(f.moe for f in used), "mixture-of-experts layers")
    need(not spec.post_norms or not any(f.gate for f in used), "gates together with norms behind the feed-forward")
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


def _tokens(s: Step, x: str) -> None:
    """From hidden rows to logits float32 [T, vocab] and the best token of each row."""
    logits(s, x, s.rows)
    best(s, s.rows, s.buffer("best", "i32", (s.rows,), "output"))
