"""SparseFfn in Triton: ranks, then gate and up for the blocks that rows keep, then down over units that are not 0.

A unit is what down skips: max(block, 32) channels. A row's result has the same bits whatever its neighbours keep: its
scores and activations are its own, and units are dealt to warps by number, each warp adding its own in their order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mimo_edge.kernels.int4_linear.parts import activate, finite16
from mimo_edge.kernels.int4_linear.triton import products


@triton.jit
def ranks(
    x, norm, w1, normed, hidden,
    T: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, RB: tl.constexpr,
    KB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden float32 [T, RANK] = relu(w1 rmsnorm(x)), and normed float16 [T, K] = rmsnorm(x) for the products.

    Programs: RB ranks by ROWS rows. Each also writes its share of normed.
    """
    if PDL:
        gdc_wait()
    first = tl.program_id(1) * ROWS
    rank = tl.program_id(0) * RB + tl.arange(0, RB)
    inside = tl.arange(0, KB)
    inverse = ()
    sums = ()
    for i in tl.static_range(ROWS):
        squares = tl.zeros((KB,), tl.float32)
        for k in tl.static_range(0, K, KB):
            v = tl.load(x + (first + i) * K + k + inside, mask=(k + inside < K) & (first + i < T), other=0.0)
            squares += v * v
        inverse = inverse + (tl.rsqrt(tl.sum(squares) / K + EPS),)  # type: ignore[assignment]  # noqa: RUF005 (no stars in kernels)
        sums = sums + (tl.zeros((RB, KB), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for k in tl.static_range(0, K, KB):
        valid = k + inside < K
        w = tl.load(
            w1 + rank[:, None] * K + k + inside[None, :], mask=(rank < RANK)[:, None] & valid[None, :], other=0.0
        )
        scale = tl.load(norm + k + inside, mask=valid, other=0.0)
        added = ()
        for i in tl.static_range(ROWS):
            mask = valid & (first + i < T)
            v = tl.load(x + (first + i) * K + k + inside, mask=mask, other=0.0) * inverse[i] * scale
            if k // KB % tl.num_programs(0) == tl.program_id(0):
                tl.store(normed + (first + i) * K + k + inside, finite16(v), mask=mask)
            added = added + (sums[i] + w * v[None, :],)  # type: ignore[assignment]  # noqa: RUF005
        sums = added
    for i in tl.static_range(ROWS):
        out = tl.maximum(tl.sum(sums[i], axis=1), 0.0)
        tl.store(hidden + (first + i) * RANK + rank, out, mask=(rank < RANK) & (first + i < T))
    if PDL:
        gdc_launch_dependents()


@triton.jit
def score(w2, bias, hidden, block, row, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Of one block and row: it is kept if this is above 0."""
    r = tl.arange(0, RANKS)
    w = tl.load(w2 + block * RANK + r, mask=r < RANK, other=0.0)
    return tl.sum(w * tl.load(hidden + row * RANK + r, mask=r < RANK, other=0.0)) + tl.load(bias + block)


@triton.jit
def keep_many(
    w2, bias, hidden, keep,
    T: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCKS: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """keep uint8 [T, BLOCKS] for the products of many rows: program (blocks, row)."""
    row = tl.program_id(1)
    r = tl.arange(0, RANKS)
    block = tl.program_id(0) * BB + tl.arange(0, BB)
    w = tl.load(
        w2 + block[:, None] * RANK + r[None, :], mask=(block < BLOCKS)[:, None] & (r < RANK)[None, :], other=0.0
    )
    scores = tl.sum(w * tl.load(hidden + row * RANK + r, mask=r < RANK, other=0.0)[None, :], axis=1)
    scores += tl.load(bias + block, mask=block < BLOCKS, other=0.0)
    tl.store(keep + row * BLOCKS + block, (scores > 0).to(tl.uint8), mask=block < BLOCKS)


@triton.jit
def list_units(
    hidden, w2, bias, listed,
    T: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCKS: tl.constexpr, UNITS: tl.constexpr,
    DENSE: tl.constexpr, UB: tl.constexpr, BB: tl.constexpr, DEAL: tl.constexpr,
):  # fmt: skip
    """Lists the units that some row keeps: listed int32 [1 + places] is the number of places, or -1 if more than DENSE
    units are kept, then the places: unit u at a place of u's remainder by DEAL, behind the units in front of it, -1
    where a warp has fewer. A unit whose score rounding may turn above 0 is listed too: its activations are 0 if it is
    not kept.
    """
    PER: tl.constexpr = BLOCKS // UNITS  # blocks a unit: 1, or 2 blocks of 16
    r = tl.arange(0, RANKS)
    for first in tl.static_range(0, UB, BB):
        unit = first + tl.arange(0, BB)
        kept = tl.zeros((BB,), tl.int32)
        for i in tl.static_range(PER):
            block = unit * PER + i
            w = tl.load(
                w2 + block[:, None] * RANK + r[None, :], mask=(unit < UNITS)[:, None] & (r < RANK)[None, :], other=0.0
            )
            offset = tl.load(bias + block, mask=unit < UNITS, other=0.0)
            for row in tl.static_range(T):
                terms = w * tl.load(hidden + row * RANK + r, mask=r < RANK, other=0.0)[None, :]
                doubt = 1e-5 * (tl.sum(tl.abs(terms), axis=1) + tl.abs(offset))
                kept |= (tl.sum(terms, axis=1) + offset > -doubt).to(tl.int32)
        tl.store(listed + 1 + unit, kept, mask=unit < UNITS)
    tl.debug_barrier()
    unit = tl.arange(0, UB)
    kept = tl.load(listed + 1 + unit, mask=unit < UNITS, other=0, cache_modifier=".cg")
    tl.debug_barrier()
    dense = tl.sum(kept) > DENSE
    kept = tl.reshape(kept, (UB // DEAL, DEAL))
    unit = tl.reshape(unit, (UB // DEAL, DEAL))
    dealt = tl.sum(kept, axis=0)
    tl.store(listed, tl.where(dense, -1, tl.max(dealt) * DEAL))
    holes = (unit // DEAL >= dealt[None, :]) & (unit < (UNITS + DEAL - 1) // DEAL * DEAL)
    tl.store(listed + 1 + unit, -1, mask=holes)
    place = (tl.cumsum(kept, axis=0) - 1) * DEAL + unit % DEAL
    tl.store(listed + 1 + place, unit, mask=kept > 0)


@triton.jit
def gate_up_kept(
    x, hidden, w2, bias, q, scales, zeros, keep, listed, h,
    T: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    GELU: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, UNITS: tl.constexpr,
    DENSE: tl.constexpr, UB: tl.constexpr, BB: tl.constexpr, DEAL: tl.constexpr, B: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h float16 [T, INTER] = keep * act(gate x) * up x, 32 channels a program; weights of channels that no row keeps
    are not read. Also keep uint8 [T, INTER / BLOCK]. Program 0 makes the list for `down_listed` meanwhile."""
    if PDL:
        gdc_wait()
    if tl.program_id(0) == 0:
        list_units(hidden, w2, bias, listed, T, RANK, RANKS, INTER // BLOCK, UNITS, DENSE, UB, BB, DEAL)
    else:
        pid = tl.program_id(0) - 1
        n = pid * 32 + tl.arange(0, 32)[:, None]
        row = tl.arange(0, 8)[None, :]
        mask = tl.zeros((32, 8), tl.int32)
        any_kept = 0
        for i in tl.static_range((BLOCK + 31) // BLOCK):
            block = pid * 32 // BLOCK + i
            for t in tl.static_range(T):
                kept = (score(w2, bias, hidden, block, t, RANK, RANKS) > 0).to(tl.int32)
                tl.store(keep + t * (INTER // BLOCK) + block, kept.to(tl.uint8))
                mask = tl.where((n // BLOCK == block) & (row == t), kept, mask)
                any_kept = any_kept | kept
        if any_kept > 0:
            tile = pid + tl.arange(0, 2) * (INTER // 32)
            out = products(x, q, scales, zeros, tile, q, K // UNIT, T, K, K, G, BITS, UNIT, False, 1, 2, B, STAGES)
            gate, up = tl.split(tl.permute(tl.reshape(out, (2, 32, 8)), (1, 2, 0)))
            out = tl.where(mask > 0, activate(gate, up, GELU), 0.0)
            tl.store(h + row * INTER + n, finite16(out), mask=row < T)
        else:
            tl.store(h + row * INTER + n, tl.zeros((32, 8), tl.float16), mask=row < T)
    if PDL:
        gdc_launch_dependents()


@triton.jit
def down_listed(
    h, q, scales, zeros, listed, bias, residual, y,
    T: tl.constexpr, N: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PER: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y float32 [T, N] = down h (+ bias) (+ residual), over the listed units of K or all: 32 R rows of w a program."""
    if PDL:
        gdc_wait()
    first = tl.program_id(0) * R
    tile = tl.minimum(first + tl.arange(0, R), (N + 31) // 32 - 1)
    places = tl.load(listed)
    if places < 0:
        out = products(h, q, scales, zeros, tile, q, K // UNIT, T, K, K, G, BITS, UNIT, False, PER, R, B, STAGES)
    else:
        out = products(h, q, scales, zeros, tile, listed + 1, places, T, K, K, G, BITS, UNIT, True, PER, R, B, STAGES)
    if PDL:
        gdc_launch_dependents()
    n = first * 32 + tl.arange(0, 32 * R)[:, None]
    row = tl.arange(0, 8)[None, :]
    mask = (n < N) & (row < T)
    if BIAS:
        out += tl.load(bias + n, mask=n < N, other=0.0)
    if RESIDUAL:
        out += tl.load(residual + row * N + n, mask=mask, other=0.0)
    tl.store(y + row * N + n, out, mask=mask)
