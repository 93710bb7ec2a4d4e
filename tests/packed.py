"""Random quantised matrices, as bundles store them and as kernels read them."""

from dataclasses import dataclass

import numpy as np
import torch

from mimo_edge.kernels.int4_linear import layout
from mimo_edge.kernels.int4_linear.reference import int4_linear
from mimo_edge.spec import TensorQuant


@dataclass
class Matrix:
    """q, scales, zeros as `params.stored`."""

    q: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    quant: TensorQuant
    stacked: int = 1

    @property
    def parts(self):
        return self.q, self.scales, self.zeros

    def buffers(self, name):
        """The device buffers NAME.q, NAME.scales, NAME.zeros."""
        each = len(self.q) // self.stacked
        packed = [
            layout.pack(*(p[i : i + each] for p in self.parts), self.quant.bits) for i in range(0, len(self.q), each)
        ]
        return {
            f"{name}.{part}": torch.from_numpy(np.concatenate([getattr(p, part) for p in packed]))
            for part in ("q", "scales", "zeros")
        }

    def product(self, x):
        return int4_linear(x.float(), *map(torch.from_numpy, self.parts), self.quant.bits)


def random_matrix(n, k, group, bits, stacked=1):
    """All levels and zeros occur; scales are float16 values."""
    rng = np.random.default_rng()
    groups = k // group
    return Matrix(
        rng.integers(0, 256, (n, groups, group * bits // 8), dtype=np.uint8),
        (rng.uniform(0.01, 1, (n, groups)) / 2**bits).astype(np.float16).astype(np.float32),
        rng.integers(0, 256, (n, -(-groups * bits // 8)), dtype=np.uint8),
        TensorQuant(bits, group),
        stacked,
    )


def close(got, want, bound):
    """Relative error; NaN is never close."""
    return float((got.float() - want).norm() / want.norm()) <= bound
