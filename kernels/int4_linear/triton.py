"""Int4Linear in Triton: few rows (decode). `layout` says how the weights lie; prefill.py has the kernels for many rows.

Weights are the LEFT operand of the matrix instruction and rows of x its 8 columns, so 1 row costs what 8 cost. The
batch axis of tl.dot is the program's warps: each takes its own units of K and sums them alone; the sums meet once, at
the end. Weights pass shared memory only as packed words, 16 bytes a lane, copied ahead (num_stages); unpacked they
are already where the instruction wants its operand, so nothing is exchanged between lanes.
tests/kernels/test_int4_machine_code.py reads that off the code, because Triton would convert silently (and slowly) if
an axis order here no longer met its choice.

PDL (compute capability 9.0): the kernel may be launched before the one in front of it has ended; it waits for that
first, and lets the next one start when its own last bytes are on their way.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mimo_edge.kernels.int4_linear.parts import ASM, activate, finite16, unpack
from mimo_edge.kernels.int4_linear.prefill import gate_up_many, linear_many

__all__ = ["gate_up", "gate_up_many", "head", "linear", "linear_many", "norm_ahead", "products"]


@triton.jit
def listed_or_all(place, listed, count, LISTED: tl.constexpr, MASKED: tl.constexpr):
    """The units that stand at these places, and whether there are such (a list has holes of -1)."""
    valid = place < count if MASKED else place >= 0
    if LISTED:
        place = tl.load(listed + place, mask=valid, other=-1)
        valid = place >= 0
        place = tl.maximum(place, 0)
    return place, valid


@triton.jit
def add_products(
    total, x, q, scales, zeros, tile, listed, first, count,
    T: tl.constexpr, K: tl.constexpr, XS: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    LISTED: tl.constexpr, MASKED: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """total [B, 32 R, 8] plus the products of one unit of K for each warp, places `first` on.

    The k that share a scale are summed, then scaled: all in float32 but for x and the integers q - zero, both float16.
    """
    WORDS: tl.constexpr = BITS // 4 * 128  # of a chunk
    SPAN: tl.constexpr = min(G, UNIT)  # k that share a scale within a unit
    warp = first + tl.arange(0, B)
    # One axis order a load: Triton deals the last axis to lanes first, then the others from the first on.
    unit, valid = listed_or_all(warp[:, None, None], listed, count, LISTED, MASKED)
    words = q + tile[None, :, None] * (K // 32 * WORDS) + unit * (UNIT // 32 * WORDS) + tl.arange(0, 128)[None, None, :]
    unit, valid_x = listed_or_all(warp[None, :, None], listed, count, LISTED, MASKED)
    row = tl.arange(0, 8)[:, None, None]
    columns = x + row * XS + unit * UNIT + tl.arange(0, 32)[None, None, :]
    unit, valid_group = listed_or_all(warp[None, None, :, None, None], listed, count, LISTED, MASKED)
    group = tile[None, None, None, :, None] * (K // G) + unit * UNIT // G
    group = group * 32 + tl.arange(0, 8)[None, :, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, None, :]
    group += tl.arange(0, 4)[:, None, None, None, None] * 0  # the four quads read the same: each lane needs its rows'
    for span in tl.static_range(UNIT // SPAN):
        scale = tl.load(scales + group + span * 32, mask=valid_group, other=0.0).to(tl.float32)
        zero = tl.load(zeros + group + span * 32, mask=valid_group, other=0).to(tl.int32)
        zero = tl.permute(zero, (2, 3, 1, 0, 4))
        part = tl.zeros((B, 32 * R, 8), tl.float32)
        for c in tl.static_range(span * SPAN // 32, (span + 1) * SPAN // 32):
            a = unpack(words + c * WORDS, zero, valid, (B, R, 8, 4, 4), BITS)  # warp tile row8 quad rows of 8 | 0 2 1
            a = tl.reshape(tl.permute(a, (0, 1, 4, 2, 3, 6, 7, 5)), (B, 32 * R, 32))
            v = tl.load(columns + c * 32, mask=(row < T) & valid_x, other=0.0)
            part = tl.dot(a, tl.permute(v, (1, 2, 0)), part)
        scale = tl.reshape(tl.permute(scale, (2, 3, 4, 1, 0)), (B, 32 * R, 4))
        total += part * tl.reshape(tl.join(scale, scale), (B, 32 * R, 8))
    return total


@triton.jit
def sum_warps(total, M: tl.constexpr, B: tl.constexpr):
    """[B, M, 8] summed over B, in halves: Triton's own sum over warps meets a bank conflict a warp."""
    for level in tl.static_range(4):
        if B >> (level + 1) > 0:
            low, high = tl.split(tl.permute(tl.reshape(total, (2, B >> (level + 1), M, 8)), (1, 2, 3, 0)))
            total = low + high
    return tl.reshape(total, (M, 8))


