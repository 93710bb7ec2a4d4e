"""Choosing tokens on a GPU; reference.py says what is computed and where ties are. Logits are float32 [rows, VOCAB].

A row's vocabulary is cut into chunks of CHUNK, a power of two; PARTS chunks give PARTS results, which `best` reduces.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_WAYS = tl.constexpr(16)


@triton.jit
def _store_best(x, bad, at, values, ids, i):
    """Highest of x and the lowest of its places `at`, NaN if any element is bad."""
    top = tl.max(x, axis=0)
    tl.store(values + i, tl.where(tl.max(bad.to(tl.int32), axis=0) > 0, float("nan"), top))
    tl.store(ids + i, tl.min(tl.where(x == top, at, 2**31 - 1), axis=0))


@triton.jit
def chunk_best(logits, values, ids, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """Grid [rows, PARTS]: the best logit of each chunk, NaN if the chunk holds one."""
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * VOCAB + at, mask=at < VOCAB, other=-float("inf"))
    bad = x != x
    _store_best(tl.where(bad, -float("inf"), x), bad, at, values, ids, row * tl.num_programs(1) + part)


@triton.jit
def best(values, ids, tokens, first, PARTS: tl.constexpr, PADDED: tl.constexpr):
    """Grid [rows]: tokens[first + row] = id of the best part, the lowest among equals; -1 when it is not finite."""
    row, i = tl.program_id(0), tl.arange(0, PADDED)
    x = tl.load(values + row * PARTS + i, mask=i < PARTS, other=-float("inf"))
    bad = tl.max((x != x).to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(x != x, -float("inf"), x), axis=0)
    id = tl.min(tl.where(x == top, tl.load(ids + row * PARTS + i, mask=i < PARTS, other=0), 2**31 - 1), axis=0)
    tl.store(tokens + first + row, tl.where(bad | (tl.abs(top) == float("inf")), -1, id))


@triton.jit
def chunk_top(logits, sequences, floats, tops, masses, VOCAB: tl.constexpr, CHUNK: tl.constexpr, KEPT: tl.constexpr):
    """Grid [rows, PARTS]: the KEPT best logits of each chunk, best first, and its sum of exp((x - its best) / t)."""
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(floats + tl.load(sequences + row) * 3)
    at = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * VOCAB + at, mask=at < VOCAB, other=-float("inf"))
    x = tl.where(x != x, -float("inf"), x)
    if temperature > 0:  # otherwise nobody reads this
        i = row * tl.num_programs(1) + part
        best = tl.max(x, axis=0)
        weight = tl.exp2((x - tl.where(best == -float("inf"), 0.0, best)) * (_LOG2E / temperature))
        tl.store(masses + i, tl.sum(weight, axis=0))
        for k in range(KEPT):
            tl.store(tops + i * KEPT + k, best)
            x = tl.where(at == tl.min(tl.where(x == best, at, 2**31 - 1), axis=0), -float("inf"), x)
            best = tl.max(x, axis=0)


@triton.jit
def _order(x):
    """int64 that orders as float32 x does."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _value(order):
    bits = order.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _sums(
    logits, tops, limits, lowest, highest, rate, MASS: tl.constexpr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """For limits from `lowest` on: how many logits reach each, or with MASS the sum of their exp((x - highest) / t)."""
    sums = tl.zeros([_WAYS], tl.float32)
    for part in range(PARTS):
        if tl.load(tops + part * KEPT) >= lowest:
            at = part * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits + at, mask=at < VOCAB, other=-float("inf"))
            weight = tl.exp2((x - highest) * rate) if MASS else tl.full([CHUNK], 1.0, tl.float32)
            sums += tl.sum(tl.where(x[:, None] >= limits[None, :], weight[:, None], 0.0), axis=0)
    return sums


