"""FlexAttention with windows, documents and sinks gives what explicit scores give, gradients included."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scripts.reference_model.attention import Masks, attend, dense
from scripts.reference_model.shape import reference_spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("kind", ["full", "window"])
def test_flex_equals_explicit_scores(kind):
    torch.manual_seed(3)
    spec, device = reference_spec(), torch.device("cuda")
    a, batch, length = spec.attention[kind], 2, 640
    rng = np.random.default_rng(3)
    documents = torch.from_numpy(np.sort(rng.integers(0, 4, (batch, length)), axis=1)).to(device)
    masks = Masks(spec, batch, length, device)
    masks.set(documents)
    at = torch.arange(length, device=device)
    seen = (
        (at[:, None] >= at)
        & (at[:, None] - at < (a.window or length))
        & (documents[:, :, None] == documents[:, None, :])
    )
    shapes = [(a.heads, a.head_dim), (a.kv_heads, a.head_dim), (a.kv_heads, a.v_head_dim)]
    q, k, v = (torch.randn(batch, length, *s, device=device, requires_grad=True) for s in shapes)
    sinks = torch.randn(a.heads, device=device, requires_grad=True) if a.sinks else None
    inputs = [q, k, v] + ([sinks] if sinks is not None else [])
    weight = torch.randn(batch, length, a.heads, a.v_head_dim, device=device)

    half = [t.to(torch.bfloat16) for t in (q, k, v)]
    out = torch.compile(attend)(masks.held[kind], *half, a.scale, sinks)
    found = torch.autograd.grad((out * weight).sum(), inputs)
    ref = dense(seen, *(t.transpose(1, 2) for t in (q, k, v)), a.scale, sinks).transpose(1, 2)
    expected = torch.autograd.grad((ref * weight).sum(), inputs)
    assert (out - ref).norm() / ref.norm() < 1e-2
    for name, g, e in zip("qkvs", found, expected, strict=False):
        assert (g - e).norm() / e.norm() < 2e-2, name
