"""WindowedAttention on a GPU; reference.py says what is computed, tiles.py explains the names. Decode is here."""

import triton
import triton.language as tl

from mimo_edge.kernels.windowed_attention.prefill import commit, prefill, prepare
from mimo_edge.kernels.windowed_attention.tiles import FAR, LOG2E, attend, attend_past, load_heads, slots_of

__all__ = ["commit", "decode", "prefill", "prepare", "rotation"]


@triton.jit
def rotation(positions, frequencies, out, HALF: tl.constexpr, PADDED: tl.constexpr):
    """out [rows, 2, HALF]: cosines and sines of position * frequency (that product in float32, as in the reference)."""
    row = tl.program_id(0)
    j = tl.arange(0, PADDED)
    position = tl.maximum(tl.load(positions + row), 0).to(tl.float32)
    angle = (position * tl.load(frequencies + j, mask=j < HALF, other=0.0)).to(tl.float64)
    turns = tl.floor(angle * 0.6366197723675814 + 0.5)  # quarter turns
    r = (angle - turns * 1.5707963267948966).to(tl.float32)
    z = r * r  # polynomials of Cephes' sinf and cosf (Moshier) for at most an eighth of a turn
    sin = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * r + r
    cos = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - 0.5 * z + 1.0
    quarter = turns.to(tl.int32) & 3
    a, b = tl.where(quarter % 2 == 0, cos, sin), tl.where(quarter % 2 == 0, sin, cos)
    tl.store(out + row * 2 * HALF + j, tl.where((quarter == 1) | (quarter == 2), -a, a), mask=j < HALF)
    tl.store(out + row * 2 * HALF + HALF + j, tl.where(quarter >= 2, -b, b), mask=j < HALF)


@triton.jit
def _rows(j, sequence, positions, sequences, ROWS: tl.constexpr, PADDED: tl.constexpr, SEQUENCES: tl.constexpr):
    """The j-th row of a sequence and its position, -1 where there is none."""
    if SEQUENCES == 1:  # rows are known before anything is read
        return tl.minimum(j, ROWS - 1), tl.load(positions + j, mask=j < ROWS, other=-1)
    t = tl.arange(0, PADDED)
    used = tl.load(positions + t, mask=t < ROWS, other=-1) >= 0
    mine = used & (tl.load(sequences + t, mask=t < ROWS, other=-1) == sequence)
    rank = tl.cumsum(mine.to(tl.int32), axis=0)
    hit = (mine[None, :] & (rank[None, :] == j[:, None] + 1)).to(tl.int32)
    row = tl.sum(hit * t[None, :], axis=1)
    return row, tl.load(positions + row, mask=tl.sum(hit, axis=1) > 0, other=-1)


