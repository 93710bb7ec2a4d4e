"""Round to nearest: each group on its own, asymmetric over its true range. Stored as `mimo_edge.params.stored` says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mimo_edge.errors import BadInputError
from mimo_edge.spec import TensorQuant

GROUPS = (32, 64, 128)
_CHUNK = 1 << 19  # weights handled at once: temporaries that stay in the cache make it three times as fast
_LARGEST_SCALE = float(np.finfo(np.float16).max)

Quantized = tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]  # q, scales, zeros


def check_group(name: str, k: int, group: int) -> None:
    """Raises BadInputError if rows of `k` weights do not divide into groups of `group`."""
    if k % group:
        fitting = [str(g) for g in GROUPS if k % g == 0]
        allowed = f"groups of {' or '.join(fitting)} would" if fitting else "no group would, so keep this kind in float"
        raise BadInputError(f"tensor {name}: rows of {k} weights do not divide into groups of {group} ({allowed})")


def quantize_rows(w: NDArray[np.float32], quant: TensorQuant, name: str = "weights") -> Quantized:
    """w float32 [n, K] -> q uint8 [n, K/G, G*bits/8], scales float32 [n, K/G], zeros uint8 [n, ceil(K/G*bits/8)].

    The range of a group is extended to include 0, so that the zero is one of the levels; no weight is clipped, and
    |w - dequantised| <= scale/2. Scales are rounded up to a float16 value. A group of zeros gets scale 0.

    Raises BadInputError, naming the tensor, on NaN or Inf, when K does not divide, and on a range too wide for float16.
    """
    n, k = w.shape
    check_group(name, k, quant.group)
    groups = k // quant.group
    q = np.empty((n, groups, quant.group * quant.bits // 8), np.uint8)
    scales = np.empty((n, groups), np.float32)
    zeros = np.empty((n, -(-groups * quant.bits // 8)), np.uint8)
    step = max(1, _CHUNK // k)
    for at in range(0, n, step):
        rows = slice(at, at + step)
        blocks = w[rows].reshape(-1, groups, quant.group)
        scales[rows], zero = _scales_and_zeros(blocks, quant.bits, name)
        levels = _levels(blocks, scales[rows], zero, quant.bits)
        q[rows], zeros[rows] = pack(levels, quant.bits), pack(zero.astype(np.uint8), quant.bits)
    return q, scales, zeros


def pack(values: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """uint8 [..., count] -> uint8 [..., ceil(count*bits/8)] along the last axis, low nibble first, padded with 0."""
    if bits == 8:
        return values
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros_like(values[..., :1])], axis=-1)
    return np.bitwise_or(values[..., 0::2], values[..., 1::2] << 4, dtype=np.uint8)


def _scales_and_zeros(blocks: NDArray[np.float32], bits: int, name: str) -> tuple[NDArray, NDArray]:
    low = np.minimum(blocks.min(axis=-1), 0.0).astype(np.float64)
    high = np.maximum(blocks.max(axis=-1), 0.0).astype(np.float64)
    if not (np.isfinite(low).all() and np.isfinite(high).all()):  # min and max pass NaN on
        raise BadInputError(f"tensor {name} holds NaN or Inf: the checkpoint is damaged, get it again")
    exact = (high - low) / ((1 << bits) - 1)
    if exact.max(initial=0.0) > _LARGEST_SCALE:
        raise BadInputError(
            f"tensor {name}: a group spans {(high - low).max():.3g}, more than {bits} bits with a float16 scale hold "
            f"({_LARGEST_SCALE * ((1 << bits) - 1):.3g}): keep this kind in float"
        )
    scales = _round_up_float16(exact)
    zero = np.rint(np.divide(-low, scales, out=np.zeros_like(low), where=scales > 0))
    return scales.astype(np.float32), zero.astype(np.float32)


def _round_up_float16(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rounded up, because a scale below range/levels would clip the group's outlier."""
    half = values.astype(np.float16)
    return np.where(half < values, np.nextafter(half, np.float16(np.inf)), half).astype(np.float64)


def _levels(blocks: NDArray[np.float32], scales: NDArray, zero: NDArray, bits: int) -> NDArray[np.uint8]:
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales > 0)
    levels = blocks * inverse[..., None]
    levels += zero[..., None]
    np.rint(levels, out=levels)
    return np.clip(levels, 0, (1 << bits) - 1, out=levels).astype(np.uint8)
