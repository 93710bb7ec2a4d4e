"""Bytes of a long context with window layers, counted in allocated pools."""

from dataclasses import replace

import pytest
from specs import mimo_spec

from mimo_edge.backends.onnxruntime import OnnxRuntimeBackend
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.pools import KvPools
from mimo_edge.spec import AttentionSpec, LayerSpec

FULL = AttentionSpec(128, 8, 192, 128, 64, 5e6, 192**-0.5)
KINDS = {"full": FULL, "window": replace(FULL, window=128)}
PLACES_OF_FULL = (0, 7, 15, 23, 31, 39, 47, 55, 62, 69)  # MiMo-V2.5-Pro, 70 layers
HYBRID = tuple(LayerSpec("full" if i in PLACES_OF_FULL else "window", "dense") for i in range(70))


def pro(layers=HYBRID):
    """MiMo-V2.5-Pro's attention; the rest does not matter here."""
    return replace(mimo_spec(), max_context=1 << 20, attention=KINDS, layers=layers)


def pool_bytes(spec, context):
    """(full, window) bytes of one sequence's pools as the backend allocates them (and the system has not yet)."""
    backend = object.__new__(OnnxRuntimeBackend)  # without a graph
    backend._spec = spec
    backend._layers = {kind: [i for i, la in enumerate(spec.layers) if la.attention == kind] for kind in KINDS}
    backend.allocate(plan_layout(spec, context))
    sizes = dict.fromkeys(KINDS, 0)
    for layer, pools in zip(spec.layers, backend._pools, strict=True):
        sizes[layer.attention] += sum(p.nbytes for p in pools)
    return sizes["full"], sizes["window"]


def sequences(spec, context, budget):
    """How many sequences fit, taken from pools until none is left."""
    n = 1
    while (layout := plan_layout(spec, context, n + 1)).full_bytes + layout.window_bytes <= budget:
        n += 1
    pools, taken = KvPools(plan_layout(spec, context, n)), 0
    while pools.can_admit(context):
        pools.admit(context)
        taken += 1
    return taken


@pytest.mark.parametrize("context", [1024, 32_768])
def test_pools_take_what_the_layout_says_and_windows_do_not_grow(context):
    spec = pro()
    layout = plan_layout(spec, context)
    assert pool_bytes(spec, context) == (layout.full_bytes, layout.window_bytes)
    assert layout.window_bytes == 60 * (127 + 4) * 8 * (192 + 128) * 4
    assert layout.full_bytes == 10 * context * 8 * (192 + 128) * 4


def test_at_32k_tokens_at_least_five_times_as_many_sequences_fit():
    all_full = pro(layers=(LayerSpec("full", "dense"),) * 70)
    hybrid, full = (sum(pool_bytes(spec, 32_768)) for spec in (pro(), all_full))
    assert full / hybrid > 6.8
    budget = 64 << 30
    assert sequences(pro(), 32_768, budget) >= 5 * sequences(all_full, 32_768, budget) > 0
