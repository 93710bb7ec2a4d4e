"""The norm kernels in Triton's interpreter against their reference."""

import pytest
import torch
from launching import run

from mimo_edge.kernels.norm import variants
from mimo_edge.kernels.norm.reference import add_norm, rms_norm


def given(rows, n, scale):
    g = torch.Generator().manual_seed(rows * n)
    x, w = scale * torch.randn(rows, n, generator=g), torch.randn(n, generator=g)
    y = (torch.randn(rows, n, generator=g) * scale).half()
    # what lies behind the rows must not be read: it is NaN
    padded = {
        "x": torch.cat([x, torch.full((1, n), torch.nan)]),
        "y": torch.cat([y, torch.full((1, n), torch.nan).half()]),
    }
    return {"w": w, **padded}


@pytest.mark.parametrize("rows, n", [(1, 64), (3, 100), (8, 1152), (2, 3584)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_rms_norm(rows, n, scale):
    tensors = given(rows, n, scale)
    want = rms_norm(tensors["x"][:rows], tensors["w"], 1e-6)
    run(tensors, variants.rms_norm(rows, n, 1e-6, x="x", w="w", y="y"))
    assert (tensors["y"][:rows].float() - want).norm() < 1e-3 * want.norm()
    assert tensors["y"][rows].isnan().all()


@pytest.mark.parametrize("rows, n", [(1, 64), (3, 100), (4, 640)])
def test_add_norm(rows, n):
    tensors = given(rows, n, 2.0)
    want = add_norm(tensors["x"][:rows], tensors["y"][:rows], tensors["w"], 1e-5)
    run(tensors, variants.add_norm(rows, n, 1e-5, y="y", w="w", x="x"))
    assert (tensors["x"][:rows] - want).norm() < 1e-6 * want.norm()
    assert tensors["x"][rows].isnan().all()


def test_a_row_of_zeros_stays_zero():
    tensors = {"x": torch.zeros(1, 40), "w": torch.ones(40), "y": torch.full((1, 40), torch.nan).half()}
    run(tensors, variants.rms_norm(1, 40, 1e-6, x="x", w="w", y="y"))
    assert not tensors["y"].any()
