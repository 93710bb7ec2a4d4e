"""The arithmetic of windows and rings. Pure functions of integers; everything else calls these.

One definition: a window of W means that a query at position q sees keys max(0, q-W+1) .. q, itself included.
A ring of R slots keeps position p at slot p mod R.

    committed length n, ring after rows up to e were written (e >= n when drafts were rejected):

        e-R                n-W+1            n-1   n          e-1
         |------ dead ------|---- window ----|     |- stale --|
         every slot holds exactly one of these R positions; stale ones are invisible and overwritten next
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ring_slots(window: int, drafts: int, context: int) -> int:
    """R: the last W-1 keys plus the K+1 rows of a verification step, capped at the context.

    Smallest that is exact for any accepted count (brute-forced in tests/kv/test_windows.py).
    """
    return min(context, window - 1 + drafts + 1)


def first_visible(query: int, window: int | None) -> int:
    """Oldest position that the query sees."""
    return 0 if window is None else max(0, query - window + 1)


def ring_positions(committed: int, ring: int) -> NDArray[np.int64]:
    """Position held by each slot of a ring, int64 [min(committed, ring)]: the newest p < committed with p mod R = slot.

    Slots at and above `committed` were never written; they are left out.
    """
    slots = np.arange(min(committed, ring), dtype=np.int64)
    return slots + (committed - 1 - slots) // ring * ring


def past_mask(queries: NDArray[np.int64], keys: NDArray[np.int64], window: int | None) -> NDArray[np.bool_]:
    """Whether query i sees key j, bool [len(queries), len(keys)], both given as positions."""
    q, k = queries[:, None], keys[None, :]
    seen = k <= q
    return seen if window is None else seen & (k > q - window)


def can_truncate(committed: int, highest: int, target: int, window: int, ring: int) -> bool:
    """Whether a ring can go back to `target` committed rows; `highest` is the end of all rows ever written.

    The next query sits at `target`: the rows of its window must be among the newest `ring` rows that were written.
    """
    if not 0 <= target <= committed:
        return False
    oldest = first_visible(target, window)
    return oldest >= target or oldest >= highest - ring
