"""SparseFfn's reference: equal to a dense feed-forward that is masked, whatever the other rows keep."""

import pytest
import torch
import torch.nn.functional as F

from mimo_edge.export.quantize.rtn import quantize_rows
from mimo_edge.kernels.int4_linear.reference import dequantize
from mimo_edge.kernels.sparse_ffn.reference import sparse_ffn
from mimo_edge.spec import TensorQuant

BLOCK, BLOCKS, HIDDEN = 16, 6, 64


def packed(n, k, bits, g):
    w = torch.randn(n, k, generator=g).numpy()
    return tuple(torch.from_numpy(part) for part in quantize_rows(w, TensorQuant(bits, 32)))


def case(bits, rows=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    gate_up, down = packed(2 * BLOCK * BLOCKS, HIDDEN, bits, g), packed(HIDDEN, BLOCK * BLOCKS, bits, g)
    keep = (torch.rand(rows, BLOCKS, generator=g) < 0.5).float()
    return torch.randn(rows, HIDDEN, generator=g), keep, gate_up, down


def error(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_equals_a_masked_dense_feed_forward(bits, activation):
    x, keep, gate_up, down = case(bits)
    weights, act = dequantize(*gate_up, bits), {"silu": F.silu, "gelu_tanh": lambda t: F.gelu(t, approximate="tanh")}
    want = torch.zeros(len(x), HIDDEN)
    for row in range(len(x)):
        for block in range(BLOCKS):
            if keep[row, block]:
                at = slice(block * BLOCK, (block + 1) * BLOCK)
                gate, up = weights[: BLOCK * BLOCKS][at] @ x[row], weights[BLOCK * BLOCKS :][at] @ x[row]
                want[row] += dequantize(*down, bits)[:, at] @ (act[activation](gate) * up)
    assert error(sparse_ffn(x, keep, gate_up, down, bits, activation), want) < 1e-5


def test_a_row_depends_on_its_own_mask_alone():
    x, keep, gate_up, down = case(4)
    got = sparse_ffn(x, keep, gate_up, down, 4, "silu")
    for row in range(len(x)):
        alone = sparse_ffn(x[row : row + 1], keep[row : row + 1], gate_up, down, 4, "silu")
        assert error(got[row : row + 1], alone) < 1e-5


def test_a_block_that_is_not_kept_may_hold_anything():
    x, keep, (q, scales, zeros), down = case(4)
    keep[:, 2] = 0
    want = sparse_ffn(x, keep, (q, scales, zeros), down, 4, "silu")
    scales = scales.clone()
    scales[2 * BLOCK : 3 * BLOCK] = torch.nan
    assert torch.equal(sparse_ffn(x, keep, (q, scales, zeros), down, 4, "silu"), want)
