"""What decode and prefill share: heads from qkv, one tile of keys in a running softmax, a sequence's past.

A tile of queries holds all query heads of one kv head for several rows: line m is row m // GROUP and head m % GROUP.
Positions make the mask. Loads of keys and values are masked too, so what free slots hold cannot matter. The pages of
a full layer's sequence hold all of it: only rings wrap. Scores and sums are float32, softmax is in base 2.

Shared names: D, DV, HALF = head sizes and half of the rotated dimensions; DP, DVP, M = padded to powers of two;
BLOCK, BLOCKS = slots of a block and blocks of a sequence; KEYS = keys of a tile; WINDOW 0 = none.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(2**30)  # beyond every position


@triton.jit
def load_heads(
    x, at, row, live, rotation, norm, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, EPS
):
    """Heads x[at + 0..D-1] of rows `row`, normed and rotated: float32 [len(at), DP], 0 where not live and behind D."""
    d = tl.arange(0, DP)
    inside = live[:, None] & (d < D)[None, :]
    a = tl.load(x + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.where(d < HALF, d + HALF, d - HALF)  # of the rotated dimensions, d < 2 * HALF
    turned = live[:, None] & (d < 2 * HALF)[None, :]
    if NORM:
        root = tl.rsqrt(tl.sum(a * a, axis=1) / D + EPS)[:, None]
        a *= root * tl.load(norm + d, mask=d < D, other=0.0)[None, :]
    if HALF:
        b = tl.load(x + at[:, None] + partner[None, :], mask=turned, other=0.0).to(tl.float32)
        if NORM:
            b *= root * tl.load(norm + partner, mask=d < 2 * HALF, other=0.0)[None, :]
        angles = rotation + row[:, None] * 2 * HALF + (d % HALF)[None, :]
        cos = tl.load(angles, mask=turned, other=1.0)
        sin = tl.load(angles + HALF, mask=turned, other=0.0)
        a = a * cos + b * tl.where(d < HALF, -sin, sin)
    return a


@triton.jit
def slots_of(p, held, table, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Slots int64 of any positions p."""
    if BLOCKS == 1:
        return tl.load(table).to(tl.int64) * BLOCK + p % BLOCK
    return tl.load(table + p // BLOCK % BLOCKS, mask=held, other=0).to(tl.int64) * BLOCK + p % BLOCK


@triton.jit
def attend(q, k, v, seen, acc, peak, total, SCALE: tl.constexpr):
    """One more tile of keys in a running softmax: acc [M, DVP], peak and total [M]; seen [M, keys]."""
    scores = tl.where(seen, tl.dot(q, tl.trans(k)) * (SCALE * LOG2E), -float("inf"))
    top = tl.maximum(peak, tl.max(scores, axis=1))
    safe = tl.where(top == -float("inf"), 0.0, top)  # lines that have seen nothing yet
    weights = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(peak - safe)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, top, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def attend_past(
    q, mine, position, start, low, end, tile, STEP: tl.constexpr, k_pool, v_pool, table, acc, peak, total,
    D: tl.constexpr, DV: tl.constexpr, KV_HEADS: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr,
    DP: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Attends to the pool's positions [max(start, low), end) of one sequence, in tiles tile, tile + STEP ...

    The pools are given at the kv head, the table at the sequence. WHOLE: a tile lies in one block.
    """
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    if BLOCKS == 1:
        block = tl.load(table)
    elif WHOLE:
        block = tl.load(table + (start + tile * KEYS) // BLOCK % BLOCKS)
    for at in range(start + tile * KEYS, end, STEP * KEYS):
        p = at + tl.arange(0, KEYS)
        held = (p >= low) & (p < end)
        if BLOCKS == 1 or WHOLE:
            slots = block.to(tl.int64) * BLOCK + p % BLOCK
        else:
            slots = slots_of(p, held, table, BLOCK, BLOCKS)
        if WHOLE:  # the next tile's block is read one tile ahead: keys do not wait for it
            block = tl.load(table + (at + STEP * KEYS) // BLOCK % BLOCKS)
        slots = slots[:, None]
        k = tl.load(k_pool + slots * (KV_HEADS * D) + d[None, :], mask=held[:, None] & (d < D)[None, :], other=0.0)
        v = tl.load(v_pool + slots * (KV_HEADS * DV) + dv[None, :], mask=held[:, None] & (dv < DV)[None, :], other=0.0)
        seen = mine[:, None] & held[None, :] & (p[None, :] <= position[:, None])
        if WINDOW:
            seen &= p[None, :] > position[:, None] - WINDOW
        acc, peak, total = attend(q, k, v, seen, acc, peak, total, SCALE)
    return acc, peak, total
