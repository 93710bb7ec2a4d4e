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
    x, norm, w1, normed, hidden, listed,
    T: tl.constexpr, K: tl.constexpr, EPS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, RB: tl.constexpr,
    KB: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden float32 [T, RANK] = relu(w1 rmsnorm(x)), and normed float16 [T, K] = rmsnorm(x) for the products.

    Programs: RB ranks by ROWS rows. Each also writes its share of normed. FEW: the count of programs that have scored
    their blocks, listed[1], is set to 0.
    """
    PROGRAMS: tl.constexpr = (RANK + RB - 1) // RB
    pid = tl.program_id(0)
    inside = tl.arange(0, KB)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    scaled = ()
    for k in tl.static_range(0, K, KB):
        scale = tl.load(norm + k + inside, mask=k + inside < K, other=0.0)
        for j in tl.static_range(RB):
            mask = (k + inside < K) & (pid * RB + j < RANK)
            w = tl.load(w1 + (pid * RB + j) * K + k + inside, mask=mask, other=0.0) * scale
            scaled = scaled + (w,)  # type: ignore[assignment]  # noqa: RUF005 (no stars in kernels)
    if PDL:
        gdc_wait()
    squares = tl.zeros((ROWS, KB), tl.float32)
    sums = ()
    for _ in tl.static_range(RB):
        sums = sums + (tl.zeros((ROWS, KB), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for k in tl.static_range(0, K, KB):
        mask = (k + inside < K)[None, :] & (row < T)[:, None]
        v = tl.load(x + row[:, None] * K + k + inside[None, :], mask=mask, other=0.0)
        squares += v * v
        added = ()
        for j in tl.static_range(RB):
            added = added + (sums[j] + scaled[k // KB * RB + j][None, :] * v,)  # type: ignore[assignment]  # noqa: RUF005
        sums = added
    inverse = tl.rsqrt(tl.sum(squares, axis=1) / K + EPS)
    for j in tl.static_range(RB):
        out = tl.maximum(tl.sum(sums[j], axis=1) * inverse, 0.0)
        tl.store(hidden + row * RANK + pid * RB + j, out, mask=(row < T) & (pid * RB + j < RANK))
    for k in tl.static_range(0, K, KB):
        if k // KB % PROGRAMS == pid:
            mask = (k + inside < K)[None, :] & (row < T)[:, None]
            v = tl.load(x + row[:, None] * K + k + inside[None, :], mask=mask, other=0.0) * inverse[:, None]
            v *= tl.load(norm + k + inside, mask=k + inside < K, other=0.0)[None, :]
            tl.store(normed + row[:, None] * K + k + inside[None, :], finite16(v), mask=mask)
    if FEW and pid == 0:
        tl.store(listed + 1, 0)
    if PDL:
        gdc_launch_dependents()


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
    keep, listed,
    T: tl.constexpr, BLOCKS: tl.constexpr, UNITS: tl.constexpr, DENSE: tl.constexpr, UB: tl.constexpr,
    DEAL: tl.constexpr,
):  # fmt: skip
    """Lists the units that some row keeps: listed[0] is the number of places, or -1 if more than DENSE units are kept;
    places begin at listed[2]: unit u at a place of u's remainder by DEAL, behind the units in front of it, -1 where a
    warp has fewer."""
    PER: tl.constexpr = BLOCKS // UNITS  # blocks a unit: 1, or 2 blocks of 16
    unit = tl.arange(0, UB)
    kept = tl.zeros((UB,), tl.int32)
    for row in tl.static_range(T):
        for i in tl.static_range(PER):
            at = keep + row * BLOCKS + unit * PER + i
            kept |= tl.load(at, mask=unit < UNITS, other=0, cache_modifier=".cg").to(tl.int32)
    dense = tl.sum(kept) > DENSE
    kept = tl.reshape(kept, (UB // DEAL, DEAL))
    unit = tl.reshape(unit, (UB // DEAL, DEAL))
    dealt = tl.sum(kept, axis=0)
    tl.store(listed, tl.where(dense, -1, tl.max(dealt) * DEAL))
    holes = (unit // DEAL >= dealt[None, :]) & (unit < (UNITS + DEAL - 1) // DEAL * DEAL)
    tl.store(listed + 2 + unit, -1, mask=holes)
    place = (tl.cumsum(kept, axis=0) - 1) * DEAL + unit % DEAL
    tl.store(listed + 2 + place, unit, mask=kept > 0)


@triton.jit
def gate_up_kept(
    x, hidden, w2, bias, q, scales, zeros, keep, listed, h,
    T: tl.constexpr, INTER: tl.constexpr, K: tl.constexpr, G: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    GELU: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, UNITS: tl.constexpr,
    DENSE: tl.constexpr, UB: tl.constexpr, DEAL: tl.constexpr, B: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """h float16 [T, INTER] = keep * act(gate x) * up x, 32 channels a program; weights of channels that no row keeps
    are not read. Also keep uint8 [T, INTER / BLOCK].

    The last program makes the list for `down_listed`, as soon as all others have scored their blocks: they count
    themselves in listed[1] and wait for nobody. It takes one of a GPU's many places meanwhile, so they go on, whatever
    the order in which programs are started.
    """
    SCORING: tl.constexpr = INTER // 32  # programs
    BLOCKS: tl.constexpr = INTER // BLOCK
    PER: tl.constexpr = (BLOCK + 31) // BLOCK  # blocks a program: 1, or 2 of 16
    pid = tl.program_id(0)
    if pid == SCORING:
        if PDL:
            gdc_wait()
        scored = tl.atomic_add(listed + 1, 0, sem="acquire")
        while scored < SCORING:
            scored = tl.atomic_add(listed + 1, 0, sem="acquire")
        list_units(keep, listed, T, BLOCKS, UNITS, DENSE, UB, DEAL)
    else:
        r = tl.arange(0, RANKS)
        row = tl.arange(0, 8)
        first = pid * 32 // BLOCK
        w = ()
        for i in tl.static_range(PER):
            w = w + (tl.load(w2 + (first + i) * RANK + r, mask=r < RANK, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005 (no stars in kernels)
        if PDL:
            gdc_wait()
        inside = (row < T)[:, None] & (r < RANK)[None, :]
        ranks = tl.load(hidden + row[:, None] * RANK + r[None, :], mask=inside, other=0.0)
        kept = ()
        any_kept = 0
        for i in tl.static_range(PER):
            score = tl.sum(w[i][None, :] * ranks, axis=1) + tl.load(bias + first + i)
            mine = ((score > 0) & (row < T)).to(tl.int32)
            tl.store(keep + row * BLOCKS + first + i, mine.to(tl.uint8), mask=row < T)
            any_kept |= tl.max(mine)
            kept = kept + (mine,)  # type: ignore[assignment]  # noqa: RUF005
        tl.debug_barrier()
        tl.atomic_add(listed + 1, 1, sem="release")
        n = pid * 32 + tl.arange(0, 32)[:, None]
        if any_kept > 0:
            tile = pid + tl.arange(0, 2) * (INTER // 32)
            out = products(x, q, scales, zeros, tile, q, K // UNIT, T, K, K, G, BITS, UNIT, False, 1, 2, B, STAGES)
            gate, up = tl.split(tl.permute(tl.reshape(out, (2, 32, 8)), (1, 2, 0)))
            mask = tl.zeros((32, 8), tl.int32)
            for i in tl.static_range(PER):
                mask = tl.where(n // BLOCK == first + i, kept[i][None, :], mask)
            out = tl.where(mask > 0, activate(gate, up, GELU), 0.0)
            tl.store(h + row[None, :] * INTER + n, finite16(out), mask=row[None, :] < T)
        else:
            tl.store(h + row[None, :] * INTER + n, tl.zeros((32, 8), tl.float16), mask=row[None, :] < T)
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
        out = products(h, q, scales, zeros, tile, listed + 2, places, T, K, K, G, BITS, UNIT, True, PER, R, B, STAGES)
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
