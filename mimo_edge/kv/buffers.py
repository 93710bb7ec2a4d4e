"""Memory for copied rows, part of it taken at the start so that nothing needs to be allocated later."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ALIGN = 64


class Buffers:
    """Hands out pieces of one reserved block, first fit; what does not fit there is allocated as usual."""

    def __init__(self, reserve: int = 0):
        self._block = np.zeros(reserve // ALIGN * ALIGN, np.uint8)
        self._block[::4096] = 0  # the system commits a page when it is first written
        self._free = [(0, len(self._block))] if len(self._block) else []  # (start, end), ascending, never adjacent

    @property
    def free_bytes(self) -> int:
        """What is left of the reserved block."""
        return sum(end - start for start, end in self._free)

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Uninitialised."""
        size = -(-nbytes // ALIGN) * ALIGN
        for i, (start, end) in enumerate(self._free):
            if end - start >= size > 0:
                self._free[i : i + 1] = [(start + size, end)] if end - start > size else []
                return self._block[start : start + nbytes]
        return np.empty(nbytes, np.uint8)

    def adopt(self, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Rows that came from elsewhere: a copy in the block, if there is one."""
        if not len(self._block):
            return rows
        copy = self.take(rows.nbytes)
        copy[:] = rows
        return copy

    def give(self, rows: NDArray[np.uint8] | None) -> None:
        """Takes a buffer back, which nobody may use any more; None, and what is not from the block, is ignored."""
        if rows is None or rows.base is not self._block:
            return
        start = rows.ctypes.data - self._block.ctypes.data
        end = start + -(-rows.nbytes // ALIGN) * ALIGN
        at = next((i for i, (first, _) in enumerate(self._free) if first > start), len(self._free))
        self._free.insert(at, (start, end))
        for i in (at, at - 1):  # joins with what follows, then with what precedes
            if 0 <= i < len(self._free) - 1 and self._free[i][1] == self._free[i + 1][0]:
                self._free[i : i + 2] = [(self._free[i][0], self._free[i + 1][1])]
