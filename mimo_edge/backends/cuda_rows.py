"""Rows of keys and values between the pools on the device and the prefix cache (backends/base.py, RowCopies)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mimo_edge.backends import host_rows
from mimo_edge.backends.base import SequenceSlots
from mimo_edge.kernels.programs import ProgramSet
from mimo_edge.kv.layout import HEAD_ROWS, HIDDEN_ROWS, KvLayout


def pieces(
    programs: ProgramSet,
    layout: KvLayout,
    slots: SequenceSlots,
    kind: str,
    first: int,
    last: int,
    rows: NDArray[np.uint8],
) -> Iterator[tuple[str, int, NDArray[np.uint8]]]:
    """(pool, byte offset in it, part of `rows`) that hold positions [first, last) of the kind's layers, in the order of
    RowCopies. A part is contiguous on both sides."""
    stretches = _stretches(programs, layout, slots, kind, first, last)
    at = 0
    for name in _pools(layout, kind):
        b = programs.buffers[name]
        size = b.nbytes // b.shape[1]  # of a row
        for slot, row, count in stretches:
            yield name, slot * size, rows[at + row * size : at + (row + count) * size]
        at += (last - first) * size
    assert at == rows.nbytes, f"{rows.nbytes} bytes for rows of {at}"


def _pools(layout: KvLayout, kind: str) -> list[str]:
    if kind == HIDDEN_ROWS:
        return ["mtp.hidden"]
    if kind == HEAD_ROWS:
        layers = [f"mtp.{m}.layer" for m in range(layout.heads)]
    else:
        layers = [f"layers.{i}" for i, layer in enumerate(layout.spec.layers) if layer.attention == kind]
    return [f"{layer}.{part}" for layer in layers for part in ("k", "v")]


def _stretches(
    programs: ProgramSet, layout: KvLayout, slots: SequenceSlots, kind: str, first: int, last: int
) -> list[tuple[int, int, int]]:
    """(slot, row, count) as host_rows.runs gives them, neighbours joined; rings as long as the kernels have them."""
    joined: list[tuple[int, int, int]] = []
    for slot, row, count in host_rows.runs(replace(layout, rings=programs.rings), slots, kind, first, last):
        if joined and joined[-1][0] + joined[-1][2] == slot:
            begin, begin_row, before = joined.pop()
            joined.append((begin, begin_row, before + count))
        else:
            joined.append((slot, row, count))
    return joined