@triton.jit
def products(
    x, q, scales, zeros, tile, listed, count,
    T: tl.constexpr, K: tl.constexpr, XS: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    LISTED: tl.constexpr, PER: tl.constexpr, R: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of weights times rows of x: tile [R] numbers of tiles -> float32 [32 R, 8].

    K is dealt in units of UNIT to B warps in turn, PER units each, STAGES turns in flight. LISTED: the units are
    listed[0 .. count), else all of K's. A warp's units are added in their order, so units of zeros change no bit.
    """
    total = tl.zeros((B, 32 * R, 8), tl.float32)
    for first in tl.range(0, count, B * PER, num_stages=STAGES):
        for unit in tl.static_range(PER):
            total = add_products(
                total, x, q, scales, zeros, tile, listed, first + unit * B, count,
                T, K, XS, G, BITS, UNIT, LISTED, LISTED or K // UNIT % (B * PER) != 0, R, B,
            )  # fmt: skip
    return sum_warps(total, 32 * R, B)


@triton.jit
def linear(
    x, q, scales, zeros, bias, residual, y,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, XS: tl.constexpr, YS: tl.constexpr, G: tl.constexpr,
    BITS: tl.constexpr, UNIT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, R: tl.constexpr,
    B: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [T, N] = x w^T (+ bias) (+ residual), 32 R rows of w a program. y is float16 or float32."""
    if PDL:
        gdc_wait()
    first = tl.program_id(0) * R
    tile = tl.minimum(first + tl.arange(0, R), (N + 31) // 32 - 1)
    out = products(x, q, scales, zeros, tile, q, K // UNIT, T, K, XS, G, BITS, UNIT, False, 1, R, B, STAGES)
    if PDL:
        gdc_launch_dependents()
    n = first * 32 + tl.arange(0, 32 * R)[:, None]
    row = tl.arange(0, 8)[None, :]
    mask = (n < N) & (row < T)
    if BIAS:
        out += tl.load(bias + n, mask=n < N, other=0.0)
    if RESIDUAL:
        out += tl.load(residual + row * YS + n, mask=mask, other=0.0)
    if y.dtype.element_ty == tl.float16:
        out = finite16(out)
    tl.store(y + row * YS + n, out, mask=mask)


@triton.jit
def head(
    x, q, scales, zeros, y, best, best_index,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, XS: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr,
    UNIT: tl.constexpr, R: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits y float32 [T, N]; the largest of this program's columns and its index: best, best_index [T, programs]."""
    if PDL:
        gdc_wait()
    pid = tl.program_id(0)
    tile = tl.minimum(pid * R + tl.arange(0, R), (N + 31) // 32 - 1)
    out = products(x, q, scales, zeros, tile, q, K // UNIT, T, K, XS, G, BITS, UNIT, False, 1, R, B, STAGES)
    if PDL:
        gdc_launch_dependents()
    n = pid * (32 * R) + tl.arange(0, 32 * R)[:, None]
    row = tl.arange(0, 8)[None, :]
    tl.store(y + row.to(tl.int64) * N + n, out, mask=(n < N) & (row < T))
    out = tl.where(n < N, out, float("-inf"))
    top = tl.max(out, axis=0)
    index = tl.min(tl.where(out == top[None, :], n, N - 1), axis=0)
    at = tl.arange(0, 8) * tl.num_programs(0) + pid
    tl.store(best + at, top, mask=tl.arange(0, 8) < T)
    tl.store(best_index + at, index, mask=tl.arange(0, 8) < T)


@triton.jit
def gate_up(
    x, q, scales, zeros, h,
    T: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, XS: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr,
    UNIT: tl.constexpr, GELU: tl.constexpr, R: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h float16 [T, INTER] = act(gate x) * up x, 32 R channels a program; w is tiles of gate, then tiles of up."""
    if PDL:
        gdc_wait()
    TILES: tl.constexpr = (INTER + 31) // 32
    first = tl.program_id(0) * R
    part = tl.arange(0, 2 * R)
    tile = tl.minimum(first + part % R, TILES - 1) + part // R * TILES
    out = products(x, q, scales, zeros, tile, q, K // UNIT, T, K, XS, G, BITS, UNIT, False, 1, 2 * R, B, STAGES)
    if PDL:
        gdc_launch_dependents()
    gate, up = tl.split(tl.permute(tl.reshape(out, (2, 32 * R, 8)), (1, 2, 0)))
    n = first * 32 + tl.arange(0, 32 * R)[:, None]
    row = tl.arange(0, 8)[None, :]
    tl.store(h + row * INTER + n, finite16(activate(gate, up, GELU)), mask=(n < INTER) & (row < T))


@triton.jit
def norm_ahead(
    x, norm, q, y, first,
    T: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
    AHEAD: tl.constexpr, SHARE: tl.constexpr, LINE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y float16 [T, K] = x / rms(x) * norm, x float32 [T, K] behind the first rows: programs 0 to T - 1, one a row.

    The programs behind them ask for the first AHEAD of each tile's TILE words of q, the weights that are read next, to
    be brought to the L2 cache: memory has nothing else to do meanwhile. They take SHARE lines of LINE words each."""
    pid = tl.program_id(0)
    if pid < T:
        if PDL:
            gdc_wait()
        c = tl.arange(0, COLUMNS)
        v = tl.load(x + (first + pid) * K + c, mask=c < K, other=0.0)
        v = v * tl.rsqrt(tl.sum(v * v) / K + EPS) * tl.load(norm + c, mask=c < K, other=0.0)
        tl.store(y + pid * K + c, finite16(v), mask=c < K)
        if PDL:
            gdc_launch_dependents()
    elif ASM:
        LINES: tl.constexpr = AHEAD // LINE  # of a tile
        line = tl.minimum((pid - T) * SHARE + tl.arange(0, SHARE), TILES * LINES - 1)
        address = (q + (line // LINES * TILE + line % LINES * LINE)).to(tl.int64, bitcast=True)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )
