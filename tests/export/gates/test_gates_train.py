"""Gates learn what can be learnt, row by row, cost what they may, and skip the share asked for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from specs import gemma_spec, mimo_spec

from mimo_edge.backends import oracle
from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.gates.budget import BUDGET, gate_share, gate_spec
from mimo_edge.export.gates.source import Gate
from mimo_edge.export.gates.threshold import Ranked, set_thresholds
from mimo_edge.export.gates.train import first_gate, scores, train_gate
from mimo_edge.spec import FeedForwardSpec, GateSpec, MoeSpec, MtpSpec


def planted(rows, hidden=48, blocks=12, rank=6, seed=None):
    """Rows x, and importance that a gate of this rank can tell exactly: large where W2 relu(W1 x) is above 0."""
    g = torch.Generator().manual_seed(int(torch.randint(1 << 30, ())) if seed is None else seed)
    x = torch.randn(rows, hidden, generator=g) * torch.rand(hidden, generator=g).add(0.2)
    w1, w2 = torch.randn(rank, hidden, generator=g), torch.randn(blocks, rank, generator=g)
    z = (x @ w1.T).relu() @ w2.T
    return x, (z - z.mean()).mul(2).exp().clamp(1e-4, 1e4)


def trained(x, importance, rank=16, epochs=60):
    return train_gate(x, importance, 1.0, first_gate(x, importance, 1.0, rank), epochs, seed=0)


def test_a_planted_low_rank_rule_is_learnt():
    x, importance = planted(9000)
    gate = trained(x[:8000], importance[:8000])
    keep, needed = scores(gate, x[8000:]) > 0, importance[8000:] > 1
    assert (keep & needed).sum() / needed.sum() > 0.95
    assert (keep & needed).sum() / keep.sum() > 0.8, "not by keeping everything"
    assert (importance[8000:] * keep).sum() / importance[8000:].sum() > 0.99


def test_recall_outweighs_precision_where_misses_are_dear():
    """What x cannot tell: a block that matters in every tenth row, a hundred times the price, is kept throughout."""
    x = torch.randn(6000, 16)
    importance = torch.full((6000, 4), 0.1)
    importance[torch.rand(6000) < 0.1, 0] = 100.0
    importance[torch.rand(6000) < 0.1, 1] = 2.0
    kept = (scores(trained(x, importance, 4, 20), x) > 0).float().mean(0)
    assert kept[0] > 0.8 and kept[1:].max() < 0.1


def test_a_gate_is_the_same_for_a_seed_and_holds_float16_values():
    x, importance = planted(900, seed=1)
    a, b = trained(x, importance, epochs=3), trained(x, importance, epochs=3)
    for part in ("w1", "w2", "bias"):
        assert np.array_equal(getattr(a, part), getattr(b, part)) and getattr(a, part).dtype == np.float32
    assert np.array_equal(a.w1, a.w1.astype(np.float16)) and np.array_equal(a.w2, a.w2.astype(np.float16))
    assert (a.w1.shape, a.w2.shape, a.bias.shape) == ((16, 48), (12, 16), (12,))


def test_the_first_gate_is_the_best_linear_map_of_its_rank():
    """What it explains of log importance grows with the rank, up to what ridge regression explains."""
    x, importance = planted(2000)
    wanted = importance.log() - importance.log().mean(0)

    def left(predicted):
        return float((wanted - predicted).square().sum() / wanted.square().sum())

    lefts = []
    for rank in (1, 2, 5, 16, 24):
        gate = first_gate(x, importance, 1.0, rank)
        assert gate.w1.shape == (rank, 48) and gate.w2.shape == (12, rank)
        if rank > 1:
            lefts.append(left(scores(gate, x) - torch.from_numpy(gate.bias)))
    assert lefts == sorted(lefts, reverse=True) and lefts[0] < 0.95
    assert lefts[-1] == pytest.approx(left(x @ torch.linalg.lstsq(x, wanted).solution), abs=0.05)


def test_a_rows_mask_depends_on_that_row_only():
    x, importance = planted(2000)
    gate = trained(x, importance, epochs=2)
    parts = {f"gate.{n}": torch.from_numpy(getattr(gate, n)) for n in ("w1", "w2", "bias")}
    mask = oracle.block_mask(GateSpec(16, 16), parts.__getitem__, x)
    assert torch.equal(mask, (scores(gate, x) > 0).float()) and 0 < mask.mean() < 1
    others = torch.randn_like(x) * 9
    for i in torch.randint(0, 2000, (20,)).tolist():
        others[i] = x[i]
        assert torch.equal(oracle.block_mask(GateSpec(16, 16), parts.__getitem__, others)[i], mask[i])


# Thresholds


def layers(count=3, rows=400, blocks=8):
    """Layers whose importance differs in size by orders of magnitude, and gates that see it with noise."""
    found = []
    for i in range(count):
        importance = torch.rand(rows, blocks).pow(3) * 10.0 ** (-i)
        z = importance.log() + torch.randn(rows, blocks) * 0.3
        found.append((z, importance, Gate(*(np.zeros(s, np.float32) for s in ((1, 4), (blocks, 1), (blocks,))))))
    return found


@pytest.mark.parametrize("skip", [0.1, 0.35, 0.8])
def test_all_layers_together_skip_the_share_asked_for(skip):
    found = layers()
    ranked = [Ranked.of(z, importance) for z, importance, _ in found]
    gates = set_thresholds([g for *_, g in found], ranked, [64, 64, 128], skip)
    shares = [
        float((z + torch.from_numpy(g.bias) <= 0).float().mean()) for (z, *_), g in zip(found, gates, strict=True)
    ]
    assert abs((shares[0] + shares[1] + 2 * shares[2]) / 4 - skip) < 0.02
    assert shares[0] <= shares[1] <= shares[2], "layers that matter less skip more"


def test_a_price_keeps_what_pays():
    ranked = Ranked.of(torch.tensor([[3.0, 1.0], [2.0, 0.0]]), torch.tensor([[5.0, 1.0], [2.0, 0.5]]))
    assert [ranked.kept(p) for p in (0, 0.7, 1.5, 4, 9)] == [4, 3, 2, 1, 0]
    assert [ranked.threshold(n) for n in (1, 2, 3)] == [2.5, 1.5, 0.5]
    assert ranked.threshold(0) > 3 and ranked.threshold(4) < 0


# Budget


@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize(("hidden", "intermediate"), [(640, 2048), (2048, 6144), (256, 1536), (4096, 11008), (64, 256)])
def test_the_budget_holds_and_is_used(hidden, intermediate, block):
    spec = replace(gemma_spec(), hidden_size=hidden, ffn={"dense": FeedForwardSpec(intermediate, "gelu_tanh")})
    gate = gate_spec(spec, block)
    blocks = intermediate // block
    stored = 4 * (gate.rank * hidden + blocks * gate.rank + blocks)
    int4 = 3 * hidden * intermediate * (4 + (16 + 4) / 128) / 8
    assert gate_share(hidden, intermediate, gate) == pytest.approx(stored / int4) and stored / int4 < BUDGET == 0.05
    more = GateSpec(block, gate.rank + (8 if gate.rank >= 8 else 1))
    assert gate.rank == 256 or gate_share(hidden, intermediate, more) >= BUDGET


def test_feed_forwards_that_cannot_have_a_gate():
    spec = replace(gemma_spec(), hidden_size=64, ffn={"dense": FeedForwardSpec(256, "gelu_tanh")})
    with pytest.raises(BadInputError, match=r"blocks of 24 channels \(allowed: 16, 32, 64\)"):
        gate_spec(spec, 24)
    with pytest.raises(UnsupportedError, match="layer 3 has a mixture of experts"):
        gate_spec(mimo_spec(moe=True), 16)
    with pytest.raises(UnsupportedError, match=r"layer 0 has a gate already \(blocks of 16\)"):
        gate_spec(mimo_spec(gate=True), 16)
    with pytest.raises(UnsupportedError, match="layer 0 has 240 channels, no multiple of 64: use blocks of 16"):
        gate_spec(replace(spec, ffn={"dense": FeedForwardSpec(240)}), 64)
    with pytest.raises(UnsupportedError, match="250 channels, no multiple of 32: no block size fits"):
        gate_spec(replace(spec, ffn={"dense": FeedForwardSpec(250)}), 32)
    with pytest.raises(UnsupportedError, match="32 x 64 is too small for a gate within 5%"):
        gate_spec(gemma_spec(), 16)
    unused = {**spec.ffn, "experts": FeedForwardSpec(32, moe=MoeSpec(4, 2))}
    assert gate_spec(replace(spec, ffn=unused, mtp=MtpSpec(1, "full", "experts")), 32).block == 32, (
        "heads stay as they are"
    )
