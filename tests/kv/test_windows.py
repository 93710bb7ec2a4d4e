"""The window arithmetic against brute force: a ring that is really written, row by row."""

import numpy as np
import pytest

from mimo_edge.kv.windows import can_truncate, first_visible, past_mask, ring_positions, ring_slots

WINDOWS = [1, 2, 3, 5, 8]


class WrittenRing:
    """Remembers which position was last written to each slot."""

    def __init__(self, slots: int):
        self.slots = slots
        self.held = np.full(slots, -1)

    def write(self, positions) -> None:
        for p in positions:
            self.held[p % self.slots] = p

    def has(self, first: int, stop: int) -> bool:
        return all(self.held[p % self.slots] == p for p in range(first, stop))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_ring_is_exact_for_every_acceptance_and_one_slot_less_is_not(window, drafts):
    def survives(slots: int) -> bool:
        rng = np.random.default_rng(window * 10 + drafts)
        for _ in range(30):
            ring, n = WrittenRing(slots), 0
            while n < 6 * window + 20:
                rows = drafts + 1
                ring.write(range(n, n + rows))  # a verification step writes K+1 rows, then each row attends
                if not all(ring.has(first_visible(q, window), q + 1) for q in range(n, n + rows)):
                    return False
                n += int(rng.integers(0, rows + 1))
        return True

    r = ring_slots(window, drafts, context=10_000)
    assert r == window + drafts
    assert survives(r)
    if drafts + window > 1:
        assert not survives(r - 1)


def test_ring_is_capped_at_the_context():
    assert ring_slots(window=512, drafts=3, context=100) == 100


@pytest.mark.parametrize("ring", [1, 3, 8])
@pytest.mark.parametrize("committed", [0, 1, 2, 3, 7, 8, 9, 31])
def test_ring_positions_are_what_was_written(ring, committed):
    written = WrittenRing(ring)
    written.write(range(committed))
    assert ring_positions(committed, ring).tolist() == written.held[: min(committed, ring)].tolist()


@pytest.mark.parametrize("window", [None, *WINDOWS])
def test_mask_counts_w_keys_including_the_query(window):
    keys = np.arange(20)
    seen = past_mask(np.array([11]), keys, window)[0]
    assert seen.sum() == (12 if window is None else window)
    assert seen[11] and not seen[12:].any()
    assert keys[seen][0] == first_visible(11, window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("context", [12, 1000])
def test_truncation_is_allowed_exactly_when_the_window_is_still_there(window, drafts, context):
    slots = ring_slots(window, drafts, context)
    for highest in range(min(context, 4 * window + 12) + 1):
        ring = WrittenRing(slots)
        ring.write(range(highest))
        for target in range(highest + 1):
            allowed = can_truncate(highest, highest, target, window, slots)
            assert allowed == ring.has(first_visible(target, window), target), (highest, target)


def test_truncation_cannot_go_forward_or_below_zero():
    assert not can_truncate(5, 5, 6, 4, 7)
    assert not can_truncate(5, 5, -1, 4, 7)
