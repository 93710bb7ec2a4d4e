"""Launches of WindowedAttention for a size. Plain Python: no Triton here.

Decode (up to 8 rows, at most 4 a sequence) is one launch: keys are split over programs, the last one to finish combines
the parts, and the program that owns the step's new rows stores them in the pool. Prefill is two launches (norms,
rotation and, for full layers, the store; then attention), and `commit` stores a window layer's rows once they are
accepted.
Rotation angles depend on the step alone, so `rotation` is launched once a step and kind of attention.
"""

from __future__ import annotations

import math

from mimo_edge.kernels.launch import Buffer, Launch, Value, Variant
from mimo_edge.kernels.windowed_attention.prefill_variants import commit, prefill, prefill_scratch
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
from mimo_edge.spec import MAX_DRAFTS, AttentionSpec

__all__ = [
    "DEFAULT",
    "MOST_DECODE_ROWS",
    "Pool",
    "Tuning",
    "commit",
    "decode",
    "decode_scratch",
    "prefill",
    "prefill_scratch",
    "rotation",
    "rotation_buffer",
]

MOST_DECODE_ROWS = 8  # of all sequences together


def rotation(rows: int, a: AttentionSpec, *, positions: str, frequencies: str, out: str) -> Launch:
    """out float32 [rows, 2, rotary_dim / 2]: cosines and sines of positions i32 [rows] times frequencies float32."""
    half = a.rotary_dim // 2
    types = {"positions": "*i32", "frequencies": "*fp32", "out": "*fp32"}
    variant = Variant("windowed_attention.rotation", types, {"HALF": half, "PADDED": power(half)}, num_warps=1)
    return launch(variant, (rows, 1, 1), positions=positions, frequencies=frequencies, out=out)


def rotation_buffer(rows: int, a: AttentionSpec) -> Buffer:
    """What `rotation` writes; one may serve all layers of the kind."""
    return Buffer("fp32", (rows, 2, max(1, a.rotary_dim // 2)), "scratch")


def decode(
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
    parts: str,
    counters: str,
    y: str,
    sinks: str | None = None,
    q_norm: str | None = None,
    k_norm: str | None = None,
    held: bool = False,
    tuned: Tuning = DEFAULT,
) -> Launch:
    """y fp16 [rows, heads * v_head_dim]; the other buffers are those of reference.windowed_attention, with float16
    qkv and pools, int32 indices, float32 sinks and norms. `parts` and `counters` come from decode_scratch.

    With `held`, lengths is [2, B]: behind the committed lengths come the first positions that count as committed."""
    _check_ring(rows, a, pool)
    own, keys, splits = _own(rows, pool), keys_of(a, tuned.keys, tuned.stages), _splits(rows, a, pool, tuned)
    lines = own * group(a)
    constants: dict[str, Value] = {
        "ROWS": rows,
        "OWN": own,
        "SEQUENCES": pool.sequences,
        **attention(a),
        "HALF": a.rotary_dim // 2,
        "VALUE_SCALE": a.value_scale,
        "EPS": eps,
        "NORMS": q_norm is not None,
        "HELD": held,
        **blocks(pool, keys),
        "SPLITS": splits,
        "LINES": min(16, power(lines, 1)),
        "M": power(lines),
        "DP": power(a.head_dim),
        "DVP": power(a.v_head_dim),
        "PADDED": power(rows, 1),
    }
    types = {
        "qkv": "*fp16",
        "rotation": "*fp32",
        "k_pool": "*fp16",
        "v_pool": "*fp16",
        **INDICES,
        "sinks": "*fp32",
        "q_norm": "*fp32",
        "k_norm": "*fp32",
        "parts": "*fp32",
        "counters": "*i32",
        "y": "*fp16",
    }
    return launch(
        Variant("windowed_attention.decode", types, constants, _warps(lines, a, tuned.warps), tuned.stages),
        (splits, a.kv_heads, pool.sequences),
        qkv=qkv,
        rotation=rotation,
        k_pool=k_pool,
        v_pool=v_pool,
        positions=positions,
        sequences=sequences,
        lengths=lengths,
        table=table,
        # Where a layer has no such buffer the kernel reads none: any of the type does.
        sinks=sinks or rotation,
        q_norm=q_norm or rotation,
        k_norm=k_norm or rotation,
        parts=parts,
        counters=counters,
        y=y,
    )


def decode_scratch(rows: int, a: AttentionSpec, pool: Pool, tuned: Tuning = DEFAULT) -> dict[str, Buffer]:
    """Buffers "parts" and "counters" of decode. Layers may share them: a launch leaves the counters at zero."""
    lines = _own(rows, pool) * group(a)
    programs = pool.sequences * a.kv_heads
    return {
        "parts": Buffer("fp32", (programs, _splits(rows, a, pool, tuned) * lines * (a.v_head_dim + 1)), "scratch"),
        "counters": Buffer("i32", (programs,), "scratch", fill=0),
    }


def _own(rows: int, pool: Pool) -> int:
    """The most rows of one sequence in a decode step."""
    return rows if pool.sequences == 1 else min(rows, MAX_DRAFTS + 1)


def _check_ring(rows: int, a: AttentionSpec, pool: Pool) -> None:
    """A ring shorter than this is as long as the context, and is never wrapped."""
    if a.window is not None and pool.block >= a.window + MAX_DRAFTS and _own(rows, pool) > pool.block - a.window + 1:
        raise ValueError(f"{rows} rows overwrite visible keys in a ring of {pool.block}: use prefill")


def _warps(lines: int, a: AttentionSpec, warps: int) -> int:
    """More for large tiles of queries, so that they fit into registers."""
    return max(warps, 8) if power(lines) * power(a.head_dim) >= 16384 else warps


def _splits(rows: int, a: AttentionSpec, pool: Pool, tuned: Tuning) -> int:
    """Parts that the longest past is cut into; a matter of capacity, so that grids are fixed."""
    most = pool.blocks * pool.block if a.window is None else min(pool.block, a.window - 1)
    tiles = math.ceil(most / keys_of(a, tuned.keys, tuned.stages))
    return max(1, min(tuned.parts, tuned.programs // (a.kv_heads * pool.sequences), tiles + 1))
