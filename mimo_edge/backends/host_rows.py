"""Where rows lie in pools in this process's memory, and copies from and to the prefix cache; shared by CPU backends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mimo_edge.kv.layout import KvLayout, SequenceSlots

Pools = Sequence[tuple[NDArray, ...]]  # of each layer: keys and values [slots, ...], or hidden states


def capacity(layout: KvLayout, kind: str) -> int:
    """Slots of a pool of `kind`."""
    return layout.sequences * layout.rings[kind] if kind in layout.rings else layout.pages * layout.page_size


def addresses(layout: KvLayout, slots: SequenceSlots, kind: str, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The slots that hold `positions`."""
    ring, size = layout.rings.get(kind), layout.page_size
    if ring is not None:
        return slots.ring * ring + positions % ring
    return np.array(slots.pages, dtype=np.int64)[positions // size] * size + positions % size


def runs(layout: KvLayout, slots: SequenceSlots, kind: str, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """(slot, row, count) of the contiguous stretches that hold positions [first, last), row 0 being `first`."""
    ring, size = layout.rings.get(kind), layout.page_size
    position = first
    while position < last:
        if ring is not None:
            slot, room = slots.ring * ring + position % ring, ring - position % ring
        else:
            slot, room = slots.pages[position // size] * size + position % size, size - position % size
        count = min(room, last - position)
        yield slot, position - first, count
        position += count


def read(
    pools: Pools, layout: KvLayout, slots: SequenceSlots, kind: str, first: int, last: int, out: NDArray[np.uint8]
) -> None:
    """RowCopies.read_rows from the pools of `kind`."""
    stretches = list(runs(layout, slots, kind, first, last))
    for pool, block in _blocks(pools, stretches, out):
        for slot, row, count in stretches:
            block[row : row + count] = pool[slot : slot + count]


def write(
    pools: Pools, layout: KvLayout, slots: SequenceSlots, kind: str, first: int, last: int, rows: NDArray[np.uint8]
) -> None:
    """RowCopies.write_rows into the pools of `kind`."""
    stretches = list(runs(layout, slots, kind, first, last))
    for pool, block in _blocks(pools, stretches, rows):
        for slot, row, count in stretches:
            pool[slot : slot + count] = block[row : row + count]


def _blocks(
    pools: Pools, stretches: Sequence[tuple[int, int, int]], rows: NDArray[np.uint8]
) -> Iterator[tuple[NDArray, NDArray]]:
    """Each pool with its part of `rows`, as backends/base.py orders them."""
    count, at = sum(n for _, _, n in stretches), 0
    for pool in (pool for layer in pools for pool in layer):
        shape = (count, *pool.shape[1:])
        end = at + int(np.prod(shape)) * pool.itemsize
        yield pool, rows[at:end].view(pool.dtype).reshape(shape)
        at = end
    assert at == rows.nbytes, f"{rows.nbytes} bytes for rows of {at}"
