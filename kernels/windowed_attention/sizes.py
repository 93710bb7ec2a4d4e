"""Sizes and constants that launches of decode and prefill share. Plain Python: no Triton here."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mimo_edge.kernels.launch import Launch, Value, Variant
from mimo_edge.spec import AttentionSpec

INDICES = {"positions": "*i32", "sequences": "*i32", "lengths": "*i32", "table": "*i32"}
_TILE_BYTES = 96 * 1024  # keys and values of all stages: well below 163 KiB together with everything else


@dataclass(frozen=True)
class Pool:
    """How a layer's keys and values are kept: `blocks` blocks of `block` slots a sequence. A ring is one block.

    A ring must hold window - 1 + MAX_DRAFTS + 1 slots, or the whole context: decode overwrites what no row sees.
    """

    sequences: int
    blocks: int
    block: int


@dataclass(frozen=True)
class Tuning:
    """`programs`: about how many thread blocks keep the device busy. `keys`: of a tile, fewer where heads are large.

    `parts` is the most parts that a sequence's keys are cut into.
    """

    programs: int = 132
    keys: int = 64
    warps: int = 4
    stages: int = 3
    parts: int = 16
    prefill_queries: int = 64
    prefill_keys: int = 64
    prefill_warps: int = 4
    prefill_stages: int = 2


DEFAULT = Tuning()


def attention(a: AttentionSpec) -> dict[str, Value]:
    return {
        "KV_HEADS": a.kv_heads,
        "GROUP": group(a),
        "D": a.head_dim,
        "DV": a.v_head_dim,
        "WINDOW": a.window or 0,
        "SCALE": a.scale,
        "SINKS": a.sinks,
    }


def blocks(pool: Pool, keys: int) -> dict[str, Value]:
    whole = pool.blocks > 1 and pool.block % keys == 0
    return {"BLOCK": pool.block, "BLOCKS": pool.blocks, "KEYS": keys, "WHOLE": whole}


def group(a: AttentionSpec) -> int:
    return a.heads // a.kv_heads


def keys_of(a: AttentionSpec, wanted: int, stages: int) -> int:
    """Keys of a tile: a power of two from 16 on, so that the tiles of all stages fit into shared memory."""
    row = 2 * (power(a.head_dim) + power(a.v_head_dim)) * stages
    return max(16, min(wanted, 2 ** int(math.log2(_TILE_BYTES / row))))


def power(n: int, least: int = 16) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def launch(variant: Variant, grid: tuple[int, int, int], **args: str) -> Launch:
    return Launch(variant, grid, {**args})
