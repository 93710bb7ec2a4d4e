"""MTP heads on a GPU; reference.py says what is computed. The head's block and its logits are other ops."""

import triton
import triton.language as tl

from mimo_edge.kernels.int4_embedding.triton import table_row
from mimo_edge.kernels.int4_linear.parts import finite16


@triton.jit
def _normed(v, w, c, K: tl.constexpr, EPS: tl.constexpr):
    """v [COLUMNS], 0 from K on, over its root mean square, times w."""
    return v * tl.rsqrt(tl.sum(v * v, axis=0) / K + EPS) * tl.load(w + c, mask=c < K, other=0.0)


@triton.jit
def pair(
    tokens, q, scales, zeros, hidden, table, positions, token_norm, hidden_norm, final_norm, y, first,
    N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, RING: tl.constexpr,
    POST_NORM: tl.constexpr, TOKEN_FIRST: tl.constexpr, ZERO_FIRST: tl.constexpr, EPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid [rows, 2]: half 0 of y float16 [rows, 2 K] from tokens[first + row], half 1 from the ring table[0] of hidden
    states float32 [rings, RING, K]; where the halves stand is TOKEN_FIRST's matter."""
    row, half = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, COLUMNS)
    position = tl.load(positions + row)
    out = y + row.to(tl.int64) * (2 * K) + tl.where((half == 0) == TOKEN_FIRST, 0, K) + c
    if position < 0:
        tl.store(out, tl.zeros([COLUMNS], tl.float16), mask=c < K)
    elif half == 0:
        token = tl.load(tokens + first + row)
        if ZERO_FIRST:
            token = tl.where(position == 0, -1, token)  # no token: zeros
        v = table_row(token, c, q, scales, zeros, N, K, G, BITS) * SCALE
        tl.store(out, finite16(_normed(v, token_norm, c, K, EPS)), mask=c < K)
    else:
        slot = tl.load(table).to(tl.int64) * RING + position % RING
        v = tl.load(hidden + slot * K + c, mask=c < K, other=0.0)
        if POST_NORM:
            v = _normed(v, final_norm, c, K, EPS)
        tl.store(out, finite16(_normed(v, hidden_norm, c, K, EPS)), mask=c < K)


@triton.jit
def keep(
    x, positions, lengths, counts, table, hidden,
    K: tl.constexpr, RING: tl.constexpr, COUNTED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid [rows, K / COLUMNS]: hidden [rings, RING, K], in ring table[0], gets row x [rows, K] of each position.
    COUNTED: only the newest RING of the first counts[0] rows behind lengths[0]."""
    row = tl.program_id(0)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    position = tl.load(positions + row)
    wanted = position >= 0
    if COUNTED:
        end = tl.load(lengths) + tl.load(counts)
        wanted &= (position < end) & (position >= end - RING)
    if wanted:
        slot = tl.load(table).to(tl.int64) * RING + position % RING
        value = tl.load(x + row.to(tl.int64) * K + c, mask=c < K, other=0.0)
        tl.store(hidden + slot * K + c, value, mask=c < K)