@triton.jit
def decode(
    qkv, rotation, k_pool, v_pool, positions, sequences, lengths, table, sinks, q_norm, k_norm, parts, counters, y,
    ROWS: tl.constexpr, OWN: tl.constexpr, SEQUENCES: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    WINDOW: tl.constexpr, SCALE: tl.constexpr, VALUE_SCALE: tl.constexpr, EPS: tl.constexpr,
    SINKS: tl.constexpr, NORMS: tl.constexpr, HELD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr,
    SPLITS: tl.constexpr, LINES: tl.constexpr,
    M: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Grid [SPLITS, KV_HEADS, SEQUENCES]. OWN: most rows of a sequence.

    Program i of a head takes tiles i, i + SPLITS ... of the past. The last one also takes the step's new rows, and
    stores them: no query of the step sees what they overwrite. Whichever finishes last adds the parts up, always in
    the same order.
    """
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    C: tl.constexpr = KV_HEADS * (GROUP * D + D + DV)
    L: tl.constexpr = OWN * GROUP
    if (split == 0) & (sequence == 0):
        _zero_padding(y, head, positions, ROWS, KV_HEADS, GROUP * DV, PADDED)
    m = tl.arange(0, M)
    row, position = _rows(m // GROUP, sequence, positions, sequences, ROWS, PADDED, SEQUENCES)
    heads = head * GROUP + m % GROUP
    q = load_heads(qkv, row * C + heads * D, row, m < L, rotation, q_norm, D, DP, HALF, NORMS, EPS)
    q = q.to(k_pool.dtype.element_ty)

    position = tl.where(m < L, position, -1)
    live = position >= 0
    first = tl.min(tl.where(live, position, FAR), axis=0)
    n = tl.load(lengths + sequence)
    low = 0
    if WINDOW:
        low = tl.maximum(tl.maximum(n - BLOCK * BLOCKS, first - WINDOW + 1), 0)
    if HELD:
        low = tl.maximum(low, tl.load(lengths + SEQUENCES + sequence))
    start = low // KEYS * KEYS if WHOLE else low
    tiles = tl.cdiv(tl.maximum(n - start, 0), KEYS)
    used = tl.minimum(tiles, SPLITS - 1) + 1
    if ((split >= tiles) & (split != SPLITS - 1)) | (first == FAR):
        return

    acc = tl.zeros([M, DVP], tl.float32)
    peak = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    k_pool += head * D
    v_pool += head * DV
    table += sequence * BLOCKS
    if split == SPLITS - 1:
        acc, peak, total = _new_rows(
            q, position, sequence, head, qkv, rotation, k_pool, v_pool, positions, sequences, table, k_norm,
            acc, peak, total, ROWS, OWN, SEQUENCES, KV_HEADS, GROUP, D, DV, HALF, WINDOW, SCALE, VALUE_SCALE, EPS,
            NORMS, BLOCK, BLOCKS, DP, DVP, PADDED,
        )  # fmt: skip
    acc, peak, total = attend_past(
        q, live, position, start, low, n, split, SPLITS, k_pool, v_pool, table, acc, peak, total,
        D, DV, KV_HEADS, WINDOW, SCALE, BLOCK, BLOCKS, KEYS, WHOLE, DP, DVP,
    )  # fmt: skip

    dv = tl.arange(0, DVP)
    inside = live[:, None] & (dv < DV)[None, :]
    if used == 1:
        total = tl.where(live, total, 1.0)
        if SINKS:
            total += tl.exp2(tl.load(sinks + heads, mask=live, other=0.0) * LOG2E - tl.where(live, peak, 0.0))
        out = y + row[:, None] * (KV_HEADS * GROUP * DV) + heads[:, None] * DV + dv[None, :]
        tl.store(out, (acc / total[:, None]).to(y.dtype.element_ty), mask=inside)
        return
    parts += (sequence * KV_HEADS + head) * (SPLITS * L * (DV + 1))
    levels = parts + SPLITS * L * DV
    seen = live & (total > 0)  # a part may lie outside a line's window
    level = tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), -float("inf"))
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    tl.store(parts + split * L * DV + m[:, None] * DV + dv[None, :], acc, mask=inside)
    tl.store(levels + split * L + m, level, mask=m < L)
    tl.debug_barrier()  # all threads' stores come before the one thread's release
    done = tl.atomic_add(counters + sequence * KV_HEADS + head, 1, sem="acq_rel")
    if done == used - 1:
        tl.store(counters + sequence * KV_HEADS + head, 0)
        _combine(
            parts, levels, used, sinks, y, head, sequence, positions, sequences,
            ROWS, L, SEQUENCES, KV_HEADS, GROUP, DV, SINKS, SPLITS, LINES, DVP, PADDED,
        )  # fmt: skip


@triton.jit
def _zero_padding(
    y, head, positions, ROWS: tl.constexpr, KV_HEADS: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr
):
    """Zeros in the kv head's columns of the rows without a position."""
    t = tl.arange(0, PADDED)
    empty = (t < ROWS) & (tl.load(positions + t, mask=t < ROWS, other=0) < 0)
    if tl.max(empty.to(tl.int32), axis=0) > 0:
        c = tl.arange(0, 64)
        for at in range(0, COLUMNS, 64):
            at_row = y + t[:, None] * (KV_HEADS * COLUMNS) + head * COLUMNS
            zeros = tl.zeros([PADDED, 64], y.dtype.element_ty)
            tl.store(at_row + at + c[None, :], zeros, mask=empty[:, None] & (at + c < COLUMNS)[None, :])


@triton.jit
def _new_rows(
    q, position, sequence, head, qkv, rotation, k_pool, v_pool, positions, sequences, table, k_norm, acc, peak, total,
    ROWS: tl.constexpr, OWN: tl.constexpr, SEQUENCES: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    WINDOW: tl.constexpr, SCALE: tl.constexpr, VALUE_SCALE: tl.constexpr, EPS: tl.constexpr, NORMS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Attends to the step's own rows, rounded as the pool keeps them, and stores them there."""
    C: tl.constexpr = KV_HEADS * (GROUP * D + D + DV)
    j = tl.arange(0, 16)  # the smallest tile that tl.dot takes
    row, p = _rows(j, sequence, positions, sequences, ROWS, PADDED, SEQUENCES)
    at = row * C + KV_HEADS * GROUP * D
    k = load_heads(qkv, at + head * D, row, j < OWN, rotation, k_norm, D, DP, HALF, NORMS, EPS).to(q.dtype)
    dv = tl.arange(0, DVP)
    values = qkv + at[:, None] + KV_HEADS * D + head * DV + dv[None, :]
    v = tl.load(values, mask=(j < OWN)[:, None] & (dv < DV)[None, :], other=0.0).to(tl.float32) * VALUE_SCALE
    p = tl.where(j < OWN, p, -1)
    live = p >= 0
    v = tl.where(live[:, None], v, 0.0).to(q.dtype)  # rows without a position may hold NaN
    slots = slots_of(p, live, table, BLOCK, BLOCKS)[:, None]
    d = tl.arange(0, DP)
    tl.store(k_pool + slots * (KV_HEADS * D) + d[None, :], k, mask=live[:, None] & (d < D)[None, :])
    tl.store(v_pool + slots * (KV_HEADS * DV) + dv[None, :], v, mask=live[:, None] & (dv < DV)[None, :])
    seen = live[None, :] & (p[None, :] <= position[:, None])
    if WINDOW:
        seen &= p[None, :] > position[:, None] - WINDOW
    return attend(q, k, v, seen, acc, peak, total, SCALE)


@triton.jit
def _combine(
    parts, levels, used, sinks, y, head, sequence, positions, sequences,
    ROWS: tl.constexpr, L: tl.constexpr, SEQUENCES: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DV: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr, LINES: tl.constexpr, DVP: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """y = parts [SPLITS, L, DV] weighted by 2 ** levels [SPLITS, L]; those in use are the first used - 1 and the last.

    LINES at a time, unrolled and without any exchange between threads, so that all loads are under way at once.
    """
    dv = tl.arange(0, DVP)
    for first in range(0, L, LINES):
        line = first + tl.arange(0, LINES)
        row, position = _rows(line // GROUP, sequence, positions, sequences, ROWS, PADDED, SEQUENCES)
        live = (line < L) & (position >= 0)
        inside = live[:, None] & (dv < DV)[None, :]
        peak = tl.full([LINES], -float("inf"), tl.float32)
        for s in tl.static_range(SPLITS):
            there = live & ((s < used - 1) | (s == SPLITS - 1))
            peak = tl.maximum(
                peak, tl.load(levels + s * L + line, mask=there, other=-float("inf"), cache_modifier=".cg")
            )
        peak = tl.where(live, peak, 0.0)
        total = tl.where(live, 0.0, 1.0)
        acc = tl.zeros([LINES, DVP], tl.float32)
        for s in tl.static_range(SPLITS):
            there = (s < used - 1) | (s == SPLITS - 1)
            level = tl.load(levels + s * L + line, mask=live & there, other=-float("inf"), cache_modifier=".cg")
            at = parts + (s * L + line)[:, None] * DV + dv[None, :]
            part = tl.load(at, mask=inside & there, other=0.0, cache_modifier=".cg")
            weight = tl.exp2(level - peak)
            total += weight
            acc += part * weight[:, None]
        heads = head * GROUP + line % GROUP
        if SINKS:
            total += tl.exp2(tl.load(sinks + heads, mask=live, other=0.0) * LOG2E - peak)
        out = y + row[:, None] * (KV_HEADS * GROUP * DV) + heads[:, None] * DV + dv[None, :]
        tl.store(out, (acc / total[:, None]).to(y.dtype.element_ty), mask=inside)
