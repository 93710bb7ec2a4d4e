"""Orders of channels: co-active groups are found, blocks are full, and the dense model stays what it was."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from specs import ALL, RandomWeights, gemma_spec, mimo_spec

from mimo_edge.backends import oracle
from mimo_edge.export.gates.permute import assign, permute
from mimo_edge.export.gates.source import Gate, GatedSource
from mimo_edge.params import parameters
from mimo_edge.spec import FeedForwardSpec, GateSpec


class Source:
    """A checkpoint's, that notes the largest read."""

    def __init__(self, spec, seed):
        self.tensors, self.largest = RandomWeights(spec, seed).tensors, 0

    def read(self, name, start=0, stop=None):
        rows = self.tensors[name][start:stop].numpy().copy()
        self.largest = max(self.largest, rows.nbytes)
        return rows

    def ready(self, name, quant, start=0, stop=None):
        return (name, quant, start, stop)


class Read:
    """oracle.Weights of a source."""

    def __init__(self, source):
        self.source = source

    def get(self, name):
        return torch.from_numpy(self.source.read(name))

    def rows(self, name, index):
        return self.get(name)[index]


def planted(rows, groups, block, seed):
    """Importance [rows, channels] of groups that are active together, in a random order, over weak noise."""
    g = torch.Generator().manual_seed(seed)
    group = torch.arange(groups).repeat_interleave(block)[torch.randperm(groups * block, generator=g)]
    active = (torch.rand(rows, groups, generator=g) < 0.3).float()
    size = torch.rand(rows, groups * block, generator=g)
    return group, active[:, group] * size + 0.01 * torch.rand(rows, groups * block, generator=g)


@pytest.mark.parametrize(("groups", "block"), [(7, 16), (5, 32), (3, 64)])
def test_planted_groups_are_recovered(groups, block):
    group, importance = planted(600, groups, block, int(torch.randint(1 << 30, ())))
    blocks = group[permute(importance, block, seed=0)].view(groups, block)
    assert (blocks == blocks[:, :1]).all()


def test_always_needed_channels_share_blocks():
    mean = torch.cat([torch.full((32,), 10.0), torch.full((96,), 0.1)])[torch.randperm(128)]
    importance = mean * torch.rand(300, 128)
    first = mean[permute(importance, 16, seed=0)].view(8, 16)
    assert sorted(first.mean(1).tolist()) == pytest.approx([0.1] * 6 + [10.0] * 2)


def test_an_order_is_one_and_the_same_for_a_seed():
    _, importance = planted(200, 4, 16, 1)
    order = permute(importance, 16, seed=3)
    assert torch.equal(order.sort().values, torch.arange(64)) and torch.equal(order, permute(importance, 16, seed=3))
    assert torch.equal(permute(torch.zeros(50, 64), 16, seed=0).sort().values, torch.arange(64))
    assert torch.equal(permute(importance[:, :16], 16, seed=0), torch.arange(16))


@pytest.mark.parametrize("capacity", [1, 5, 16])
def test_assign_fills_every_block_and_beats_chance(capacity):
    score = torch.randn(capacity * 6, 6)
    member = assign(score, capacity)
    assert torch.bincount(member, minlength=6).tolist() == [capacity] * 6
    best = score.max(1).values.sum()
    assert score.gather(1, member[:, None]).sum() > 0.7 * best


def gated(spec, source, block=16):
    rng = np.random.default_rng()
    orders = {
        i: rng.permutation(spec.ffn_of(i).intermediate) for i in range(len(spec.layers)) if not spec.ffn_of(i).moe
    }
    return orders, GatedSource(source, orders, {})


@pytest.mark.parametrize("name", [n for n, spec in ALL.items() if not any(f.gate for f in spec.ffn.values())])
def test_the_reordered_model_computes_the_same(name):
    spec = ALL[name]
    source = Source(spec, 4)
    _, moved = gated(spec, source)
    tokens = torch.randint(0, spec.vocab_size, (23,))

    def logits(source):
        return oracle.forward(spec, Read(source), tokens, torch.arange(23), [None] * len(spec.layers)).logits

    want = logits(source)
    assert (logits(moved) - want).norm() / want.norm() < 1e-6


def test_rows_and_columns_are_where_the_order_says(monkeypatch):
    spec = replace(gemma_spec(), ffn={"dense": FeedForwardSpec(96, "gelu_tanh")})
    source = Source(spec, 4)
    orders, moved = gated(spec, source)
    monkeypatch.setattr("mimo_edge.export.gates.source._SLAB_BYTES", 5 * 32 * 4)
    whole, order = source.tensors["layers.1.gate_up"].numpy(), orders[1]
    want = np.concatenate([whole[:96][order], whole[96:][order]])
    for start, stop in [(0, None), (3, 50), (90, 101), (100, 192), (7, 7)]:
        source.largest = 0
        assert np.array_equal(moved.read("layers.1.gate_up", start, stop), want[start:stop])
        assert source.largest <= 5 * 32 * 4
    down = source.tensors["layers.1.down"].numpy()[:, order]
    assert np.array_equal(moved.read("layers.1.down", 5, 9), down[5:9])
    assert moved.read("layers.1.down").flags.c_contiguous
    for p in parameters(spec):
        if not p.name.endswith(("gate_up", "down")):
            assert np.array_equal(moved.read(p.name), source.tensors[p.name].numpy())


def test_gates_are_served_and_packed_weights_are_not():
    spec = mimo_spec()
    gate = Gate(*(np.random.rand(*s).astype(np.float32) for s in ((8, 32), (4, 8), (4,))))
    moved = GatedSource(Source(spec, 0), {2: np.arange(64)}, {2: gate})
    assert np.array_equal(moved.read("layers.2.gate.w2", 1, 3), gate.w2[1:3])
    assert np.array_equal(moved.read("layers.2.gate.bias"), gate.bias)
    moved.read("layers.2.gate.w1")[:] = 0
    assert gate.w1.all(), "a copy is handed out"
    quant = GateSpec(16, 8)  # any object: handed through
    assert moved.ready("layers.2.down", quant) is None and moved.ready("layers.2.gate_up", quant) is None
    assert moved.ready("layers.1.down", quant, 1, 2) == ("layers.1.down", quant, 1, 2)
