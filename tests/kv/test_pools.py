"""Accounting of pages and rings under random admission and release."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import mimo_spec, qwen_spec

from mimo_edge.errors import MimoEdgeError
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.pools import KvPools, PagePool, RingPool
from mimo_edge.spec import MAX_DRAFTS


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=60), st.integers(1, 4), st.sampled_from([1, 5, 16])
)
def test_random_admissions_never_overlap_and_return_to_empty(operations, sequences, page_size):
    pools = KvPools(plan_layout(mimo_spec(), context=40, sequences=sequences, page_size=page_size))
    live = []
    for admit, tokens in operations:
        if not admit and live:
            pools.release(live.pop(tokens % len(live)))
        elif pools.can_admit(tokens):
            slots = pools.admit(tokens)
            assert len(slots.pages) * page_size >= tokens
            live.append(slots)
        else:
            before = (pools.pages.used, pools.rings.used)
            with pytest.raises(MimoEdgeError, match="no room"):
                pools.admit(tokens)
            assert (pools.pages.used, pools.rings.used) == before
        pools.check_integrity()
        assert len({s.ring for s in live}) == len(live) == pools.rings.used
    for slots in live:
        pools.release(slots)
    assert pools.pages.used == pools.rings.used == 0


def test_every_planned_sequence_fits_at_its_full_context():
    layout = plan_layout(mimo_spec(), context=37, sequences=3, page_size=8)
    pools = KvPools(layout)
    for _ in range(3):
        pools.admit(37)
    assert not pools.can_admit(1)
    pools.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 37)), max_size=40), st.integers(1, 4))
def test_a_planned_sequence_of_any_length_fits_whoever_came_and_went_before(operations, sequences):
    """Pages lie in one run, and no gaps between runs may be too short for the next."""
    pools, live = KvPools(plan_layout(mimo_spec(), context=37, sequences=sequences, page_size=8)), []
    for leave, tokens in operations:
        if live and (leave or len(live) == sequences):
            pools.release(live.pop(tokens % len(live)))
        assert pools.can_admit(37)
        live.append(pools.admit(tokens))
        pools.check_integrity()
        if len(live) == sequences:
            assert not pools.can_admit(1)


def test_what_was_not_taken_cannot_be_given():
    pages, rings = PagePool(4, longest=2), RingPool(2)
    run = pages.take(2)
    with pytest.raises(MimoEdgeError):
        pages.give((1, 2))
    pages.give(run)
    with pytest.raises(MimoEdgeError):
        pages.give(run)
    with pytest.raises(MimoEdgeError):
        rings.give(0)


def test_a_corrupted_pool_is_noticed():
    pages = PagePool(8, longest=4)
    pages.take(3)
    pages._owned[2] = (2, 3)
    with pytest.raises(AssertionError, match="owned twice"):
        pages.check_integrity()


def test_bytes_are_what_the_formula_says():
    spec = mimo_spec()
    layout = plan_layout(spec, context=1000, sequences=2, element_bytes=4, page_size=16)
    full = [layer for layer in spec.layers if spec.attention[layer.attention].window is None]
    windowed = [layer for layer in spec.layers if spec.attention[layer.attention].window is not None]
    per_token = sum(spec.attention[x.attention].kv_heads for x in full) * (12 + 8) * 4
    assert layout.full_token_bytes == per_token
    assert layout.full_bytes == 2 * 63 * 16 * per_token
    w = spec.attention["window"]
    assert layout.window_bytes == 2 * len(windowed) * (w.window + MAX_DRAFTS) * w.kv_heads * (12 + 8) * 4


def test_window_bytes_do_not_depend_on_the_context_and_full_bytes_do():
    spec = mimo_spec()
    short, long = (plan_layout(spec, context=c) for c in (256, 8192))
    assert short.ring_bytes == long.ring_bytes
    assert long.full_bytes == 32 * short.full_bytes


def test_a_model_without_window_layers_has_no_rings():
    layout = plan_layout(qwen_spec(), context=64)
    assert layout.rings == {} and layout.ring_bytes == 0
