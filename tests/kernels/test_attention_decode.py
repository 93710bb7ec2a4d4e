"""WindowedAttention's decode kernel in Triton's interpreter against its reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_layer import SMALL, SPECS, Layer, error

from mimo_edge.kernels.windowed_attention import variants
from mimo_edge.kernels.windowed_attention.variants import Pool
from mimo_edge.spec import AttentionSpec

TINY = AttentionSpec(2, 1, 8, 8, 8, 1e4, 0.4, window=7, sinks=True)  # a ring of 10


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("rows, length", [(1, 0), (4, 0), (1, 50), (4, 133)])
def test_one_sequence(name, rows, length):
    layer = Layer(SPECS[name], seed=length)
    layer.fill([length])
    layer.decode(layer.rows(rows), range(length, length + rows), [0] * rows, [length])


@pytest.mark.parametrize("length", [1, 5, 6, 7, 8, 9, 10, 11, 28, 1_000_003])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_window_edges(length, rows):
    layer = Layer(TINY, seed=length)
    layer.fill([length])
    layer.decode(layer.rows(rows), range(length, length + rows), [0] * rows, [length])


@pytest.mark.parametrize("name", ["full", "odd-sizes", "window", "norms"])
def test_sequences_of_different_lengths(name):
    """Rows of two sequences mixed, one sequence without rows, one that is empty, and padding."""
    layer, lengths = Layer(SPECS[name], sequences=4, seed=1), [37, 5, 0, 91]
    layer.fill(lengths)
    sequences, positions = [3, 0, 3, 2, 0, 3, 1, 3], [91, 37, 92, 0, 38, 93, -1, 94]
    qkv = layer.rows(8)
    qkv[6] = torch.nan
    layer.decode(qkv, positions, sequences, lengths)


@pytest.mark.parametrize("name", ["full", "window"])
def test_padding_gives_zeros_and_stores_nothing(name):
    layer = Layer(SPECS[name], seed=2)
    layer.fill([20])
    qkv = layer.rows(4)
    qkv[2:] = torch.nan
    layer.decode(qkv, [20, 21, -1, -1], [0] * 4, [20])
    layer.decode(qkv[2:].contiguous(), [-1, -1], [0, 0], [22])


@pytest.mark.parametrize("block", [3, 16, 32, 50])
def test_pages_of_any_size(block):
    """Smaller than a tile of keys, equal, larger and no multiple of it."""
    layer = Layer(SPECS["full"], block=block, seed=3)
    length = min(9 * block - 4, 100)
    layer.fill([length])
    layer.decode(layer.rows(4), range(length, length + 4), [0] * 4, [length])


@pytest.mark.parametrize("name", ["full", "window", "mimo-v2"])
def test_any_number_of_parts_gives_the_same(name):
    outputs = []
    for parts in (1, 2, 3, 16):
        layer = Layer(SPECS[name], seed=4, tuned=replace(SMALL, parts=parts))
        layer.fill([120])
        outputs.append(layer.decode(layer.rows(3), range(120, 123), [0] * 3, [120]))
    assert all(error(y, outputs[0]) < 1e-3 for y in outputs)


@pytest.mark.parametrize("name", ["full", "window", "norms"])
@pytest.mark.parametrize("held", [0, 12, 27, 33, 40])
def test_rows_in_front_of_the_first_held_one_count_as_if_there_were_none(name, held):
    """In front of the window, at its start, inside it; at and above the committed length nothing is left."""
    layer = Layer(SPECS[name], sequences=2, seed=8, held=[3, held])
    layer.fill([20, 33])
    layer.decode(layer.rows(5), [33, 34, 20, 35, -1], [1, 1, 0, 1, 1], [20, 33])


def test_rejected_rows_are_invisible_and_overwritten():
    layer, n, rng = Layer(TINY, seed=5), 0, np.random.default_rng(0)
    while n < 25:
        qkv = layer.rows(4)
        accepted = int(rng.integers(0, 5))
        qkv[accepted:] *= 100
        layer.decode(qkv, range(n, n + 4), [0] * 4, [n])
        n += accepted


@pytest.mark.parametrize("window", [1, 2, 6])
def test_a_huge_key_is_seen_at_distance_w_minus_1_and_not_at_w(window):
    a = AttentionSpec(2, 1, 8, 8, 8, 1e4, 0.5, window=window)
    huge, n = 2, 10

    def outputs(value):
        layer = Layer(a, seed=6)
        qkv = layer.rows(n)
        qkv[huge, a.q_rows :] *= value
        return torch.cat([layer.decode(qkv[i : i + 1].contiguous(), [i], [0], [i]) for i in range(n)])

    changed = (outputs(1.0) != outputs(100.0)).any(dim=1).tolist()
    assert changed == [huge <= t < huge + window for t in range(n)]


def test_a_row_is_the_same_alone_and_among_neighbours():
    """Other sequences change nothing at all; rows of one sequence change the cut into parts, so only rounding."""
    layer = Layer(SPECS["full"], sequences=2, seed=7)
    layer.fill([60, 33])
    qkv, pools = layer.rows(3), [layer.t[n].clone() for n in ("k_pool", "v_pool")]
    together = layer.decode(qkv, [60, 33, 61], [0, 1, 0], [60, 33])
    layer.t["k_pool"], layer.t["v_pool"] = pools
    alone = layer.decode(qkv[[1]], [33], [1], [60, 33])
    assert torch.equal(together[1], alone[0])


def test_more_rows_than_a_ring_has_room_for_are_refused():
    with pytest.raises(ValueError, match="5 rows overwrite visible keys in a ring of 10"):
        names = dict.fromkeys(("qkv", "rotation", "k_pool", "v_pool", "positions", "sequences", "lengths"), "x")
        variants.decode(5, TINY, Pool(1, 1, 10), 1e-6, **names, table="x", parts="x", counters="x", y="x")
