"""Error feedback and the search of ranges: less error on correlated inputs, and the stored layout's promises."""

import numpy as np
import pytest
import torch

from mimo_edge.errors import BadInputError
from mimo_edge.export.quantize import gptq, rtn
from mimo_edge.export.quantize.gptq import feedback
from mimo_edge.kernels.int4_linear.reference import dequantize, unpack
from mimo_edge.params import Param, stored
from mimo_edge.spec import TensorQuant

FORMATS = [TensorQuant(4, 32), TensorQuant(4, 64), TensorQuant(8, 128)]
IDS = [f"{q.bits}g{q.group}" for q in FORMATS]


def inputs(rows, k, rng, rank=None):
    """Correlated rows float64 [rows, k], of very different sizes a column; `rank` limits what they span."""
    mixed = rng.standard_normal((rows, rank or k)) @ rng.standard_normal((rank or k, k)) / k**0.5
    return torch.from_numpy(mixed * np.exp(rng.standard_normal(k)))


def value(parts, bits):
    return dequantize(*map(torch.from_numpy, parts), bits)


def loss(x, w, got):
    """Relative error of the outputs."""
    want = x @ torch.from_numpy(w).double().T
    return float((x @ got.double().T - want).norm() / want.norm())


@pytest.fixture
def rng():
    return np.random.default_rng()


@pytest.mark.parametrize("quant", FORMATS, ids=IDS)
@pytest.mark.parametrize("clip", [False, True])
def test_less_error_on_correlated_inputs(quant, clip, rng):
    x, fresh = (x for x in inputs(3000, 256, rng).split(1500))
    w = rng.standard_normal((70, 256)).astype(np.float32)
    how = feedback(x.T @ x, 0.01)
    got = value(gptq.quantize_rows(w, quant, "w", how, clip), quant.bits)
    plain = value(rtn.quantize_rows(w, quant), quant.bits)
    assert loss(x, w, got) < 0.8 * loss(x, w, plain)
    assert loss(fresh, w, got) < 0.85 * loss(fresh, w, plain)


@pytest.mark.parametrize("quant", FORMATS, ids=IDS)
def test_independent_inputs_change_no_rounding(quant, rng):
    """An identity Hessian: every weight takes the nearest level of its group's range."""
    w = rng.standard_normal((9, 256)).astype(np.float32)
    parts = gptq.quantize_rows(w, quant, "w", feedback(torch.eye(256, dtype=torch.float64), 0.0))
    steps = np.repeat(parts[1], quant.group, axis=1)
    assert (np.abs(value(parts, quant.bits).numpy() - w) <= 0.501 * steps).all()
    plain = value(rtn.quantize_rows(w, quant), quant.bits).numpy()
    assert np.linalg.norm(value(parts, quant.bits).numpy() - w) <= np.linalg.norm(plain - w) * (1 + 1e-6)


@pytest.mark.parametrize("quant", FORMATS, ids=IDS)
@pytest.mark.parametrize("clip", [False, True])
def test_the_stored_layout(quant, clip, rng):
    w = rng.standard_normal((5, 384)).astype(np.float32) + rng.normal(0, 2)
    x = inputs(500, 384, rng)
    parts = gptq.quantize_rows(w, quant, "w", feedback(x.T @ x, 0.01), clip)
    for part, tensor in zip(parts, stored(Param("w", w.shape, "ffn"), quant), strict=True):
        assert part.shape == tensor.shape and part.dtype == (np.uint8 if tensor.dtype == "U8" else np.float32)
    assert np.array_equal(parts[1], parts[1].astype(np.float16).astype(np.float32))
    groups = w.reshape(5, -1, quant.group)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    got = value(parts, quant.bits).numpy().reshape(groups.shape)
    slack = parts[1] * (1 + 0.11 * (1 << quant.bits))  # ranges may be widened a little, and the zero is rounded
    assert (got.min(-1) >= low - slack).all() and (got.max(-1) <= high + slack).all()


