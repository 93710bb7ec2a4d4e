"""WindowedAttention for many rows: their heads are normed and rotated once, then a tile of rows at a time attends."""

import triton
import triton.language as tl

from mimo_edge.kernels.windowed_attention.tiles import FAR, LOG2E, attend, attend_past, load_heads


@triton.jit
def _store_heads(
    qkv, at, row, first, rotation, norm, out, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    EPS: tl.constexpr, NORMS: tl.constexpr, HEADS_EACH: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """out [HEADS, D]: heads first .. first + HEADS_EACH - 1 of qkv[at ..], normed and rotated."""
    h, d = first + tl.arange(0, HEADS_EACH), tl.arange(0, DP)
    rows = tl.zeros([HEADS_EACH], tl.int32) + row
    x = load_heads(qkv, at + h * D, rows, h < HEADS, rotation, norm, D, DP, HALF, NORMS, EPS)
    inside = (h < HEADS)[:, None] & (d < D)[None, :]
    tl.store(out + h[:, None] * D + d[None, :], x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_values(
    qkv, at, first, out,
    HEADS: tl.constexpr, DV: tl.constexpr, VALUE_SCALE: tl.constexpr, HEADS_EACH: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    h, d = first + tl.arange(0, HEADS_EACH), tl.arange(0, DVP)
    inside = (h < HEADS)[:, None] & (d < DV)[None, :]
    where = h[:, None] * DV + d[None, :]
    x = tl.load(qkv + at + where, mask=inside, other=0.0).to(tl.float32) * VALUE_SCALE
    tl.store(out + where, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def prepare(
    qkv, rotation, positions, sequences, table, q_norm, k_norm, q, k_out, v_out,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    VALUE_SCALE: tl.constexpr, EPS: tl.constexpr, NORMS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    POOL: tl.constexpr, HEADS_EACH: tl.constexpr, Q_PARTS: tl.constexpr, KV_PARTS: tl.constexpr,
    DP: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Grid [rows, Q_PARTS + 2 * KV_PARTS]: q [rows, heads, D]; k_out and v_out by row, with POOL at the row's slot.

    A program takes HEADS_EACH heads: first those of q, then of k, then of v. Rows without a position are left out.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    if position < 0:
        return
    HEADS: tl.constexpr = KV_HEADS * GROUP
    at = row * (HEADS * D + KV_HEADS * (D + DV))
    slot = row.to(tl.int64)
    if POOL:
        block = tl.load(table + tl.load(sequences + row) * BLOCKS + position // BLOCK % BLOCKS)
        slot = block.to(tl.int64) * BLOCK + position % BLOCK
    if part < Q_PARTS:
        _store_heads(
            qkv, at, row, part * HEADS_EACH, rotation, q_norm, q + row * (HEADS * D),
            HEADS, D, HALF, EPS, NORMS, HEADS_EACH, DP,
        )  # fmt: skip
    elif part < Q_PARTS + KV_PARTS:
        _store_heads(
            qkv, at + HEADS * D, row, (part - Q_PARTS) * HEADS_EACH, rotation, k_norm, k_out + slot * (KV_HEADS * D),
            KV_HEADS, D, HALF, EPS, NORMS, HEADS_EACH, DP,
        )  # fmt: skip
    else:
        _store_values(
            qkv, at + (HEADS + KV_HEADS) * D, (part - Q_PARTS - KV_PARTS) * HEADS_EACH, v_out + slot * (KV_HEADS * DV),
            KV_HEADS, DV, VALUE_SCALE, HEADS_EACH, DVP,
        )  # fmt: skip


@triton.jit
def prefill(
    q, k_new, v_new, k_pool, v_pool, positions, sequences, lengths, table, sinks, y,
    ROWS: tl.constexpr, SEQUENCES: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr, SINKS: tl.constexpr,
    HELD: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr,
    TILE_ROWS: tl.constexpr, M: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Grid [ceil(ROWS / TILE_ROWS), KV_HEADS]. With WINDOW new rows come from k_new and v_new, else from the pool."""
    head = tl.program_id(1)
    from_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_ROWS  # the longest first
    m = tl.arange(0, M)
    row = from_row + m // GROUP
    valid = (m < TILE_ROWS * GROUP) & (row < ROWS)
    position = tl.load(positions + row, mask=valid, other=-1)
    owner = tl.load(sequences + row, mask=valid, other=-1)
    live = position >= 0
    heads = head * GROUP + m % GROUP
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    inside = live[:, None] & (d < D)[None, :]
    queries = tl.load(q + (row * (KV_HEADS * GROUP) + heads)[:, None] * D + d[None, :], mask=inside, other=0.0)
    acc = tl.zeros([M, DVP], tl.float32)
    peak = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)

    last = tl.max(tl.where(live, owner, -1), axis=0)
    for sequence in range(tl.min(tl.where(live, owner, SEQUENCES), axis=0), last + 1):
        mine = live & (owner == sequence)
        n = tl.load(lengths + sequence)
        end = tl.max(tl.where(mine, position, -1), axis=0) + 1
        low = 0
        if WINDOW:
            end = n
            first = tl.min(tl.where(mine, position, FAR), axis=0)
            low = tl.maximum(tl.maximum(n - BLOCK * BLOCKS, first - WINDOW + 1), 0)
        if HELD:
            low = tl.maximum(low, tl.load(lengths + SEQUENCES + sequence))
        start = low // KEYS * KEYS if WHOLE else low
        acc, peak, total = attend_past(
            queries, mine, position, start, low, end, 0, 1, k_pool + head * D, v_pool + head * DV,
            table + sequence * BLOCKS, acc, peak, total,
            D, DV, KV_HEADS, WINDOW, SCALE, BLOCK, BLOCKS, KEYS, WHOLE, DP, DVP,
        )  # fmt: skip
    if WINDOW:
        # A row sees rows of its own sequence in front of it, at most WINDOW - 1 away.
        for at in range(tl.maximum(from_row - WINDOW + 1, 0), tl.minimum(from_row + TILE_ROWS, ROWS), KEYS):
            r = at + tl.arange(0, KEYS)
            p = tl.load(positions + r, mask=r < ROWS, other=-1)
            ours = tl.load(sequences + r, mask=r < ROWS, other=-1)[None, :] == owner[:, None]
            held = p >= 0
            k_at = k_new + (r * KV_HEADS + head)[:, None] * D + d[None, :]
            v_at = v_new + (r * KV_HEADS + head)[:, None] * DV + dv[None, :]
            k = tl.load(k_at, mask=held[:, None] & (d < D)[None, :], other=0.0)
            v = tl.load(v_at, mask=held[:, None] & (dv < DV)[None, :], other=0.0)
            seen = ours & held[None, :] & (p[None, :] <= position[:, None]) & (p[None, :] > position[:, None] - WINDOW)
            acc, peak, total = attend(queries, k, v, seen & live[:, None], acc, peak, total, SCALE)

    if SINKS:
        total += tl.exp2(tl.load(sinks + heads, mask=live, other=0.0) * LOG2E - tl.where(live, peak, 0.0))
    acc = acc / tl.where(live, total, 1.0)[:, None]
    out = y + (row * (KV_HEADS * GROUP) + heads)[:, None] * DV + dv[None, :]
    tl.store(out, acc.to(y.dtype.element_ty), mask=valid[:, None] & (dv < DV)[None, :])


@triton.jit
def commit(
    k_new, v_new, k_pool, v_pool, positions, sequences, lengths, counts, table,
    K_ROW: tl.constexpr, V_ROW: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid [rows]: copies the row into its sequence's ring, if it is among the newest BLOCK of the accepted ones."""
    row = tl.program_id(0)
    position, sequence = tl.load(positions + row), tl.load(sequences + row)
    if position < 0:
        return
    n = tl.load(lengths + sequence)
    end = n + tl.load(counts + sequence)
    if (position >= end) | (position < end - BLOCK):
        return
    slot = tl.load(table + sequence).to(tl.int64) * BLOCK + position % BLOCK
    for at in range(0, K_ROW, COLUMNS):
        c = at + tl.arange(0, COLUMNS)
        tl.store(k_pool + slot * K_ROW + c, tl.load(k_new + row * K_ROW + c, mask=c < K_ROW), mask=c < K_ROW)
    for at in range(0, V_ROW, COLUMNS):
        c = at + tl.arange(0, COLUMNS)
        tl.store(v_pool + slot * V_ROW + c, tl.load(v_new + row * V_ROW + c, mask=c < V_ROW), mask=c < V_ROW)
