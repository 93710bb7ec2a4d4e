"""The kernels of MTP heads in Triton's interpreter against their reference; what a head's attention counts as past."""

import itertools

import pytest
import torch
from launching import run
from packed import close, random_matrix

from mimo_edge.kernels.int4_linear.reference import dequantize
from mimo_edge.kernels.mtp import reference, variants
from mimo_edge.spec import MtpSpec

K, VOCAB, RING = 96, 70, 9
SHAPES = list(itertools.product(("token_first", "hidden_first"), ("pre_norm", "post_norm"), (False, True)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("order", "hidden", "zero_first"), SHAPES)
def test_pair(order, hidden, zero_first, bits):
    """Rows from position 0 on behind padding; a ring that is not the first; a token that is none."""
    spec = MtpSpec(1, "window", "dense", order=order, hidden=hidden, zero_first=zero_first)
    table, positions = random_matrix(VOCAB, K, 32, bits), torch.tensor([-1, 0, 1, 14], dtype=torch.int32)
    tokens = torch.tensor([5, 9, 69, 0, 31, -1], dtype=torch.int32)
    states, norms = torch.randn(3, RING, K), {n: 1 + torch.rand(K) for n in ("a", "b", "c")}
    states[0], states[2], states[1, 2:5] = torch.nan, torch.nan, torch.nan
    tensors = {**table.buffers("embed"), **norms, "tokens": tokens, "positions": positions, "states": states}
    tensors |= {"table": torch.tensor([[1]], dtype=torch.int32), "y": torch.full((4, 2 * K), torch.nan).half()}
    names = {"tokens": "tokens", "embed": "embed", "hidden": "states", "table": "table", "positions": "positions"}
    names |= {"token_norm": "a", "hidden_norm": "b", "final_norm": "c", "y": "y"}
    run(tensors, variants.pair(4, VOCAB, K, table.quant, spec, 1e-5, RING, first=2, scale=3.0, **names))
    rows = dequantize(*map(torch.from_numpy, table.parts), bits)[tokens[2:].long()] * 3.0
    rows[3] = 0  # the token -1
    held = states[1][positions.long() % RING].nan_to_num()
    want = reference.pair(spec, rows, held, positions, norms["a"], norms["b"], norms["c"], 1e-5)
    assert torch.equal(tensors["y"][0], torch.zeros(2 * K).half())
    assert close(tensors["y"], want, 1e-3)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("start", [0, 7])
def test_keep(counted, start):
    rows = 14 if counted else RING
    positions = torch.arange(start, start + rows, dtype=torch.int32)
    positions[-2:] = -1  # padding
    ring, x = torch.randn(2, RING, K), torch.randn(rows, K)
    x[-2:] = torch.nan
    tensors = {"x": x, "positions": positions, "states": ring.clone()}
    tensors |= {n: torch.tensor([v], dtype=torch.int32) for n, v in (("lengths", start), ("counts", 11), ("table", 1))}
    names = {n: n for n in ("x", "positions", "lengths", "counts", "table")}
    run(tensors, variants.keep(rows, K, RING, hidden="states", counted=counted, **names))
    want = reference.keep(ring[1], x, positions, start + 11 if counted else None)
    assert torch.equal(tensors["states"], torch.stack([ring[0], want]))
    assert not torch.equal(want, ring[1]) and want.isfinite().all()
