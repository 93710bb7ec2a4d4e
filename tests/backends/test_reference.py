"""The reference backend on pools: chunks, rings that wrap, window edges, NaN in free slots."""

import numpy as np
import pytest
import torch
from rows import error, feed, whole
from specs import ALL, RandomWeights, mimo_spec

from mimo_edge.backends import oracle
from mimo_edge.backends.base import Step
from mimo_edge.backends.reference import ReferenceBackend
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.pools import KvPools

TOKENS = 41


def open_backend(spec, seed=0, context=64, page_size=5, sequences=2):
    backend = ReferenceBackend(spec, RandomWeights(spec, seed))
    layout = plan_layout(spec, context, sequences=sequences, page_size=page_size)
    backend.allocate(layout)
    return backend, KvPools(layout)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "chunks", [[1] * TOKENS, [TOKENS], [1, 7, 20, 13], [30, *[1] * 11]], ids=["1s", "all", "odd", "mix"]
)
def test_any_chunking_gives_the_logits_of_one_pass(name, chunks):
    spec = ALL[name]
    tokens = np.random.default_rng(3).integers(0, spec.vocab_size, TOKENS)
    backend, pools = open_backend(spec)
    got = feed(backend, pools.admit(TOKENS), tokens, chunks)
    assert error(got, whole(spec, RandomWeights(spec, 0), tokens)) < 1e-5


@pytest.mark.parametrize("name", ALL)
def test_nan_in_free_slots_changes_nothing(name):
    spec = ALL[name]
    tokens = np.random.default_rng(4).integers(0, spec.vocab_size, TOKENS)
    backend, pools = open_backend(spec)
    for k, v in backend._pools:
        k.fill_(torch.nan), v.fill_(torch.nan)
    pools.admit(9)  # a neighbour, so that the sequence does not start at slot 0
    got = feed(backend, pools.admit(TOKENS), tokens, [11, 1, 1, 28])
    assert error(got, whole(spec, RandomWeights(spec, 0), tokens)) < 1e-5


def test_two_sequences_in_one_run_equal_each_alone():
    spec = mimo_spec()
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, spec.vocab_size, (2, 30))
    backend, pools = open_backend(spec)
    slots = [pools.admit(30), pools.admit(30)]
    outs = []
    for i in range(0, 30, 3):
        steps = [Step(s, i, t[i : i + 3], np.array([2])) for s, t in zip(slots, (a, b), strict=True)]
        outs.append([o.logits[0].copy() for o in backend.run(steps)])
        backend.commit([3, 3])
    for j, tokens in enumerate((a, b)):
        want = whole(spec, RandomWeights(spec, 0), tokens)[2::3]
        assert error(np.stack([o[j] for o in outs]), want) < 1e-5


def test_rows_that_are_not_accepted_leave_no_trace():
    """Four rows a step, 0 to 4 of them accepted, past several turns of the ring: plain decoding's logits all along."""
    spec = mimo_spec(window=5)
    rng = np.random.default_rng(6)
    tokens = rng.integers(0, spec.vocab_size, TOKENS)
    want = whole(spec, RandomWeights(spec, 0), tokens)
    backend, pools = open_backend(spec)
    slots, n = pools.admit(TOKENS), 0
    while n < TOKENS - 4:
        accepted = int(rng.integers(0, 5))
        rows = tokens[n : n + 4].copy()
        rows[accepted:] = rng.integers(0, spec.vocab_size, 4 - accepted)  # wrong drafts
        (out,) = backend.run([Step(slots, n, rows, np.arange(4))])
        if accepted:
            assert error(out.logits[:accepted], want[n : n + accepted]) < 1e-5
        backend.commit([accepted])
        n += accepted


@pytest.mark.parametrize("window", [1, 2, 7])
def test_a_huge_key_is_seen_at_distance_w_minus_1_and_not_at_w(window):
    spec = mimo_spec(window)
    a = spec.attention["window"]
    g = torch.Generator().manual_seed(window)
    n = 12
    q, k = torch.randn(n, a.heads, a.head_dim, generator=g), torch.randn(n, a.kv_heads, a.head_dim, generator=g)
    v = torch.zeros(n, a.kv_heads, a.v_head_dim)
    huge = 2
    v[huge] = 1e4
    y = oracle.attend(a, q, k, v, torch.arange(n), torch.arange(n), torch.zeros(a.heads))
    seen = (y.abs().amax(dim=(1, 2)) > 0).tolist()
    assert seen == [huge <= t < huge + window for t in range(n)]
