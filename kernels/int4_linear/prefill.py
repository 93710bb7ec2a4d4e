"""Int4Linear in Triton for 16 or more rows: weights are unpacked and scaled to float16 once for a block of rows of x.

A program's rows of w stay in the order of the packed tiles, which is the order of the matrix instruction's left operand
with one tile a warp: on Orin they go to the instruction from registers, on Hopper through shared memory.
"""

import triton
import triton.language as tl

from mimo_edge.kernels.int4_linear.parts import activate, finite16, unpack


@triton.jit
def many_products(
    x, q, scales, zeros, tile, token,
    T: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """tile [W] numbers of tiles times rows `token` [TOKENS] of x -> float32 [32 W, TOKENS], in the order of
    `permuted`."""
    WORDS: tl.constexpr = BITS // 4 * 128
    chunk = tl.arange(0, CHUNKS)
    words = (
        q + tile[:, None, None] * (K // 32 * WORDS) + chunk[None, :, None] * WORDS + tl.arange(0, 128)[None, None, :]
    )
    group = tile[None, None, :, None, None] * (K // G * 32)
    group += tl.arange(0, 8)[None, :, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, None, :]
    group += tl.arange(0, 4)[:, None, None, None, None] * 0  # the four quads read the same: each lane needs its rows'
    columns = x + token[:, None] * K + tl.arange(0, 32 * CHUNKS)[None, :]
    total = tl.zeros((32 * W, TOKENS), tl.float32)
    for first in tl.range(0, K // 32, CHUNKS, num_stages=STAGES):
        if 32 * CHUNKS <= G:
            at = group + first * 32 // G * 32
        else:
            at = group + (first + chunk[None, None, None, :, None]) * 32 // G * 32
        zero = tl.permute(tl.load(zeros + at).to(tl.int32), (2, 3, 1, 0, 4))  # tile chunk row8 quad rows of 8
        scale = tl.permute(tl.load(scales + at), (2, 3, 1, 0, 4))
        a = unpack(words + first * WORDS, zero, first >= 0, (W, CHUNKS, 8, 4, 4), BITS)
        a = a * scale[:, :, :, :, :, None, None, None]
        a = tl.reshape(
            a, (W, CHUNKS, 8, 4, 2, 2, 2, 2, 2)
        )  # rows of 8 in two bits: 16 rows of one or another instruction
        a = tl.permute(a, (4, 0, 5, 2, 1, 3, 7, 8, 6))
        v = tl.load(columns + first * 32, mask=token[:, None] < T, other=0.0)
        total = tl.dot(tl.reshape(a, (32 * W, 32 * CHUNKS)), tl.trans(v), total)
    return total


@triton.jit
def permuted(W: tl.constexpr):
    """Row of w, counted from the first tile's first, that stands at each place of `many_products`."""
    m = tl.arange(0, 32 * W)
    return m // 16 % W * 32 + m // (16 * W) * 16 + m % 16


@triton.jit
def linear_many(
    x, q, scales, zeros, bias, residual, y,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, W: tl.constexpr, TOKENS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y [T, N] = x w^T (+ bias) (+ residual); programs (blocks of rows of x, blocks of 32 W rows of w)."""
    first = tl.program_id(1) * W
    tile = tl.minimum(first + tl.arange(0, W), (N + 31) // 32 - 1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    out = many_products(x, q, scales, zeros, tile, token, T, K, G, BITS, W, TOKENS, CHUNKS, STAGES)
    n = (first * 32 + permuted(W))[:, None]
    row = token[None, :]
    mask = (n < N) & (row < T)
    if BIAS:
        out += tl.load(bias + n, mask=n < N, other=0.0)
    if RESIDUAL:
        out += tl.load(residual + row * N + n, mask=mask, other=0.0)
    if y.dtype.element_ty == tl.float16:
        out = finite16(out)
    tl.store(y + row.to(tl.int64) * N + n, out, mask=mask)


@triton.jit
def gate_up_many(
    x, q, scales, zeros, keep, h,
    T: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, GELU: tl.constexpr,
    BLOCK: tl.constexpr, W: tl.constexpr, TOKENS: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """h float16 [T, INTER] = act(gate x) * up x; with BLOCK, 0 where keep uint8 [T, INTER / BLOCK] is 0."""
    TILES: tl.constexpr = (INTER + 31) // 32
    HALF: tl.constexpr = W // 2
    first = tl.program_id(1) * HALF
    part = tl.arange(0, W)
    tile = tl.minimum(first + part % HALF, TILES - 1) + part // HALF * TILES
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    out = many_products(x, q, scales, zeros, tile, token, T, K, G, BITS, W, TOKENS, CHUNKS, STAGES)
    out = tl.reshape(out, (2, 2, HALF * 16, TOKENS))  # rows: half a tile, gate or up, the rest
    gate, up = tl.split(tl.permute(out, (0, 2, 3, 1)))
    out = tl.reshape(activate(gate, up, GELU), (HALF * 32, TOKENS))
    n = (first * 32 + permuted(HALF))[:, None]
    row = token[None, :]
    mask = (n < INTER) & (row < T)
    if BLOCK:
        kept = tl.load(keep + row * (INTER // BLOCK) + n // BLOCK, mask=mask, other=0)
        out = tl.where(kept != 0, out, 0.0)
    tl.store(h + row.to(tl.int64) * INTER + n, finite16(out), mask=mask)
