"""Launches that turn head logits into tokens, for a size. Plain Python: no Triton here.

Greedy:   chunk_best, unless the head emits such parts itself -> best
Sampling: chunk_top -> threshold -> perturb -> best
Drafts:   then accept

Repetition penalties are the host's: they depend on all tokens so far.
"""

from __future__ import annotations

import math

from mimo_edge.kernels.launch import Launch, Variant

CHUNK = 512  # logits of a chunk, a power of two
KEPT = 16  # logits of each chunk in which `threshold` searches first, a power of two


def parts(vocab: int) -> int:
    """Chunks of a row's vocabulary: the columns of `values` and `ids`."""
    return math.ceil(vocab / CHUNK)


def chunk_best(rows: int, vocab: int, *, logits: str, values: str, ids: str) -> Launch:
    """values fp32 and ids i32 [rows, parts]: each chunk's best of logits fp32 [rows, vocab], equals to the lowest id.

    A chunk that holds a NaN has value NaN.
    """
    types = {"logits": "*fp32", "values": "*fp32", "ids": "*i32"}
    variant = Variant("sampling.chunk_best", types, {"VOCAB": vocab, "CHUNK": CHUNK})
    return Launch(variant, (rows, parts(vocab), 1), {"logits": logits, "values": values, "ids": ids})


def best(rows: int, count: int, *, values: str, ids: str, tokens: str, first: int = 0) -> Launch:
    """tokens i32, `rows` of them from `first` on: the id of the best of `count` parts, the lowest among equals; -1 when
    it is not finite."""
    padded = max(16, 1 << (count - 1).bit_length())
    types = {"values": "*fp32", "ids": "*i32", "tokens": "*i32", "first": "i32"}
    variant = Variant(
        "sampling.best", types, {"PARTS": count, "PADDED": padded}, num_warps=min(8, max(1, padded // 128))
    )
    return Launch(variant, (rows, 1, 1), {"values": values, "ids": ids, "tokens": tokens, "first": first})


def chunk_top(rows: int, vocab: int, *, logits: str, sequences: str, floats: str, tops: str, masses: str) -> Launch:
    """tops fp32 [rows, parts, KEPT] and masses fp32 [rows, parts] for `threshold`; nothing at temperature 0."""
    types = dict.fromkeys(("logits", "sequences", "floats", "tops", "masses"), "*fp32") | {"sequences": "*i32"}
    variant = Variant("sampling.chunk_top", types, {"VOCAB": vocab, "CHUNK": CHUNK, "KEPT": KEPT})
    args = {"logits": logits, "sequences": sequences, "floats": floats, "tops": tops, "masses": masses}
    return Launch(variant, (rows, parts(vocab), 1), {**args})


def threshold(
    rows: int,
    vocab: int,
    *,
    logits: str,
    tops: str,
    masses: str,
    sequences: str,
    floats: str,
    integers: str,
    limits: str,
) -> Launch:
    """limits fp32 [rows, 2]: the highest logit, and the lowest that top-k, top-p and min-p leave.

    floats fp32 [B, 3] hold each sequence's temperature, top_p, min_p; integers i32 [B, 3] its top_k and the low and
    high word of its seed. sequences i32 [rows].
    """
    count = parts(vocab)
    types = {"logits": "*fp32", "tops": "*fp32", "masses": "*fp32", "sequences": "*i32", "floats": "*fp32"}
    types |= {"integers": "*i32", "limits": "*fp32"}
    padded = max(16, 1 << (count - 1).bit_length())
    constants = {"VOCAB": vocab, "CHUNK": CHUNK, "PARTS": count, "KEPT": KEPT, "PADDED": padded, "LIST": padded * KEPT}
    warps = 32 if padded * KEPT >= 8192 else 16  # 16 spill there
    variant = Variant("sampling.threshold", types, {**constants}, num_warps=warps)
    args = {"logits": logits, "tops": tops, "masses": masses, "sequences": sequences, "floats": floats}
    return Launch(variant, (rows, 1, 1), {**args, "integers": integers, "limits": limits})


def perturb(
    rows: int,
    vocab: int,
    *,
    logits: str,
    limits: str,
    positions: str,
    sequences: str,
    floats: str,
    integers: str,
    values: str,
    ids: str,
    first: int = 0,
) -> Launch:
    """values and ids [rows, parts]: each chunk's best score plus noise among the logits from the limit on.

    The noise is that of the position behind the row's, in positions i32 from `first` on. Temperature 0 takes logits as
    they are.
    """
    types = {"logits": "*fp32", "limits": "*fp32", "positions": "*i32", "sequences": "*i32", "floats": "*fp32"}
    types |= {"integers": "*i32", "values": "*fp32", "ids": "*i32", "first": "i32"}
    args = {"logits": logits, "limits": limits, "positions": positions, "sequences": sequences, "floats": floats}
    args |= {"integers": integers, "values": values, "ids": ids}
    variant = Variant("sampling.perturb", types, {"VOCAB": vocab, "CHUNK": CHUNK})
    return Launch(variant, (rows, parts(vocab), 1), {**args, "first": first})


def accept(
    rows: int,
    count: int,
    *,
    tokens: str,
    sampled: str,
    positions: str,
    sequences: str,
    out: str,
    first: int = 0,
    at: int = 0,
) -> Launch:
    """out i32 [count, 2], a sequence each: how many drafts hold, and the next token (-1: logits were not finite).

    tokens, sampled, positions, sequences i32 [rows]: a row's draft is the token of its sequence's next row. Those
    of `tokens` begin at `first`, of `sampled` at `at`.
    """
    types = dict.fromkeys(("tokens", "sampled", "positions", "sequences", "out"), "*i32")
    types |= {"first": "i32", "at": "i32"}
    padded = max(2, 1 << (rows - 1).bit_length())
    variant = Variant("sampling.accept", types, {"ROWS": rows, "PADDED": padded}, num_warps=1)
    args = {"tokens": tokens, "sampled": sampled, "positions": positions, "sequences": sequences, "out": out}
    return Launch(variant, (count, 1, 1), {**args, "first": first, "at": at})
