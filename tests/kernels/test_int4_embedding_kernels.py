"""Int4Embedding's kernel in Triton's interpreter: exact rows, also of a table whose size fills no tile."""

import pytest
import torch
from launching import run
from packed import random_matrix

from mimo_edge.kernels.int4_embedding.reference import int4_embedding
from mimo_edge.kernels.int4_embedding.variants import embed


@pytest.mark.parametrize(
    ("n", "k", "group", "bits"), [(70, 96, 32, 4), (33, 1152, 128, 4), (40, 64, 64, 8)], ids=["g32", "k1152", "w8"]
)
def test_rows_are_exact(n, k, group, bits):
    m = random_matrix(n, k, group, bits)
    tokens = torch.randint(0, n, (5,), dtype=torch.int32)
    tokens[0], tokens[1] = n - 1, 0
    names = {"tokens": tokens, "y": torch.full((5, k), torch.nan), **m.buffers("w")}
    run(names, *embed(5, n, k, m.quant, tokens="tokens", w="w", y="y", scale=1.5))
    want = int4_embedding(tokens, *map(torch.from_numpy, m.parts), bits) * 1.5
    assert torch.equal(names["y"], want)
    run(names, *embed(2, n, k, m.quant, tokens="tokens", w="w", y="y", scale=1.5, first=3))
    assert torch.equal(names["y"], torch.cat([want[3:], want[2:]]))


def test_a_token_outside_the_table_is_a_row_of_zeros():
    m = random_matrix(40, 64, 32, 4)
    names = {"tokens": torch.tensor([-1, 40, 2**30, 39], dtype=torch.int32), "y": torch.full((4, 64), torch.nan)}
    names |= m.buffers("w")
    run(names, *embed(4, 40, 64, m.quant, tokens="tokens", w="w", y="y"))
    assert not names["y"][:3].any() and names["y"][3].any()
