"""What a gate may cost, and which feed-forwards can have one."""

from __future__ import annotations

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.spec import GateSpec, ModelSpec

BLOCKS = (16, 32, 64)
BUDGET = 0.05  # of the feed-forward's bytes in 4 bits
_BYTES_A_WEIGHT = 0.5 + 2.5 / 128  # 4 bits, and a float16 scale and a 4-bit zero for 128 of them: the leanest layout
_LARGEST_RANK = 256


def gate_share(hidden: int, intermediate: int, gate: GateSpec) -> float:
    """Bytes of a gate, stored in float32, over bytes of its feed-forward in 4 bits and groups of 128."""
    blocks = intermediate // gate.block
    return 4 * (gate.rank * (hidden + blocks) + blocks) / (3 * hidden * intermediate * _BYTES_A_WEIGHT)


def gate_spec(spec: ModelSpec, block: int) -> GateSpec:
    """The gate of the largest rank that keeps every layer within BUDGET (a multiple of 8 where there is room).

    Raises BadInputError for a block that is not one of BLOCKS, UnsupportedError for a layer that cannot have a gate:
    experts, a size that is no multiple of the block, too small, or gated already.
    """
    if block not in BLOCKS:
        raise BadInputError(f"gates: blocks of {block} channels (allowed: {', '.join(map(str, BLOCKS))})")
    for i, layer in enumerate(spec.layers):
        f = spec.ffn[layer.ffn]
        if f.moe:
            raise UnsupportedError(
                f"gates: layer {i} has a mixture of experts, which skips work by itself: leave gates out"
            )
        if f.gate:
            raise UnsupportedError(f"gates: layer {i} has a gate already (blocks of {f.gate.block}): leave gates out")
        if f.intermediate % block:
            fitting = [str(b) for b in BLOCKS if f.intermediate % b == 0]
            hint = f"use blocks of {' or '.join(fitting)}" if fitting else "no block size fits: leave gates out"
            raise UnsupportedError(f"gates: layer {i} has {f.intermediate} channels, no multiple of {block}: {hint}")
    sizes = {spec.ffn[layer.ffn].intermediate for layer in spec.layers}
    fitting_ranks = [r for r in range(1, _LARGEST_RANK + 1) if all(_fits(spec.hidden_size, n, block, r) for n in sizes)]
    if not fitting_ranks:
        raise UnsupportedError(
            f"gates: a feed-forward of {spec.hidden_size} x {min(sizes)} is too small for a gate within {BUDGET:.0%} "
            "of its bytes: leave gates out"
        )
    rank = fitting_ranks[-1]
    return GateSpec(block, rank if rank < 8 else rank // 8 * 8)


def _fits(hidden: int, intermediate: int, block: int, rank: int) -> bool:
    return gate_share(hidden, intermediate, GateSpec(block, rank)) < BUDGET
