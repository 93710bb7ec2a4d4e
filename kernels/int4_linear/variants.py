"""Launches of Int4Linear for a size. Pure Python: names of buffers in, launches out.

A matrix `w` stands for the buffers f"{w}.q", f"{w}.scales", f"{w}.zeros" of `layout.shapes`. Activations are float16
[rows, k]. With `norm`, x is the float32 residual stream [rows, k] instead: a launch in front writes rmsnorm(x) * norm
to the float16 scratch `normed` [rows, k]. An operand that a launch does not use is given x and never read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mimo_edge.errors import UnsupportedError
from mimo_edge.kernels.int4_linear.layout import tiles
from mimo_edge.kernels.launch import Launch, Value, Variant
from mimo_edge.kernels.norm.variants import rms_norm
from mimo_edge.spec import TensorQuant

Activation = Literal["silu", "gelu_tanh"]
Operands = dict[str, str | int | float]
DECODE_ROWS = 8  # the most rows of the decode kernels: the columns of one matrix instruction
_LINE, _SHARE = 32, 512  # words of a cache line, lines that a prefetching program asks for
_WEIGHTS = {"q": "*i32", "scales": "*fp16", "zeros": "*u8"}


@dataclass(frozen=True)
class Tuned:
    """How a decode kernel is cut: `row_tiles` tiles of 32 rows a program, K dealt to `warps` warps, `stages` turns in
    flight. `overlap`: it may be launched before the kernel in front of it has ended (compute capability 9.0 and later).
    `ahead`: bytes of each tile of weights that the norm in front of it brings to the L2 cache.
    """

    row_tiles: int = 1
    warps: int = 4
    stages: int = 4
    overlap: bool = False
    ahead: int = 0


@dataclass(frozen=True)
class TunedMany:
    """How a prefill kernel is cut: `warps` tiles of 32 rows by `tokens` rows of x a program, K in `chunks` of 32."""

    warps: int = 4
    tokens: int = 64
    chunks: int = 2
    stages: int = 3


def choose(rules: Sequence[Mapping[str, int]], n: int, k: int) -> Tuned:
    """The cut of an [n, k] product (of a gate and up product, n is the intermediate size): the last rule whose `tiles`
    the product has, or the default. No warp is left without a unit of K."""
    rule = next((r for r in reversed(rules) if r["tiles"] <= tiles(n)), {"row_tiles": 1, "warps": 4, "stages": 4})
    warps = rule["warps"]
    while warps > 1 and k // unit(k) < warps:
        warps //= 2
    return Tuned(rule["row_tiles"], warps, rule["stages"], bool(rule.get("overlap", 0)), rule.get("ahead", 0))


def choose_many(rules: Sequence[Mapping[str, int]], rows: int) -> TunedMany:
    """The cut of the prefill kernels for a step of `rows` rows: the last rule whose `rows` it has, or the default."""
    rule = next((r for r in reversed(rules) if r["rows"] <= rows), None)
    return TunedMany(rule["warps"], rule["tokens"], rule["chunks"], rule["stages"]) if rule else TunedMany()


def unit(k: int) -> int:
    """What a warp takes of K at a time. K is a multiple of its group, so a unit holds whole groups."""
    return next(u for u in (128, 64, 32) if k % u == 0)


def decode(
    rows: int,
    n: int,
    k: int,
    quant: TensorQuant,
    *,
    x: str,
    w: str,
    y: str,
    norm: str | None = None,
    normed: str | None = None,
    eps: float = 0.0,
    bias: str | None = None,
    residual: str | None = None,
    out: Literal["fp16", "fp32"] = "fp16",
    x_stride: int | None = None,
    y_stride: int | None = None,
    tuned: Tuned | None = None,
) -> tuple[Launch, ...]:
    """y [rows, n] = x w^T (+ bias float32 [n]) (+ residual float32 [rows, n], which may be y itself); rows 1..8.

    float16 results are clamped to the finite range. Strides are those of rows in elements (k and n unless given).
    """
    cut = tuned or Tuned()
    before, x = _norm_ahead(rows, k, x, norm, normed, eps, w, tiles(n), quant, cut)
    constants = {
        **_sizes(rows, n, k, quant, cut, x_stride),
        "YS": y_stride or n,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
    }
    types = {"x": "*fp16", **_WEIGHTS, "bias": _type(bias), "residual": _type(residual), "y": f"*{out}"}
    args: Operands = {"x": x, **weights(w), "bias": bias or x, "residual": residual or x, "y": y}
    variant = Variant("int4_linear.linear", types, constants, cut.warps, cut.stages)
    return (*before, Launch(variant, (-(-tiles(n) // cut.row_tiles), 1, 1), args))


def decode_head(
    rows: int,
    n: int,
    k: int,
    quant: TensorQuant,
    *,
    x: str,
    w: str,
    y: str,
    best: str,
    best_index: str,
    norm: str | None = None,
    normed: str | None = None,
    eps: float = 0.0,
    first: int = 0,
    tuned: Tuned | None = None,
) -> tuple[Launch, ...]:
    """Logits y float32 [rows, n], and each program's largest: best float32 and best_index int32, both [rows,
    head_programs(n, tuned)], the lower index at ties. With `norm`, of the rows of x from `first` on."""
    cut = tuned or Tuned()
    before, x = _norm_ahead(rows, k, x, norm, normed, eps, w, tiles(n), quant, cut, first)
    types = {"x": "*fp16", **_WEIGHTS, "y": "*fp32", "best": "*fp32", "best_index": "*i32"}
    variant = Variant("int4_linear.head", types, _sizes(rows, n, k, quant, cut), cut.warps, cut.stages)
    args: Operands = {"x": x, **weights(w), "y": y, "best": best, "best_index": best_index}
    return (*before, Launch(variant, (head_programs(n, cut), 1, 1), args))


def head_programs(n: int, tuned: Tuned | None = None) -> int:
    """Programs of `decode_head`: the second dimension of its `best`."""
    return -(-tiles(n) // (tuned or Tuned()).row_tiles)


def decode_gate_up(
    rows: int,
    intermediate: int,
    k: int,
    quant: TensorQuant,
    *,
    x: str,
    w: str,
    h: str,
    norm: str | None = None,
    normed: str | None = None,
    eps: float = 0.0,
    activation: Activation = "silu",
    tuned: Tuned | None = None,
) -> tuple[Launch, ...]:
    """h float16 [rows, intermediate] = act(gate x) * up x; w is [2 * intermediate, k] packed with stacked=2."""
    cut = tuned or Tuned()
    before, x = _norm_ahead(rows, k, x, norm, normed, eps, w, 2 * tiles(intermediate), quant, cut)
    constants = _sizes(rows, intermediate, k, quant, cut)
    constants["INTER"] = constants.pop("N")
    constants["GELU"] = activation == "gelu_tanh"
    variant = Variant("int4_linear.gate_up", {"x": "*fp16", **_WEIGHTS, "h": "*fp16"}, constants, cut.warps, cut.stages)
    args: Operands = {"x": x, **weights(w), "h": h}
    return (*before, Launch(variant, (-(-tiles(intermediate) // cut.row_tiles), 1, 1), args))


def prefill(
    rows: int,
    n: int,
    k: int,
    quant: TensorQuant,
    *,
    x: str,
    w: str,
    y: str,
    norm: str | None = None,
    normed: str | None = None,
    eps: float = 0.0,
    bias: str | None = None,
    residual: str | None = None,
    out: Literal["fp16", "fp32"] = "fp16",
    tuned: TunedMany | None = None,
) -> tuple[Launch, ...]:
    """As `decode`, for 16 or more rows; weights are rounded to float16 once scaled."""
    before, x = _norm(rows, k, x, norm, normed, eps)
    cut = tuned or TunedMany()
    constants = {
        **_many(rows, k, quant, cut),
        "N": n,
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
    }
    types = {"x": "*fp16", **_WEIGHTS, "bias": _type(bias), "residual": _type(residual), "y": f"*{out}"}
    args: Operands = {"x": x, **weights(w), "bias": bias or x, "residual": residual or x, "y": y}
    variant = Variant("int4_linear.linear_many", types, constants, cut.warps, cut.stages)
    return (*before, Launch(variant, (-(-rows // cut.tokens), -(-tiles(n) // cut.warps), 1), args))


def prefill_gate_up(
    rows: int,
    intermediate: int,
    k: int,
    quant: TensorQuant,
    *,
    x: str,
    w: str,
    h: str,
    norm: str | None = None,
    normed: str | None = None,
    eps: float = 0.0,
    activation: Activation = "silu",
    keep: str | None = None,
    block: int = 0,
    tuned: TunedMany | None = None,
) -> tuple[Launch, ...]:
    """As `decode_gate_up`, for 16 or more rows. Where `keep` uint8 [rows, intermediate / block] is 0, h is."""
    before, x = _norm(rows, k, x, norm, normed, eps)
    cut = tuned or TunedMany()
    constants = {
        **_many(rows, k, quant, cut),
        "INTER": intermediate,
        "GELU": activation == "gelu_tanh",
        "BLOCK": block if keep else 0,
    }
    types = {"x": "*fp16", **_WEIGHTS, "keep": "*u8" if keep else "*fp16", "h": "*fp16"}
    args: Operands = {"x": x, **weights(w), "keep": keep or x, "h": h}
    variant = Variant("int4_linear.gate_up_many", types, constants, cut.warps, cut.stages)
    grid = (-(-rows // cut.tokens), -(-tiles(intermediate) // (cut.warps // 2)), 1)
    return (*before, Launch(variant, grid, args))


def _norm(
    rows: int, k: int, x: str, norm: str | None, normed: str | None, eps: float
) -> tuple[tuple[Launch, ...], str]:
    if norm is None:
        return (), x
    if normed is None:
        raise ValueError("a product with a norm in front needs a scratch buffer `normed` for the normalised rows")
    return (rms_norm(rows, k, eps, x=x, w=norm, y=normed),), normed


def _norm_ahead(
    rows: int,
    k: int,
    x: str,
    norm: str | None,
    normed: str | None,
    eps: float,
    w: str,
    tile_count: int,
    quant: TensorQuant,
    cut: Tuned,
    first: int = 0,
) -> tuple[tuple[Launch, ...], str]:
    """As `_norm`, in a kernel whose other programs prefetch the product's weights."""
    if norm is None or normed is None:
        return _norm(rows, k, x, norm, normed, eps)
    columns, tile = 1 << (k - 1).bit_length(), k * quant.bits  # words
    ahead = min(cut.ahead // 4, tile) // _LINE * _LINE
    constants: dict[str, Value] = {
        "T": rows,
        "K": k,
        "EPS": eps,
        "COLUMNS": columns,
        "TILES": tile_count,
        "TILE": tile,
        "AHEAD": ahead,
        "SHARE": _SHARE,
        "LINE": _LINE,
        "PDL": cut.overlap,
    }
    types = {"x": "*fp32", "norm": "*fp32", "q": "*i32", "y": "*fp16", "first": "i32"}
    variant = Variant("int4_linear.norm_ahead", types, constants, min(8, max(1, columns // 128)), 1)
    programs = rows + -(-tile_count * (ahead // _LINE) // _SHARE)
    args: Operands = {"x": x, "norm": norm, "q": f"{w}.q", "y": normed, "first": first}
    return (Launch(variant, (programs, 1, 1), args),), normed


def _type(operand: str | None) -> str:
    """Of a float32 operand, or of the x that stands in for it."""
    return "*fp32" if operand else "*fp16"


def weights(w: str) -> Operands:
    """The buffers of the packed matrix `w`."""
    return {"q": f"{w}.q", "scales": f"{w}.scales", "zeros": f"{w}.zeros"}


def _sizes(rows: int, n: int, k: int, quant: TensorQuant, cut: Tuned, x_stride: int | None = None) -> dict[str, Value]:
    if not 1 <= rows <= DECODE_ROWS:
        raise UnsupportedError(f"int4 decode kernel: {rows} rows (1 to {DECODE_ROWS}; more are prefill)")
    return {
        "T": rows,
        "N": n,
        "K": k,
        "XS": x_stride or k,
        "G": quant.group,
        "BITS": quant.bits,
        "UNIT": unit(k),
        "R": cut.row_tiles,
        "B": cut.warps,
        "STAGES": cut.stages,
        "PDL": cut.overlap,
    }


def _many(rows: int, k: int, quant: TensorQuant, cut: TunedMany) -> dict[str, Value]:
    chunks = cut.chunks
    while k // 32 % chunks:
        chunks //= 2
    return {
        "T": rows,
        "K": k,
        "G": quant.group,
        "BITS": quant.bits,
        "W": cut.warps,
        "TOKENS": cut.tokens,
        "CHUNKS": chunks,
        "STAGES": cut.stages,
    }
