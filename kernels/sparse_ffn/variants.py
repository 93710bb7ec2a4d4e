"""Launches of SparseFfn: the feed-forward of a layer with a gate. Names of buffers in, launches out.

Few rows: `decode_sparse`: norm and ranks, masks with gate and up for the blocks that rows keep, down over the units
that are not zero. Above a share of `dense` units, down reads all of them without a list; masks are the same, and so
are a row's bits whichever blocks its neighbours keep. Many rows: `prefill_sparse`: norm and ranks, masks, then the
dense products with every row's own mask.

Both read x float32 [rows, k], norm float32 [k], the gate's w1 float32 [rank, k], w2 float32 [blocks, rank] and bias
float32 [blocks], and write y float32 [rows, k] = down(keep * act(gate z) * up z), z = rmsnorm(x) * norm, where keep
[row, b] is (w2 relu(w1 z) + bias)[b] > 0. `down_bias` float32 [k] and `residual` float32 [rows, k] are added. Scratch:
normed float16 [rows, k], ranks float32 [rows, rank], keep uint8 [rows, blocks], h float16 [rows, intermediate].
"""

from __future__ import annotations

from mimo_edge.errors import UnsupportedError
from mimo_edge.kernels.int4_linear import variants as int4
from mimo_edge.kernels.int4_linear.layout import tiles
from mimo_edge.kernels.int4_linear.variants import Activation, Operands, Tuned, TunedMany
from mimo_edge.kernels.launch import Launch, Value, Variant
from mimo_edge.spec import GateSpec, TensorQuant

DOWN = Tuned(stages=6)  # how down is cut unless told
_WEIGHTS = {"q": "*i32", "scales": "*fp16", "zeros": "*u8"}


def unit(block: int) -> int:
    """Channels that down skips together. Raises UnsupportedError for a block that the kernels lack."""
    if block not in (16, 32, 64):
        raise UnsupportedError(f"gate blocks of {block} channels (the kernels have 16, 32 and 64)")
    return max(block, 32)


def units(intermediate: int, block: int) -> int:
    """Units of a feed-forward."""
    return intermediate // unit(block)