@triton.jit
def _cut(
    logits, tops, lowest, highest, rate, target, MASS: tl.constexpr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The highest limit in [lowest, highest] that logits adding up to `target` reach: 16 limits at a time."""
    low, high = _order(lowest), _order(highest) + 1
    w = tl.arange(0, _WAYS)
    while high - low > 1:
        orders = low + (((high - low) * w) >> 4)
        sums = _sums(logits, tops, _value(orders), _value(low), highest, rate, MASS, VOCAB, CHUNK, PARTS, KEPT)
        enough = (sums >= target) | (w == 0)
        high = tl.minimum(high, tl.min(tl.where(enough, high, orders), axis=0))
        low = tl.max(tl.where(enough, orders, low), axis=0)
    return _value(low)


@triton.jit
def _quick_cut(x, weight, lowest, highest, target):
    """As _cut among x alone; `lowest` if not even that is enough."""
    low, high = _order(lowest), _order(highest) + 1
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        enough = tl.sum(tl.where(x >= _value(middle), weight, 0.0), axis=0) >= target
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return _value(low)


@triton.jit
def threshold(
    logits, tops, masses, sequences, floats, integers, limits,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, KEPT: tl.constexpr,
    PADDED: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Grid [rows]: limits [rows, 2] = the highest logit and the lowest that top-k, top-p and min-p leave.

    What chunk_top kept is searched first. It holds every logit above `hidden`, the highest of the chunks' last kept
    ones; where the limit is not above that, the row's logits are searched, which takes much longer.
    """
    row = tl.program_id(0)
    sequence = tl.load(sequences + row)
    logits += row.to(tl.int64) * VOCAB
    tops += row * (PARTS * KEPT)
    i, c = tl.arange(0, LIST), tl.arange(0, PADDED)
    x = tl.load(tops + i, mask=i < PARTS * KEPT, other=-float("inf"))
    best = tl.load(tops + c * KEPT, mask=c < PARTS, other=-float("inf"))
    highest = tl.max(best, axis=0)
    lowest = -3.4028234663852886e38
    hidden = tl.max(tl.load(tops + c * KEPT + KEPT - 1, mask=c < PARTS, other=-float("inf")), axis=0)
    hidden = tl.maximum(hidden, lowest)
    temperature = tl.load(floats + sequence * 3)
    top_p, min_p = tl.load(floats + sequence * 3 + 1), tl.load(floats + sequence * 3 + 2)
    top_k = tl.load(integers + sequence * 3)
    limit = tl.full([], -3.4028234663852886e38, tl.float32)
    # Logits that are not finite end the reply in `best`; there is nothing to search.
    if (temperature > 0) & (tl.abs(highest) < float("inf")):
        rate = _LOG2E / temperature
        weight = tl.exp2((x - highest) * rate)
        by_k, by_p = (top_k > 0) & (top_k < VOCAB), top_p < 1
        count = tl.minimum(top_k, VOCAB).to(tl.float32)
        mass = tl.load(masses + row * PARTS + c, mask=c < PARTS, other=0.0)
        all = tl.sum(mass * tl.exp2((best - highest) * rate), axis=0)
        if by_k:
            limit = _quick_cut(x, tl.full([LIST], 1.0, tl.float32), hidden, highest, count)
            all = tl.sum(tl.where(x >= limit, weight, 0.0), axis=0)
        if by_p & ((limit > hidden) | (by_k == 0)):
            limit = _quick_cut(x, weight, tl.maximum(limit, hidden), highest, top_p * all)
        if (by_k | by_p) & (limit <= hidden):
            limit = tl.full([], -3.4028234663852886e38, tl.float32)
            if by_k:
                limit = _cut(logits, tops, limit, highest, rate, count, False, VOCAB, CHUNK, PARTS, KEPT)
            if by_p:
                limits_all = limit + tl.zeros([_WAYS], tl.float32)
                sums = _sums(logits, tops, limits_all, limit, highest, rate, True, VOCAB, CHUNK, PARTS, KEPT)
                target = top_p * tl.max(sums, axis=0)
                limit = _cut(logits, tops, limit, highest, rate, target, True, VOCAB, CHUNK, PARTS, KEPT)
        if min_p > 0:
            limit = tl.maximum(limit, highest + temperature * tl.log(min_p))
    tl.store(limits + row * 2, highest)
    tl.store(limits + row * 2 + 1, limit)


@triton.jit
def _mix(x):
    """splitmix64 behind its increment."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(low, high, position, ids):
    """Noise of ids: the integers of mimo_edge.decoding.sampling.gumbel, its logarithms in float32."""
    seed = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    key = _mix(_mix(seed + 0x9E3779B97F4A7C15) + position.to(tl.uint64) + 0x9E3779B97F4A7C15)
    bits = _mix(ids.to(tl.uint64) * 0x9E3779B97F4A7C15 + key) >> 12
    # u = (bits + 1/2) / 2**52. Near 1 its logarithm is taken from 1 - u, which float32 holds to full precision.
    small = bits < 2**51
    rest = tl.where(small, bits, 2**52 - 1 - bits).to(tl.float32)
    z = (rest + 0.5) * 2.0**-52
    y = tl.where(small, z, 1.0 - z)
    near = tl.where(y == 1.0, z, -tl.log(y) * (z / tl.where(y == 1.0, 1.0, 1.0 - y)))  # -log1p(-z), Kahan's way
    return -tl.log(tl.where(small, -tl.log(y), near))


@triton.jit
def perturb(
    logits, limits, positions, sequences, floats, integers, values, ids, first, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):
    """Grid [rows, PARTS]: each chunk's best (logit - highest) / temperature + noise behind positions[first + row]; NaN
    as above. At temperature 0 each chunk's best logit."""
    row, part = tl.program_id(0), tl.program_id(1)
    at = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * VOCAB + at, mask=at < VOCAB, other=-float("inf"))
    sequence = tl.load(sequences + row)
    temperature = tl.load(floats + sequence * 3)
    bad = x != x
    score = tl.where(bad, -float("inf"), x)
    if temperature > 0:
        highest, limit = tl.load(limits + row * 2), tl.load(limits + row * 2 + 1)
        low, high = tl.load(integers + sequence * 3 + 1), tl.load(integers + sequence * 3 + 2)
        noise = _gumbel(low, high, tl.load(positions + first + row) + 1, at)
        below = x - highest
        bad |= below != below  # the highest is infinite
        score = tl.where(score >= limit, below / temperature + noise, -float("inf"))
    _store_best(score, bad, at, values, ids, row * tl.num_programs(1) + part)


@triton.jit
def accept(tokens, sampled, positions, sequences, out, first, at, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Grid [sequences]: out [sequences, 2] = accepted drafts and the next token; a draft is the next row's token. Rows'
    tokens begin at tokens[first], their samples at sampled[at]."""
    sequence, t = tl.program_id(0), tl.arange(0, PADDED)
    used = tl.load(positions + t, mask=t < ROWS, other=-1) >= 0
    mine = used & (tl.load(sequences + t, mask=t < ROWS, other=-1) == sequence)
    rank = tl.cumsum(mine.to(tl.int32), axis=0) - 1
    token, choice = tl.load(tokens + first + t, mask=mine, other=-1), tl.load(sampled + at + t, mask=mine, other=-1)
    follows = mine[None, :] & (rank[None, :] == rank[:, None] + 1)
    holds = tl.sum((follows & (token[None, :] == choice[:, None])).to(tl.int32), axis=1) > 0
    count = tl.min(tl.where(mine & (holds == 0), rank, PADDED), axis=0)
    tl.store(out + sequence * 2, tl.where(count == PADDED, 0, count))
    tl.store(out + sequence * 2 + 1, tl.max(tl.where(mine & (rank == count), choice, -1), axis=0))
