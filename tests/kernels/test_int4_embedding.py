"""Int4Embedding's reference: the rows asked for, in that order, exactly as the whole table dequantises."""

import pytest
import torch

from mimo_edge.export.quantize.rtn import quantize_rows
from mimo_edge.kernels.int4_embedding.reference import int4_embedding
from mimo_edge.kernels.int4_linear.reference import dequantize
from mimo_edge.spec import TensorQuant


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128])
def test_rows_equal_the_dequantised_table(bits, group):
    table = torch.randn(37, 3 * group).numpy()
    packed = [torch.from_numpy(part) for part in quantize_rows(table, TensorQuant(bits, group))]
    tokens = torch.tensor([36, 0, 5, 5], dtype=torch.int32)
    assert torch.equal(int4_embedding(tokens, *packed, bits), dequantize(*packed, bits)[tokens.long()])
