"""What Int4Embedding computes, in plain PyTorch. The layout is `mimo_edge.params.stored`."""

from __future__ import annotations

from torch import Tensor

from mimo_edge.kernels.int4_linear.reference import dequantize


def int4_embedding(tokens: Tensor, q: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Rows of the table for tokens int [T], dequantised exactly: float32 [T, K].

    q uint8 [N, K/G, G*bits/8], scales float32 [N, K/G], zeros uint8 [N, ceil(K/G*bits/8)].
    """
    index = tokens.long()
    return dequantize(q[index], scales[index], zeros[index], bits)
