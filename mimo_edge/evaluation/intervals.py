"""Bootstrap intervals over samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

DRAWS = 2000
LEVEL = 0.95
_CELLS = 4_000_000  # random numbers held at a time


def interval(numerators: ArrayLike, denominators: ArrayLike | None = None, seed: int = 0) -> tuple[float, float]:
    """LEVEL interval of a mean [n], or of a ratio of sums, by resampling the n samples; the same for the same seed."""
    top = np.asarray(numerators, np.float64)
    bottom = np.ones_like(top) if denominators is None else np.asarray(denominators, np.float64)
    low, high = np.quantile(_ratios(top, bottom, seed), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _ratios(top: NDArray[np.float64], bottom: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """DRAWS ratios of sums. How often a draw picks each distinct sample is multinomial, which is quick where many are
    equal (right or wrong); otherwise samples are picked one by one."""
    rng, n = np.random.default_rng(seed), len(top)
    distinct, times = np.unique(np.stack([top, bottom], 1), axis=0, return_counts=True)
    if 4 * len(distinct) <= n:
        sums = rng.multinomial(n, times / n, size=DRAWS) @ distinct
        return sums[:, 0] / sums[:, 1]
    size = max(1, _CELLS // n)
    parts = []
    for start in range(0, DRAWS, size):
        picks = rng.integers(n, size=(min(size, DRAWS - start), n))
        parts.append(top[picks].sum(1) / bottom[picks].sum(1))
    return np.concatenate(parts)
