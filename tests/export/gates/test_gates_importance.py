"""What dropping a block changes, in closed form and by dropping it; the metric that measures it."""

from dataclasses import replace

import pytest
import torch
from specs import RandomWeights, gemma_spec, mimo_spec, qwen_spec

from mimo_edge.backends import oracle
from mimo_edge.export.gates.feed_forward import FeedForward, walk
from mimo_edge.export.gates.importance import energy, output_change
from mimo_edge.export.gates.sensitivity import metrics
from mimo_edge.params import parameters

SPECS = {
    "plain": mimo_spec(),
    "norm behind": gemma_spec(),
    "norm and bias": replace(gemma_spec(), output_bias=True),
    "bias": replace(mimo_spec(), output_bias=True),
}


class Source:
    def __init__(self, weights):
        self.weights = weights

    def read(self, name, start=0, stop=None):
        return self.weights.get(name)[start:stop].numpy().copy()


def feed_forward(spec, rows=9):
    seed = int(torch.randint(1 << 30, ()))
    return FeedForward(spec, RandomWeights(spec, seed), 2, torch.randn(rows, spec.hidden_size) * 2)


def dropped(ffn, block, j):
    keep = torch.ones(len(ffn.x), ffn.h.shape[1] // block)
    keep[:, j] = 0
    return ffn.output(keep) - ffn.output()


@pytest.mark.parametrize("block", [1, 4, 16, 32])
@pytest.mark.parametrize("measured", [False, True], ids=["lengths", "metric"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_change_of_dropping_each_block_alone(spec, measured, block):
    ffn = feed_forward(spec)
    metric = torch.randn(spec.hidden_size, spec.hidden_size) if measured else None
    got = output_change(ffn, block, metric)
    assert got.shape == (9, 64 // block)
    for j in range(64 // block):
        change = dropped(ffn, block, j)
        change = change if metric is None else change @ metric.T
        want = change.square().sum(-1) / ffn.output().square().sum(-1)
        assert torch.allclose(got[:, j], want, rtol=1e-3, atol=1e-8)


def test_an_order_moves_channels_and_changes_nothing_else():
    ffn = feed_forward(gemma_spec())
    order = torch.randperm(64)
    moved = ffn.reordered(order)
    assert torch.allclose(moved.output(), ffn.output(), rtol=1e-5, atol=1e-5)
    assert torch.allclose(output_change(moved, 1), output_change(ffn, 1)[:, order], rtol=1e-3, atol=1e-8)


def test_energy_is_the_sum_of_single_channels_and_the_change_is_not():
    ffn = feed_forward(mimo_spec())
    single = ffn.h.square() * ffn.down.square().sum(0)
    assert torch.allclose(energy(ffn, 16), single.unflatten(1, (4, 16)).sum(-1), rtol=1e-4)
    ffn.down[:, 1], ffn.h[:, 1] = -ffn.down[:, 0], ffn.h[:, 0]  # two channels of a block that cancel
    lone = torch.zeros(64, dtype=torch.bool)
    lone[:2] = True
    ffn.h[:, ~lone] = 0
    assert (energy(ffn, 16)[:, 0] > 0).all()
    assert output_change(ffn, 16).abs().max() < 1e-6


def test_the_walk_is_the_oracle_when_everything_is_kept():
    for spec in (*SPECS.values(), qwen_spec()):
        weights = RandomWeights(spec, 3)
        texts = [torch.randint(0, spec.vocab_size, (n,)) for n in (7, 12)]
        layers = []

        def visit(ffn, layers=layers):
            layers.append(ffn.i)
            return torch.ones(19, 4) if ffn.i % 2 else None

        got = walk(spec, Source(weights), texts, visit, lambda done, total: None)
        for text, rows in zip(texts, got.split([7, 12]), strict=True):
            out = oracle.forward(spec, weights, text, torch.arange(len(text)), [None] * len(spec.layers))
            want = oracle.rms_norm(out.hidden, weights.get("norm"), spec.norm_eps)
            assert (rows - want).norm() / want.norm() < 1e-5
        assert layers == list(range(len(spec.layers)))


@pytest.mark.parametrize("spec", [mimo_spec(), gemma_spec()], ids=["head", "tied"])
def test_the_metric_predicts_how_far_the_next_token_moves(spec):
    """|R d|^2, on average over rows and directions, is the divergence from the distribution without the change d."""
    weights = RandomWeights(spec, 5)
    texts = [torch.randint(0, spec.vocab_size, (150,)) for _ in range(6)]
    assert not any(p.requires_grad for p in map(weights.get, [p.name for p in parameters(spec)]))
    found = metrics(spec, Source(weights), texts, seed=1, progress=lambda done, total: None)
    assert len(found) == len(spec.layers)
    x = torch.cat([
        oracle.forward(spec, weights, t, torch.arange(150), [None] * len(spec.layers)).hidden for t in texts
    ])  # fmt: skip
    change = 0.03 * torch.randn_like(x)

    def log_probabilities(x):
        return oracle.head(spec, weights, oracle.rms_norm(x, weights.get("norm"), spec.norm_eps)).log_softmax(-1)

    before, after = log_probabilities(x), log_probabilities(x + change * x.norm(dim=-1, keepdim=True))
    divergence = (before.exp() * (before - after)).sum(-1).mean()
    predicted = (change @ found[-1].T).square().sum(-1).mean()
    assert 0.75 < predicted / divergence < 1.33


def test_the_metric_of_an_early_layer_sees_later_rows():
    """The loss of all rows behind one that is changed counts: the same layers with a window of one row see less."""
    spec = qwen_spec()
    weights = RandomWeights(spec, 6)
    texts = [torch.randint(0, spec.vocab_size, (40,)) for _ in range(8)]
    alone = replace(spec, attention={"full": replace(spec.attention["full"], window=1)})
    sizes = [float(metrics(s, Source(weights), texts, 1, lambda *_: None)[0].square().sum()) for s in (spec, alone)]
    assert all(s > 0 for s in sizes) and abs(sizes[0] / sizes[1] - 1) > 0.05
