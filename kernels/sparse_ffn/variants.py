"""Launches of SparseFfn: the feed-forward of a layer with a gate. Names of buffers in, launches out.

Few rows: `gate` (norm and ranks), then `decode_sparse` (masks, gate and up for the blocks that rows keep, down over the
units that are not zero). Above a share of `dense` units, down reads all of them without a list; masks are the same, and
so are a row's bits whichever blocks its neighbours keep. Many rows: `gate` gives the masks, `prefill_sparse` the dense
products with every row's own mask.
"""

from __future__ import annotations

from mimo_edge.errors import UnsupportedError
from mimo_edge.kernels.int4_linear import variants as int4
from mimo_edge.kernels.int4_linear.layout import tiles
from mimo_edge.kernels.int4_linear.variants import Activation, Operands, Tuned, TunedMany
from mimo_edge.kernels.launch import Launch, Value, Variant
from mimo_edge.spec import GateSpec, TensorQuant

DEAL = 4  # warps that down's units are dealt to
_WEIGHTS = {"q": "*i32", "scales": "*fp16", "zeros": "*u8"}


def unit(block: int) -> int:
    """Channels that down skips together. Raises UnsupportedError for a block that the kernels lack."""
    if block not in (16, 32, 64):
        raise UnsupportedError(f"gate blocks of {block} channels (the kernels have 16, 32 and 64)")
    return max(block, 32)


def units(intermediate: int, block: int) -> int:
    """Units of a feed-forward."""
    return intermediate // unit(block)


def listed_size(intermediate: int, block: int) -> int:
    """Elements of `listed`."""
    return 1 + -(-units(intermediate, block) // DEAL) * DEAL


def gate(
    rows: int,
    intermediate: int,
    k: int,
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
    overlap: bool = False,
) -> tuple[Launch, ...]:
    """`normed` float16 [rows, k] = rmsnorm(x) * norm of x float32 [rows, k], and `ranks` float32 [rows, rank] =
    relu(w1 normed). For more than 8 rows also `keep` uint8 [rows, blocks].

    w1 float32 [rank, k], w2 float32 [blocks, rank], bias float32 [blocks].
    """
    block, few = 1 << (k - 1).bit_length(), rows <= int4.DECODE_ROWS
    at_once = rows if few else 4
    constants: dict[str, Value] = {
        "T": rows,
        "K": k,
        "EPS": eps,
        "RANK": spec.rank,
        "ROWS": at_once,
        "RB": 2 if few else 4,
        "KB": min(1024, block),
        "PDL": overlap,
    }
    types = {"x": "*fp32", "norm": "*fp32", "w1": "*fp32", "normed": "*fp16", "hidden": "*fp32"}
    args: Operands = {"x": x, "norm": norm, "w1": w1, "normed": normed, "hidden": ranks}
    grid = (-(-spec.rank // int(constants["RB"])), -(-rows // at_once), 1)
    first = Launch(Variant("sparse_ffn.ranks", types, constants, 8, 1), grid, args)
    return (first,) if few else (first, _keep_many(rows, intermediate // spec.block, spec, w2, bias, ranks, keep))


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
    normed: str,
    ranks: str,
    w2: str,
    bias: str,
    gate_up: str,
    down: str,
    h: str,
    keep: str,
    listed: str,
    y: str,
    down_bias: str | None = None,
    residual: str | None = None,
    activation: Activation = "silu",
    dense: float = 0.7,
    tuned_gate_up: Tuned | None = None,
    tuned_down: Tuned | None = None,
) -> tuple[Launch, ...]:
    """y float32 [rows, k] = down(keep * act(gate normed) * up normed), behind `gate`.

    `down_bias` float32 [k] and `residual` float32 [rows, k] are added.

    Scratch: h float16 [rows, intermediate], keep uint8 [rows, blocks], listed int32 [listed_size(...)]. Rows 1..8.
    """
    up = tuned_gate_up or Tuned(stages=3)
    count = units(intermediate, spec.block)
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
        "BB": min(_power(count), max(16, 4096 // _power(spec.rank))),
        "DEAL": DEAL,
        "B": up.warps,
    }
    gate_types = {"x": "*fp16", "hidden": "*fp32", "w2": "*fp32", "bias": "*fp32"}
    out_types = {"keep": "*u8", "listed": "*i32", "h": "*fp16"}
    args: Operands = {"x": normed, "hidden": ranks, "w2": w2, "bias": bias, **int4.weights(gate_up), "keep": keep}
    args |= {"listed": listed, "h": h}
    variant = Variant(
        "sparse_ffn.gate_up_kept", {**gate_types, **_WEIGHTS, **out_types}, constants, up.warps, up.stages
    )
    return (
        Launch(variant, (1 + intermediate // 32, 1, 1), args),
        _down(
            rows, intermediate, k, quant, spec, down, h, listed, down_bias, residual, y, tuned_down or Tuned(stages=6)
        ),
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
        "B": DEAL,
    }
    del constants["INTER"]
    types = {"h": "*fp16", **_WEIGHTS, "listed": "*i32", "bias": "*fp32", "residual": "*fp32", "y": "*fp32"}
    args: Operands = {"h": h, **int4.weights(w), "listed": listed, "bias": bias or y, "residual": residual or y, "y": y}
    variant = Variant("sparse_ffn.down_listed", types, constants, DEAL, cut.stages)
    return Launch(variant, (-(-tiles(k) // cut.row_tiles), 1, 1), args)


def prefill_sparse(
    rows: int,
    intermediate: int,
    k: int,
    quant: TensorQuant,
    spec: GateSpec,
    *,
    normed: str,
    gate_up: str,
    down: str,
    h: str,
    keep: str,
    y: str,
    down_bias: str | None = None,
    residual: str | None = None,
    activation: Activation = "silu",
    tuned: TunedMany | None = None,
) -> tuple[Launch, ...]:
    """As `decode_sparse` for 16 or more rows, behind `gate`."""
    up = {"x": normed, "w": gate_up, "h": h, "keep": keep}
    block = unit(spec.block) and spec.block
    behind = {"bias": down_bias, "residual": residual}
    return (
        *int4.prefill_gate_up(rows, intermediate, k, quant, activation=activation, block=block, tuned=tuned, **up),
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
