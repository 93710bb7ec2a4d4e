"""WindowedAttention's prefill kernels in Triton's interpreter against its reference."""

import pytest
import torch
from attention_layer import SPECS, Layer, error
from launching import run

from mimo_edge.backends import oracle
from mimo_edge.kernels.windowed_attention import variants
from mimo_edge.spec import AttentionSpec

TINY = AttentionSpec(2, 1, 8, 8, 8, 1e4, 0.4, window=7, sinks=True)  # a ring of 10


def chunked(layer, qkv, chunks, padded=0):
    """y of all rows, in chunks behind each other, each padded to a multiple of `padded` rows."""
    y, n = [], 0
    for size in chunks:
        fill = -size % padded if padded else 0
        rows = torch.cat([qkv[n : n + size], torch.full((fill, qkv.shape[1]), torch.nan).half()])
        positions = [*range(n, n + size), *[-1] * fill]
        y.append(layer.prefill(rows, positions, [0] * (size + fill), [n])[:size])
        n += size
    return torch.cat(y)


@pytest.mark.parametrize("name", SPECS)
def test_chunks_equal_one_shot(name):
    qkv = Layer(SPECS[name], seed=1).rows(50)
    whole = chunked(Layer(SPECS[name], seed=1), qkv, [50])
    parts = chunked(Layer(SPECS[name], seed=1), qkv, [1, 16, 22, 11], padded=16)
    assert error(parts, whole) < 1e-3


@pytest.mark.parametrize("rows", [1, 6, 7, 8, 10, 23])
@pytest.mark.parametrize("length", [0, 1, 6, 7, 10, 28])
def test_window_edges(rows, length):
    layer = Layer(TINY, seed=length)
    layer.fill([length])
    layer.prefill(layer.rows(rows), range(length, length + rows), [0] * rows, [length])


@pytest.mark.parametrize("name", ["full", "odd-sizes", "window", "norms"])
def test_sequences_of_different_lengths(name):
    layer, lengths = Layer(SPECS[name], sequences=4, seed=2), [18, 0, 40, 71]
    layer.fill(lengths)
    sequences, positions = [], []
    for s, rows in ((2, 5), (0, 19), (1, 22)):  # sequence 3 has no rows
        sequences += [s] * rows
        positions += range(lengths[s], lengths[s] + rows)
    qkv = layer.rows(48)
    qkv[46:] = torch.nan
    layer.prefill(qkv, [*positions, -1, -1], [*sequences, 0, 3], lengths)


@pytest.mark.parametrize("name", ["full", "window"])
@pytest.mark.parametrize("held", [12, 33])
def test_rows_in_front_of_the_first_held_one_count_as_if_there_were_none(name, held):
    layer = Layer(SPECS[name], sequences=2, seed=8, held=[3, held])
    layer.fill([20, 33])
    layer.prefill(layer.rows(12), [*range(20, 29), 33, 34, -1], [0] * 9 + [1] * 3, [20, 33])


@pytest.mark.parametrize("block", [5, 32, 50])
def test_pages_of_any_size(block):
    layer = Layer(SPECS["full"], block=block, seed=3)
    layer.fill([12])
    layer.prefill(layer.rows(30), range(12, 42), [0] * 30, [12])


@pytest.mark.parametrize("accepted", [0, 1, 4, 12])
def test_only_accepted_rows_of_a_window_layer_are_stored(accepted):
    """What follows sees the accepted rows and the window in front of them, as if the others had never been."""
    layer, other = Layer(TINY, seed=4), Layer(TINY, seed=4)
    layer.fill([15])
    for name in ("k_pool", "v_pool"):
        other.t[name] = layer.t[name].clone()
    qkv, after = layer.rows(12), layer.rows(2)
    layer._given(qkv, range(15, 27), [0] * 12, [15])
    layer.run_prefill(qkv)
    layer.commit([accepted])
    if accepted:
        other.prefill(qkv[:accepted].contiguous(), range(15, 15 + accepted), [0] * accepted, [15])
    n = 15 + accepted
    assert torch.equal(layer.decode(after, [n, n + 1], [0, 0], [n]), other.decode(after, [n, n + 1], [0, 0], [n]))


def test_decode_continues_a_prefill():
    layer = Layer(SPECS["window"], seed=5)
    layer.prefill(layer.rows(44), range(44), [0] * 44, [0])
    layer.decode(layer.rows(3), range(44, 47), [0] * 3, [44])


def test_angles_are_those_of_float32_positions_also_far_out():
    a = AttentionSpec(1, 1, 64, 8, 64, 1e4, 1.0)
    positions = torch.tensor([0, 1, 1023, 131071, 1_048_575, -1], dtype=torch.int32)
    tensors = {
        "positions": positions,
        "frequencies": oracle.rope_frequencies(a).float(),
        "out": torch.full((6, 2, 32), torch.nan),
    }
    run(tensors, variants.rotation(6, a, positions="positions", frequencies="frequencies", out="out"))
    angles = (positions[:, None].float() * tensors["frequencies"]).double()
    for got, want in ((tensors["out"][:5, 0], angles.cos()), (tensors["out"][:5, 1], angles.sin())):
        assert (got - want[:5]).abs().max() < 2e-7