def listed_size(intermediate: int, block: int, tuned_down: Tuned | None = None) -> int:
    """Elements of `listed`."""
    warps = (tuned_down or DOWN).warps
    return 2 + -(-units(intermediate, block) // warps) * warps


def _ranks(
    rows: int, k: int, spec: GateSpec, args: Operands, eps: float, few: bool = False, overlap: bool = False
) -> Launch:
    """The norm and the gate's first half. `listed` is not used unless for few rows."""
    columns = min(1024, 1 << (k - 1).bit_length())
    at_once = 1 << (rows - 1).bit_length() if few else 4
    each = 2 if few else 4
    constants: dict[str, Value] = {
        "T": rows,
        "K": k,
        "EPS": eps,
        "RANK": spec.rank,
        "ROWS": at_once,
        "RB": each,
        "KB": columns,
        "FEW": few,
        "PDL": overlap,
    }
    types = {"x": "*fp32", "norm": "*fp32", "w1": "*fp32", "normed": "*fp16", "hidden": "*fp32"}
    types["listed"] = "*i32" if few else "*fp16"
    # 4 elements a lane fill a warp's row of the tile, so sums are taken in the same order for any number of rows.
    variant = Variant("sparse_ffn.ranks", types, constants, max(1, columns // 128), 1)
    return Launch(variant, (-(-spec.rank // each), -(-rows // at_once), 1), args)


def _keep_many(rows: int, blocks: int, spec: GateSpec, w2: str, bias: str, ranks: str, keep: str) -> Launch:
    constants: dict[str, Value] = {
        "T": rows,
        "RANK": spec.rank,
        "RANKS": _power(spec.rank),
        "BLOCKS": blocks,
        "BB": 32,
    }
    types = {"w2": "*fp32", "bias": "*fp32", "hidden": "*fp32", "keep": "*u8"}
    args: Operands = {"w2": w2, "bias": bias, "hidden": ranks, "keep": keep}
    return Launch(Variant("sparse_ffn.keep_many", types, constants, 4, 1), (-(-blocks // 32), rows, 1), args)


def decode_sparse(
    rows: int,
    intermediate: int,
    k: int,
    quant: TensorQuant,
    spec: GateSpec,
    *,
    x: str,
    norm: str,
    eps: float,
    w1: str,
    w2: str,
    bias: str,
    normed: str,
    ranks: str,
    keep: str,
    gate_up: str,
    down: str,
    h: str,
    listed: str,
    y: str,
    down_bias: str | None = None,
    residual: str | None = None,
    activation: Activation = "silu",
    dense: float = 0.7,
    tuned_gate_up: Tuned | None = None,
    tuned_down: Tuned | None = None,
) -> tuple[Launch, ...]:
    """For 1 to 8 rows. More scratch: listed int32 [listed_size(...)]."""
    up, behind, count = tuned_gate_up or Tuned(stages=3), tuned_down or DOWN, units(intermediate, spec.block)
    constants: dict[str, Value] = {
        **_sizes(rows, intermediate, k, quant, up),
        "UNIT": int4.unit(k),
        "GELU": activation == "gelu_tanh",
        "BLOCK": spec.block,
        "RANK": spec.rank,
        "RANKS": _power(spec.rank),
        "UNITS": count,
        "DENSE": int(dense * count),
        "UB": _power(count),
        "DEAL": behind.warps,
        "B": up.warps,
    }
    gate_types = {"x": "*fp16", "hidden": "*fp32", "w2": "*fp32", "bias": "*fp32"}
    out_types = {"keep": "*u8", "listed": "*i32", "h": "*fp16"}
    first: Operands = {"x": x, "norm": norm, "w1": w1, "normed": normed, "hidden": ranks, "listed": listed}
    args: Operands = {"x": normed, "hidden": ranks, "w2": w2, "bias": bias, **int4.weights(gate_up), "keep": keep}
    args |= {"listed": listed, "h": h}
    types = {**gate_types, **_WEIGHTS, **out_types}
    variant = Variant("sparse_ffn.gate_up_kept", types, constants, up.warps, up.stages)
    return (
        _ranks(rows, k, spec, first, eps, few=True, overlap=up.overlap),
        Launch(variant, (intermediate // 32 + 1, 1, 1), args),
        _down(rows, intermediate, k, quant, spec, down, h, listed, down_bias, residual, y, behind),
    )


def _down(
    rows: int,
    intermediate: int,
    k: int,
    quant: TensorQuant,
    spec: GateSpec,
    w: str,
    h: str,
    listed: str,
    bias: str | None,
    residual: str | None,
    y: str,
    cut: Tuned,
) -> Launch:
    constants: dict[str, Value] = {
        **_sizes(rows, intermediate, intermediate, quant, cut),
        "N": k,
        "UNIT": unit(spec.block),
        "BIAS": bias is not None,
        "RESIDUAL": residual is not None,
        "PER": 128 // unit(spec.block),
        "R": cut.row_tiles,
        "B": cut.warps,
    }
    del constants["INTER"]
    types = {"h": "*fp16", **_WEIGHTS, "listed": "*i32", "bias": "*fp32", "residual": "*fp32", "y": "*fp32"}
    args: Operands = {"h": h, **int4.weights(w), "listed": listed, "bias": bias or y, "residual": residual or y, "y": y}
    variant = Variant("sparse_ffn.down_listed", types, constants, cut.warps, cut.stages)
    return Launch(variant, (-(-tiles(k) // cut.row_tiles), 1, 1), args)


def prefill_sparse(
    rows: int,
    intermediate: int,
    k: int,
    quant: TensorQuant,
    spec: GateSpec,
    *,
    x: str,
    norm: str,
    eps: float,
    w1: str,
    w2: str,
    bias: str,
    normed: str,
    ranks: str,
    keep: str,
    gate_up: str,
    down: str,
    h: str,
    y: str,
    down_bias: str | None = None,
    residual: str | None = None,
    activation: Activation = "silu",
    tuned: TunedMany | None = None,
) -> tuple[Launch, ...]:
    """For 16 or more rows."""
    unit(spec.block)  # refuses those that the kernels lack
    first: Operands = {"x": x, "norm": norm, "w1": w1, "normed": normed, "hidden": ranks, "listed": normed}
    up = {"x": normed, "w": gate_up, "h": h, "keep": keep, "block": spec.block}
    behind = {"bias": down_bias, "residual": residual}
    return (
        _ranks(rows, k, spec, first, eps),
        _keep_many(rows, intermediate // spec.block, spec, w2, bias, ranks, keep),
        *int4.prefill_gate_up(rows, intermediate, k, quant, activation=activation, tuned=tuned, **up),
        *int4.prefill(rows, k, intermediate, quant, x=h, w=down, y=y, out="fp32", tuned=tuned, **behind),
    )


def _power(n: int) -> int:
    """The smallest power of two that holds n, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def _sizes(rows: int, intermediate: int, k: int, quant: TensorQuant, cut: Tuned) -> dict[str, Value]:
    if not 1 <= rows <= int4.DECODE_ROWS:
        raise UnsupportedError(f"sparse decode kernel: {rows} rows (1 to {int4.DECODE_ROWS}; more are prefill)")
    sizes: dict[str, Value] = {"T": rows, "INTER": intermediate, "K": k, "G": quant.group, "BITS": quant.bits}
    return {**sizes, "STAGES": cut.stages, "PDL": cut.overlap}
