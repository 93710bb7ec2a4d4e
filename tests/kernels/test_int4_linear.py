"""The layout spelled out weight by weight, and the product against it."""

import numpy as np
import pytest
import torch

from mimo_edge.kernels.int4_linear.reference import dequantize, int4_linear, unpack


def random_stored(rng, n, groups, group, bits):
    q = rng.integers(0, 256, (n, groups, group * bits // 8), dtype=np.uint8)
    zeros = rng.integers(0, 256, (n, -(-groups * bits // 8)), dtype=np.uint8)
    scales = rng.uniform(-2, 2, (n, groups)).astype(np.float16).astype(np.float32)
    return torch.from_numpy(q), torch.from_numpy(scales), torch.from_numpy(zeros)


def weight(q, scales, zeros, bits, row, k):
    """One weight, in Python's own integers and exact floats."""

    def value(packed, i):
        return int(packed[i]) if bits == 8 else int(packed[i // 2]) >> 4 * (i % 2) & 15

    group = q.shape[2] * 8 // bits
    g, i = divmod(k, group)
    return (value(q[row, g], i) - value(zeros[row], g)) * float(scales[row, g])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "groups", "group"), [(1, 1, 32), (3, 5, 32), (7, 3, 64), (2, 2, 128)])
def test_dequantize_is_exact(bits, n, groups, group):
    stored = random_stored(np.random.default_rng(), n, groups, group, bits)
    w = dequantize(*stored, bits)
    assert w.shape == (n, groups * group) and w.dtype == torch.float32
    expected = [[weight(*stored, bits, row, k) for k in range(groups * group)] for row in range(n)]
    assert torch.equal(w.double(), torch.tensor(expected, dtype=torch.float64))


def test_unpack_takes_the_low_nibble_first():
    packed = torch.tensor([[0x21, 0x43, 0xF5]], dtype=torch.uint8)
    assert unpack(packed, 4, 5).tolist() == [[1, 2, 3, 4, 5]]
    assert unpack(packed, 4, 6).tolist() == [[1, 2, 3, 4, 5, 15]]
    assert unpack(packed, 8, 2).tolist() == [[0x21, 0x43]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 5])
def test_product(bits, rows):
    rng = np.random.default_rng()
    stored = random_stored(rng, 9, 3, 32, bits)
    x, bias = (torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in ((rows, 96), (9,)))
    w = np.array([[weight(*stored, bits, row, k) for k in range(96)] for row in range(9)])
    expected = x.numpy().astype(np.float64) @ w.T
    for y, reference in (
        (int4_linear(x, *stored, bits), expected),
        (int4_linear(x, *stored, bits, bias), expected + bias.numpy()),
    ):
        assert y.shape == (rows, 9)
        assert np.linalg.norm(y.numpy() - reference) <= 1e-5 * np.linalg.norm(reference)
