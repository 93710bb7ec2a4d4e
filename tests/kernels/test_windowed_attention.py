"""WindowedAttention's reference on pools against the oracle's attention on whole sequences."""

import numpy as np
import pytest
import torch

from mimo_edge.backends import oracle
from mimo_edge.kernels.windowed_attention.reference import Shape, windowed_attention
from mimo_edge.spec import AttentionSpec

BLOCK, BLOCKS = 3, 12
PAGES, RING_SPARE = torch.tensor([[7, 2, 9, 4, 0, 11], [1, 8, 3, 10, 5, 6]], dtype=torch.int32), 4

SPECS = {
    "full": AttentionSpec(3, 1, 10, 6, 4, 1e4, 0.3),
    "groups": AttentionSpec(6, 3, 7, 7, 6, 1e6, 0.4, value_scale=0.7),
    "window": AttentionSpec(4, 2, 5, 9, 2, 1e4, 0.5, window=5, sinks=True),
    "window-of-one": AttentionSpec(2, 2, 4, 4, 4, 1e4, 0.5, window=1, sinks=True),
    "norms": AttentionSpec(5, 1, 6, 6, 6, 1e4, 1.0, window=7, qk_norm=True),
    "no-rotation": AttentionSpec(2, 1, 5, 3, 0, 1e4, 0.5),
}


class Layer:
    """One attention layer with NaN in every slot that was never written."""

    def __init__(self, a: AttentionSpec, seed: int, dtype=torch.float32):
        self.a, self.g = a, torch.Generator().manual_seed(seed)
        self.ring = None if a.window is None else a.window - 1 + RING_SPARE
        blocks, block = (BLOCKS, BLOCK) if self.ring is None else (3, self.ring)
        self.table = PAGES if self.ring is None else torch.tensor([[2], [0]], dtype=torch.int32)
        self.pools = [
            torch.full((blocks, block, a.kv_heads, d), torch.nan, dtype=dtype) for d in (a.head_dim, a.v_head_dim)
        ]
        self.weights = {
            "sinks": self.random(a.heads),
            "q_norm": 1 + 0.3 * self.random(a.head_dim),
            "k_norm": 1 + 0.3 * self.random(a.head_dim),
        }

    def random(self, *shape):
        return torch.randn(shape, generator=self.g)

    def rows(self, n):
        return self.random(n, self.a.q_rows + self.a.k_rows + self.a.v_rows)

    def step(self, qkv, positions, sequences, lengths):
        a, w = self.a, self.weights
        shape = Shape(a.heads, a.kv_heads, a.head_dim, a.v_head_dim, a.window or 0, a.scale, a.value_scale, 1e-6)
        ints = [torch.tensor(list(x), dtype=torch.int32) for x in (positions, sequences, lengths)]
        norms = [w["q_norm"], w["k_norm"]] if a.qk_norm else [None, None]
        sinks = w["sinks"] if a.sinks else None
        frequencies = oracle.rope_frequencies(a)
        y, *self.pools = windowed_attention(shape, qkv, *self.pools, *ints, self.table, frequencies, sinks, *norms)
        return y

    def whole(self, qkv):
        """The oracle's attention with both of its products left out."""
        identity = {"qkv": torch.eye(qkv.shape[1]), "o": torch.eye(self.a.heads * self.a.v_head_dim)}
        get = (identity | self.weights).__getitem__
        return oracle.attention(self.a, 1e-6, get, qkv, torch.arange(len(qkv)), None)[0]


def error(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("chunks", [[16], [1] * 16, [5, 1, 7, 3], [11, 4, 1]], ids=["all", "1s", "odd", "long-first"])
def test_any_chunking_of_two_sequences_equals_the_oracle(name, chunks):
    layer = Layer(SPECS[name], 1)
    a, b = layer.rows(16), layer.rows(16)
    got, n = [], 0
    for size in chunks:
        order = torch.randperm(2 * size, generator=layer.g)  # rows of the two interleaved, each in its own order
        owners = (order < size).int()
        at = {s: iter(range(n, n + size)) for s in (0, 1)}
        positions = [next(at[int(s)]) for s in owners]
        qkv = torch.stack([(a, b)[s][p] for s, p in zip(owners.tolist(), positions, strict=True)])
        y = layer.step(qkv, positions, owners.tolist(), [n, n])
        got.append([y[owners == s] for s in (0, 1)])
        n += size
    for s, rows in enumerate((a, b)):
        assert error(torch.cat([g[s] for g in got]), layer.whole(rows)) < 1e-5


@pytest.mark.parametrize("name", ["full", "window"])
def test_padding_stores_nothing_and_gives_zeros(name):
    layer = Layer(SPECS[name], 2)
    qkv = layer.rows(6)
    padded = torch.cat([torch.full((1, qkv.shape[1]), torch.nan), qkv, torch.full((2, qkv.shape[1]), torch.nan)])
    y = layer.step(padded, [-1, *range(6), -1, -1], [0] * 9, [0, 0])
    assert error(y[1:7], layer.whole(qkv)) < 1e-5
    assert y[[0, 7, 8]].abs().max() == 0
    for pool in layer.pools:
        assert int(torch.isfinite(pool).all(dim=(2, 3)).sum()) == 6


def test_rejected_rows_are_invisible_and_overwritten():
    layer = Layer(SPECS["window"], 3)
    qkv, n = layer.rows(30), 0
    want = layer.whole(qkv)
    rng = np.random.default_rng(0)
    while n < 26:
        accepted = int(rng.integers(0, 5))
        rows = torch.cat([qkv[n : n + accepted], 100 * layer.rows(4 - accepted)])
        y = layer.step(rows, range(n, n + 4), [1] * 4, [0, n])
        if accepted:
            assert error(y[:accepted], want[n : n + accepted]) < 1e-5
        n += accepted


def test_the_pools_given_are_not_changed():
    layer = Layer(SPECS["full"], 4)
    before = layer.pools
    layer.step(layer.rows(4), range(4), [0] * 4, [0, 0])
    assert all(torch.isnan(pool).all() for pool in before)


@pytest.mark.parametrize("window", [1, 2, 6])
def test_a_huge_key_is_seen_at_distance_w_minus_1_and_not_at_w(window):
    a = AttentionSpec(2, 1, 4, 4, 4, 1e4, 0.5, window=window)
    huge, n = 2, 11

    def outputs(value):
        layer = Layer(a, 5)
        qkv = layer.rows(n)
        qkv[huge, a.q_rows :] *= value
        return torch.cat([layer.step(qkv[i : i + 1], [i], [0], [i, 0]) for i in range(n)])

    changed = (outputs(1.0) != outputs(1e4)).any(dim=1).tolist()
    assert changed == [huge <= t < huge + window for t in range(n)]


def test_float16_pools_round_before_reading_so_chunks_agree():
    whole, stepwise = Layer(SPECS["window"], 6, torch.float16), Layer(SPECS["window"], 6, torch.float16)
    qkv = whole.rows(12)
    assert torch.equal(stepwise.rows(12), qkv)
    a = whole.step(qkv, range(12), [0] * 12, [0, 0])
    b = torch.cat([stepwise.step(qkv[i : i + 1], [i], [0], [i, 0]) for i in range(12)])
    assert error(a, b) < 1e-5 and 1e-5 < error(a, whole.whole(qkv)) < 1e-2