@pytest.mark.parametrize("quant", FORMATS, ids=IDS)
def test_ranges_hold_every_weight_unless_clipping_is_allowed(quant, rng):
    w = (rng.standard_t(2, (40, 256)) + rng.normal(0, 3)).astype(np.float32)  # heavy tails
    how = feedback(torch.eye(256, dtype=torch.float64), 0.01)

    def lowest_and_highest(clip):
        _, scales, zeros = gptq.quantize_rows(w, quant, "w", how, clip)
        zero = unpack(torch.from_numpy(zeros), quant.bits, scales.shape[1]).numpy().astype(np.float32)
        return -(zero + 0.501) * scales, ((1 << quant.bits) - 1 - zero + 0.501) * scales

    groups = w.reshape(40, -1, quant.group)
    low, high = lowest_and_highest(False)
    assert (low <= groups.min(-1)).all() and (high >= groups.max(-1)).all()
    if quant.bits == 4:
        low, high = lowest_and_highest(True)
        assert (low > groups.min(-1)).any() or (high < groups.max(-1)).any()


def test_groups_of_zeros_are_exact_and_inputs_never_seen_do_no_harm(rng):
    quant, x = TensorQuant(4, 32), inputs(300, 128, rng)
    x[:, 40:70] = 0
    w = rng.standard_normal((6, 128)).astype(np.float32)
    w[2], w[3, 32:64] = 0, 0
    got = value(gptq.quantize_rows(w, quant, "w", feedback(x.T @ x, 0.01)), 4)
    assert torch.isfinite(got).all() and not got[2].any()
    nothing = feedback(torch.zeros(128, 128, dtype=torch.float64), 0.01)
    parts = gptq.quantize_rows(w, quant, "w", nothing)
    assert np.abs(value(parts, 4).numpy() - w).max() <= 0.501 * parts[1].max() and not value(parts, 4)[3, 32:64].any()


def test_fewer_rows_than_columns(rng):
    x = inputs(50, 256, rng, rank=20)
    w = rng.standard_normal((30, 256)).astype(np.float32)
    got = value(gptq.quantize_rows(w, TensorQuant(4, 32), "w", feedback(x.T @ x, 0.01)), 4)
    assert loss(x, w, got) < 0.5 * loss(x, w, value(rtn.quantize_rows(w, TensorQuant(4, 32)), 4))


def test_rows_are_independent_of_chunks(rng, monkeypatch):
    x = inputs(500, 128, rng)
    w, how = rng.standard_normal((301, 128)).astype(np.float32), feedback(x.T @ x, 0.01)
    whole = gptq.quantize_rows(w, TensorQuant(4, 32), "w", how)
    monkeypatch.setattr(gptq, "_CHUNK", 128 * 37)
    cut = gptq.quantize_rows(w, TensorQuant(4, 32), "w", how)
    assert np.array_equal(whole[1], cut[1]) and np.array_equal(whole[2], cut[2])
    assert np.mean(whole[0] != cut[0]) < 1e-3  # sums of other shapes may round differently


def test_aiming_at_the_float_models_outputs(rng):
    """Inputs of the rounded model are off by a linear map and noise: aimed rows undo most of it."""
    seen = inputs(4000, 128, rng)
    other = seen @ torch.from_numpy(np.eye(128) + 0.03 * rng.standard_normal((128, 128)))
    w, quant = rng.standard_normal((50, 128)).astype(np.float32), TensorQuant(8, 32)
    want = seen @ torch.from_numpy(w).double().T
    error = {}
    for name, cross in (("aimed", seen.T @ other), ("not", None)):
        how = feedback(other.T @ other, 1e-4, cross)
        got = other @ value(gptq.quantize_rows(w, quant, "w", how), 8).double().T
        error[name] = float((got - want).norm() / want.norm())
    assert error["aimed"] < 0.3 * error["not"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_non_finite_weights(bad):
    w = np.ones((3, 64), np.float32)
    w[1, 7] = bad
    with pytest.raises(BadInputError, match=r"tensor layers\.3\.down holds NaN or Inf"):
        gptq.quantize_rows(w, TensorQuant(4, 32), "layers.3.down", feedback(torch.eye(64, dtype=torch.float64), 0.01))


def test_ranges_too_wide_and_rows_that_do_not_divide():
    how = feedback(torch.eye(64, dtype=torch.float64), 0.01)
    w = np.zeros((1, 64), np.float32)
    w[0, 3] = 1e6
    with pytest.raises(BadInputError, match=r"tensor x: a group spans 1e\+06"):
        gptq.quantize_rows(w, TensorQuant(4, 32), "x", how)
    with pytest.raises(BadInputError, match="tensor x: rows of 64 weights do not divide into groups of 128"):
        gptq.quantize_rows(w, TensorQuant(4, 128), "x", how)
