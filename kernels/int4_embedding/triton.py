"""Int4Embedding in Triton: rows of a packed table, dequantised exactly."""

import triton
import triton.language as tl


@triton.jit
def table_row(
    token, k, q, scales, zeros, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Columns k of the table's row `token`, float32; 0 for a token outside 0 .. N - 1 and for columns from K on."""
    valid = (k < K) & (token >= 0) & (token < N)
    tile = token // 32
    inside = token % 8 * 4 + token % 32 // 8  # row8, rows of 8
    pair = k % 8 // 2
    word = k // 32 * (BITS // 4) + pair * BITS // 16  # counted within the tile, in 128 words
    words = (
        (tile.to(tl.int64) * (K // 32 * (BITS // 4)) + word) * 128 + token % 8 * 16 + k % 32 // 8 * 4 + token % 32 // 8
    )
    bit = BITS * (pair % (16 // BITS)) + 16 * (k % 2)
    level = (tl.load(q + words, mask=valid, other=0) >> bit) & ((1 << BITS) - 1)
    group = (tile.to(tl.int64) * (K // G) + k // G) * 32 + inside
    zero = tl.load(zeros + group, mask=valid, other=0).to(tl.int32)
    return (level - zero).to(tl.float32) * tl.load(scales + group, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def embed(
    tokens, q, scales, zeros, y, first,
    N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """y float32 [rows, K] = SCALE * row tokens[first + r] of the table; 0 for a token outside 0 .. N - 1. KB columns a
    program."""
    row = tl.program_id(0)
    k = tl.program_id(1) * KB + tl.arange(0, KB)
    weight = table_row(tl.load(tokens + first + row), k, q, scales, zeros, N, K, G, BITS)
    tl.store(y + row.to(tl.int64) * K + k, weight * SCALE, mask=k < K)
