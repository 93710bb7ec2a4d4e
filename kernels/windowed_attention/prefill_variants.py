"""Launches of prefill: norms, rotation and the full layers' store, attention, and the window layers' commit."""

from __future__ import annotations

import math

from mimo_edge.kernels.launch import Buffer, Launch, Value, Variant
from mimo_edge.kernels.windowed_attention.sizes import (
    DEFAULT,
    INDICES,
    Pool,
    Tuning,
    attention,
    blocks,
    group,
    keys_of,
    launch,
    power,
)
from mimo_edge.spec import AttentionSpec


def prefill(
    rows: int,
    a: AttentionSpec,
    pool: Pool,
    eps: float,
    *,
    qkv: str,
    rotation: str,
    k_pool: str,
    v_pool: str,
    positions: str,
    sequences: str,
    lengths: str,
    table: str,
    q: str,
    y: str,
    k_new: str | None = None,
    v_new: str | None = None,
    sinks: str | None = None,
    q_norm: str | None = None,
    k_norm: str | None = None,
    held: bool = False,
    tuned: Tuning = DEFAULT,
) -> tuple[Launch, Launch]:
    """As decode, for any number of rows. A sequence's rows lie together and their positions go up from its length.

    Full layers store rows into the pool at once. Window layers leave them in k_new and v_new, which must stay as they
    are until `commit`; `q` may be shared by all layers.
    """
    k_out, v_out = k_new or k_pool, v_new or v_pool
    prepare = _prepare(a, pool, eps, q_norm is not None)
    store = launch(
        prepare,
        (rows, int(prepare.constants["Q_PARTS"] + 2 * prepare.constants["KV_PARTS"]), 1),
        qkv=qkv,
        rotation=rotation,
        positions=positions,
        sequences=sequences,
        table=table,
        q_norm=q_norm or rotation,
        k_norm=k_norm or rotation,
        q=q,
        k_out=k_out,
        v_out=v_out,
    )
    lines = max(tuned.prefill_queries, power(group(a)))
    attend = launch(
        _prefill(rows, a, pool, lines, held, tuned),
        (math.ceil(rows / (lines // group(a))), a.kv_heads, 1),
        q=q,
        k_new=k_out,
        v_new=v_out,
        k_pool=k_pool,
        v_pool=v_pool,
        positions=positions,
        sequences=sequences,
        lengths=lengths,
        table=table,
        sinks=sinks or rotation,
        y=y,
    )
    return store, attend


def _prefill(rows: int, a: AttentionSpec, pool: Pool, lines: int, held: bool, tuned: Tuning) -> Variant:
    constants: dict[str, Value] = {
        "ROWS": rows,
        "SEQUENCES": pool.sequences,
        **attention(a),
        "HELD": held,
        **blocks(pool, keys_of(a, tuned.prefill_keys, tuned.prefill_stages)),
        "TILE_ROWS": lines // group(a),
        "M": lines,
        "DP": power(a.head_dim),
        "DVP": power(a.v_head_dim),
    }
    types = dict.fromkeys(("q", "k_new", "v_new", "k_pool", "v_pool"), "*fp16")
    types |= {**INDICES, "sinks": "*fp32", "y": "*fp16"}
    return Variant("windowed_attention.prefill", types, constants, tuned.prefill_warps, tuned.prefill_stages)


def _prepare(a: AttentionSpec, pool: Pool, eps: float, norms: bool) -> Variant:
    each = max(1, min(power(a.heads, 1), 2048 // power(max(a.head_dim, a.v_head_dim))))  # about 2,048 numbers
    constants: dict[str, Value] = {
        "KV_HEADS": a.kv_heads,
        "GROUP": group(a),
        "D": a.head_dim,
        "DV": a.v_head_dim,
        "HALF": a.rotary_dim // 2,
        "VALUE_SCALE": a.value_scale,
        "EPS": eps,
        "NORMS": norms,
        "BLOCK": pool.block,
        "BLOCKS": pool.blocks,
        "POOL": a.window is None,
        "HEADS_EACH": each,
        "Q_PARTS": math.ceil(a.heads / each),
        "KV_PARTS": math.ceil(a.kv_heads / each),
        "DP": power(a.head_dim),
        "DVP": power(a.v_head_dim),
    }
    types = {"qkv": "*fp16", "rotation": "*fp32", "positions": "*i32", "sequences": "*i32", "table": "*i32"}
    types |= {"q_norm": "*fp32", "k_norm": "*fp32", "q": "*fp16", "k_out": "*fp16", "v_out": "*fp16"}
    return Variant("windowed_attention.prepare", types, constants)


def prefill_scratch(rows: int, a: AttentionSpec) -> dict[str, Buffer]:
    """Buffer "q" of prefill and, for window layers, "k_new" and "v_new"."""
    scratch = {"q": Buffer("fp16", (rows, a.q_rows), "scratch")}
    if a.window is not None:
        scratch |= {"k_new": Buffer("fp16", (rows, a.k_rows), "scratch")}
        scratch |= {"v_new": Buffer("fp16", (rows, a.v_rows), "scratch")}
    return scratch


def commit(
    rows: int,
    a: AttentionSpec,
    pool: Pool,
    *,
    k_new: str,
    v_new: str,
    k_pool: str,
    v_pool: str,
    positions: str,
    sequences: str,
    lengths: str,
    counts: str,
    table: str,
) -> Launch:
    """Behind prefill, window layers only: stores the newest of each sequence's first counts i32 [B] rows in its ring.

    `lengths` is still the committed length from before the step.
    """
    columns = min(1024, max(power(a.k_rows), power(a.v_rows)))
    constants: dict[str, Value] = {"K_ROW": a.k_rows, "V_ROW": a.v_rows, "BLOCK": pool.block, "COLUMNS": columns}
    types = dict.fromkeys(("k_new", "v_new", "k_pool", "v_pool"), "*fp16")
    types |= dict.fromkeys(("positions", "sequences", "lengths", "counts", "table"), "*i32")
    return launch(
        Variant("windowed_attention.commit", types, constants),
        (rows, 1, 1),
        k_new=k_new,
        v_new=v_new,
        k_pool=k_pool,
        v_pool=v_pool,
        positions=positions,
        sequences=sequences,
        lengths=lengths,
        counts=counts,
        table=table,
    )
