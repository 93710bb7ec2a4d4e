"""The reserved block: pieces never overlap, come back whole, and what does not fit is allocated."""

import random

import numpy as np

from mimo_edge.kv.buffers import ALIGN, Buffers


def test_random_use_never_overlaps_and_returns_to_one_piece():
    r, buffers, live = random.Random(1), Buffers(100_000), {}
    for i in range(3000):
        if live and r.random() < 0.5:
            key = r.choice(list(live))
            rows = live.pop(key)
            assert (rows == key % 251).all(), "somebody else wrote here"
            buffers.give(rows)
        else:
            live[i] = buffers.take(r.randint(0, 9000))
            live[i][:] = i % 251
        inside = [a for a in live.values() if a.base is buffers._block and a.nbytes]
        assert buffers.free_bytes == 100_000 // ALIGN * ALIGN - sum(-(-a.nbytes // ALIGN) * ALIGN for a in inside)
    for rows in live.values():
        buffers.give(rows)
    assert buffers._free == [(0, 100_000 // ALIGN * ALIGN)]


def test_what_does_not_fit_is_allocated_and_not_taken_back():
    buffers = Buffers(1024)
    a, b = buffers.take(1000), buffers.take(1000)
    assert a.base is buffers._block and b.base is None and buffers.free_bytes == 0
    for rows in (b, None, np.zeros(5, np.uint8), a):
        buffers.give(rows)
    assert buffers.free_bytes == 1024


def test_nothing_is_reserved_unless_asked_for():
    buffers = Buffers()
    buffers.give(buffers.take(10))
    assert buffers.free_bytes == 0
