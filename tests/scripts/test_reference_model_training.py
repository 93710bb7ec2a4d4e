"""The trainable model equals the oracle, and a resumed run equals one that never stopped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mimo_edge.backends import oracle
from mimo_edge.params import parameters
from scripts.reference_model.attention import Masks
from scripts.reference_model.gates import GatePlan
from scripts.reference_model.losses import gate_use, to_batch
from scripts.reference_model.model import Model
from scripts.reference_model.optim import orthogonal
from scripts.reference_model.packing import ACTION, GENERAL, LOOKAHEAD, PROMPT, Rows
from scripts.reference_model.shape import reference_spec, tiny_spec
from scripts.reference_model.trainer import Plan, Trainer

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other
VOCAB = 300
CPU = torch.device("cpu")


class Weights:
    def __init__(self, model: Model):
        self.tensors = {k: v.detach() for k, v in model.state_dict().items()}

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def rows(self, name: str, index: torch.Tensor) -> torch.Tensor:
        return self.tensors[name][index]


def random_rows(rng: np.random.Generator, batch: int, length: int, documents: int = 3) -> Rows:
    width = length + LOOKAHEAD
    tokens = rng.integers(1, VOCAB, (batch, width)).astype(np.uint16)
    document = np.sort(rng.integers(0, documents, (batch, width)), axis=1).astype(np.int16)
    kinds = rng.choice([PROMPT, ACTION, GENERAL], (batch, width)).astype(np.uint8)
    first = np.array([[np.flatnonzero(row == d)[0] for d in row] for row in document])
    return Rows(tokens, document, kinds, (np.arange(width) - first).astype(np.int32))


def randomised(seed: int) -> Model:
    """A model without zeros or ones among its weights, its gates half open."""
    torch.manual_seed(seed)
    model = Model(tiny_spec(VOCAB))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(
                torch.randn_like(p) * (p.shape[-1] ** -0.5 if p.ndim == 2 else 0.3)
                + (1 if name.endswith("norm") else 0)
            )
    return model


def relative(out: torch.Tensor, ref: torch.Tensor) -> float:
    return float((out - ref).norm() / ref.norm())


@pytest.mark.parametrize("dense", [False, True], ids=["gated", "dense"])
def test_equals_oracle_with_gates_and_heads(dense):
    model, rng = randomised(5), np.random.default_rng(5)
    spec, rows = model.spec, random_rows(rng, 2, 37)
    batch = to_batch(rows, 3, CPU)
    masks = Masks(spec, 2, 37, CPU)
    masks.set(batch.document)
    with torch.no_grad():
        hidden, stats = model.hidden(batch.tokens, batch.position, masks.held, gate_use(batch, torch.full((2,), dense)))
    logits = [h @ model.embed.T for h in hidden]
    weights = Weights(model)
    if dense:  # the oracle has no switch: a bias that opens every block is the same
        weights.tensors |= {k: torch.full_like(v, 1e9) for k, v in weights.tensors.items() if k.endswith("gate.bias")}
    for b in range(2):
        for d in np.unique(rows.document[b, :37]):
            at = np.flatnonzero(rows.document[b, :37] == d)
            tokens, positions = batch.tokens[b, at], torch.arange(len(at))
            ref = oracle.forward(spec, weights, tokens, positions, [None] * len(spec.layers))
            assert relative(logits[0][b, at], ref.logits) < 1e-5
            for m in range(3):
                later = batch.tokens[b, at + 1 + m]
                assert (
                    relative(logits[1 + m][b, at], oracle.mtp(spec, weights, m, ref.hidden, later, positions, None)[0])
                    < 1e-5
                )
    kept = float(torch.stack([s.chat for s in stats]).mean())
    assert 0.2 < kept < 0.8, "the comparison needs gates that are neither open nor shut"


def test_statistics_count_the_masks():
    model, rng = randomised(6), np.random.default_rng(6)
    rows = random_rows(rng, 2, 21)
    batch = to_batch(rows, 3, CPU)
    use = gate_use(batch, torch.zeros(2, dtype=torch.bool))
    x = torch.randn(2, 21, model.spec.hidden_size)
    gate = model.layers[1].gate
    keep, stats = gate(x, use)
    spec_gate = model.spec.ffn["dense"].gate
    ref = oracle.block_mask(spec_gate, lambda name: gate.get_parameter(name.removeprefix("gate.")), x)
    assert torch.allclose(keep, ref, atol=1e-6)
    chat = torch.from_numpy(rows.kinds[:, :21] != GENERAL)
    assert float(stats.chat) == pytest.approx(float(ref.mean(-1)[chat].mean()), abs=1e-5)
    same = torch.from_numpy(rows.document[:, 1:21] == rows.document[:, :20])
    flips = (ref[:, 1:] != ref[:, :-1]).float().mean(-1)[same].mean()
    assert float(stats.flips) == pytest.approx(float(flips), abs=1e-5)


def test_targets_stay_inside_documents():
    rows = random_rows(np.random.default_rng(7), 2, 19, documents=6)
    batch = to_batch(rows, 3, CPU)
    for ahead in range(1, 5):
        for b in range(2):
            for p in range(19):
                inside = rows.document[b, p] == rows.document[b, p + ahead]
                worth = {PROMPT: 0.0, ACTION: 3.0, GENERAL: 1.0}[int(rows.kinds[b, p + ahead])]
                assert batch.weights[ahead - 1, b, p] == (worth if inside else 0.0)


def test_gradients_reach_every_parameter():
    trainer = Trainer(tiny_spec(VOCAB), Plan(10, 2, 24), CPU)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    rng = np.random.default_rng(8)
    for _ in range(3):  # projections back into the residual stream start at zero
        trainer.step(random_rows(rng, 2, 24))
    still = [k for k, v in trainer.model.state_dict().items() if torch.equal(v, before[k])]
    assert still == []


def test_resumed_run_is_bit_equal(tmp_path):
    batches = [random_rows(np.random.default_rng(100 + i), 2, 24) for i in range(6)]
    plan = Plan(6, 2, 24)
    whole = Trainer(tiny_spec(VOCAB), plan, CPU)
    whole_losses = [whole.step(rows) for rows in batches]
    first = Trainer(tiny_spec(VOCAB), plan, CPU)
    for rows in batches[:3]:
        first.step(rows)
    first.save(tmp_path / "state.pt")
    second = Trainer(tiny_spec(VOCAB), Plan(6, 2, 24), CPU)
    second.load(tmp_path / "state.pt")
    for rows, expected in zip(batches[3:], whole_losses[3:], strict=True):
        assert all(torch.equal(v, expected[k]) for k, v in second.step(rows).items())
    for k, v in whole.model.state_dict().items():
        assert torch.equal(v, second.model.state_dict()[k]), k


def test_training_learns_and_gates_reach_their_target():
    plan = Plan(120, 2, 32, warmup=10, gates=GatePlan(start=0.0, end=0.4))
    trainer = Trainer(tiny_spec(VOCAB), plan, CPU)
    rows = random_rows(np.random.default_rng(9), 2, 32)
    first = trainer.step(rows)
    for _ in range(plan.steps - 1):
        last = trainer.step(rows)
    assert last["loss0"] < 0.3 * first["loss0"]
    assert float(first["keep_chat"]) > 0.95
    assert float(last["keep_chat"]) < 0.68


def test_orthogonal_is_near_orthogonal():
    torch.manual_seed(0)
    out = orthogonal(torch.randn(3, 20, 50))
    singular = torch.linalg.svdvals(out)
    assert singular.min() > 0.5 and singular.max() < 1.3


def test_schedule_and_size():
    plan = Plan(1000)
    rates = [plan.rate(s) for s in range(1000)]
    assert rates[0] < 0.01 and max(rates) == pytest.approx(1.0) and 0 < rates[-1] < 0.03
    assert sum(p.elements for p in parameters(reference_spec())) <= 30_000_000
