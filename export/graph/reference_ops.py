"""The `mimo` ops for onnx.reference, on the kernels' PyTorch references: runs the TensorRT form where there is none."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun
from torch import Tensor

from mimo_edge.kernels.int4_embedding.reference import int4_embedding
from mimo_edge.kernels.int4_linear.reference import int4_linear
from mimo_edge.kernels.sparse_ffn.reference import sparse_ffn
from mimo_edge.kernels.windowed_attention.reference import Shape, windowed_attention


def _packed(q: NDArray, scales: NDArray, zeros: NDArray) -> tuple[Tensor, Tensor, Tensor]:
    """INT8 is the bundle's uint8, bit for bit."""
    return _tensor(q.view(np.uint8)), _float(scales), _tensor(zeros.view(np.uint8))


def _tensor(a: NDArray) -> Tensor:
    return torch.tensor(a)


def _float(a: NDArray) -> Tensor:
    return _tensor(a.astype(np.float32))


class Int4Embedding(OpRun):
    op_domain = "mimo"

    def _run(self, tokens, q, scales, zeros, bits=None):
        y = int4_embedding(_tensor(tokens), *_packed(q, scales, zeros), bits)
        return (y.numpy().astype(scales.dtype),)


class Int4Linear(OpRun):
    op_domain = "mimo"

    def _run(self, x, q, scales, zeros, bias=None, bits=None):
        y = int4_linear(_float(x), *_packed(q, scales, zeros), bits, None if bias is None else _float(bias))
        return (y.numpy().astype(x.dtype),)


class SparseFfn(OpRun):
    op_domain = "mimo"

    def _run(self, x, keep, *packed, bits=None, activation=None):
        y = sparse_ffn(_float(x), _float(keep), _packed(*packed[:3]), _packed(*packed[3:]), bits, activation)
        return (y.numpy().astype(x.dtype),)


class WindowedAttention(OpRun):
    op_domain = "mimo"

    def _run(self, *inputs, **attributes):
        tensors = [None if a is None else _tensor(a) for a in inputs]
        return tuple(t.numpy() for t in windowed_attention(Shape(**attributes), *tensors))


REFERENCE_OPS: list[type[OpRun]] = [Int4Embedding, Int4Linear, SparseFfn, WindowedAttention]
