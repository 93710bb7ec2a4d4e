"""The cuda backend over a fake driver: real programs and kernels, in Triton's interpreter, against the oracle."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_bundle import fake_cuda, open_cuda, write_cuda_bundle
from rows import error, feed, whole
from specs import gemma_spec, mimo_spec, qwen_spec

from mimo_edge.backends.base import RowCopies, Step
from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.backends.cuda_array import DeviceArray
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.bundle import read_tensors
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.pools import KvPools


def shallow(spec):
    return replace(spec, layers=spec.layers[:3])


SPECS = {
    "mimo": shallow(mimo_spec()),
    "gated": replace(shallow(mimo_spec(gate=True)), output_bias=True),
    "gemma": shallow(gemma_spec((5, 11))),
    "qwen": replace(qwen_spec(2), output_bias=True),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")
    return {name: write_cuda_bundle(folder / name, spec) for name, spec in SPECS.items()}


def open_backend(bundle, context=128, sequences=2):
    backend = open_cuda(bundle)
    layout = plan_layout(bundle.spec, context, sequences=sequences)
    backend.allocate(layout)
    return backend, KvPools(layout)


def oracle_weights(bundle):
    return BundleWeights(bundle.spec, read_tensors(bundle.file("weights.safetensors")), keep=True)


def random_tokens(count, seed):
    return np.random.default_rng(seed).integers(0, 258, count)


@pytest.mark.parametrize("name", SPECS)
def test_prefill_in_chunks_then_single_rows_and_drafts(bundles, name):
    """Chunks of every program's size and odd ones, padded; rings of 8 to 14 slots wrap."""
    bundle, tokens = bundles[name], random_tokens(27, 1)
    backend, pools = open_backend(bundle)
    pools.admit(5)  # a neighbour, so that neither pages nor rings begin at 0
    got = feed(backend, pools.admit(27), tokens, [16, 5, 1, 4, 1])
    assert error(got, whole(bundle.spec, oracle_weights(bundle), tokens)) < 2e-2
    backend.close()


@pytest.mark.parametrize("name", ["mimo", "gemma"])
def test_rejected_drafts_and_dropped_runs_leave_no_trace(bundles, name):
    bundle, tokens = bundles[name], random_tokens(22, 2)
    want = whole(bundle.spec, oracle_weights(bundle), tokens)
    backend, pools = open_backend(bundle)
    slots, at = pools.admit(40), 15
    feed(backend, slots, tokens[:15], [15])
    rng = np.random.default_rng(3)
    while at < 19:
        wrong = np.concatenate([tokens[at : at + 2], rng.integers(0, 258, 2)])
        backend.run([Step(slots, at, rng.integers(0, 258, 4), np.array([3]))])  # dropped
        (out,) = backend.run([Step(slots, at, wrong, np.array([0, 1]))])
        assert error(out.logits, want[at : at + 2]) < 2e-2, at
        backend.commit([2])
        at += 2
    backend.run([Step(slots, at, rng.integers(0, 258, 9), np.array([8]))])  # a long step, dropped
    backend.run([Step(slots, at, rng.integers(0, 258, 4), np.array([3]))])  # a short one, dropped
    (out,) = backend.run([Step(slots, at - 2, tokens[at - 2 : at], np.array([1]))])  # back by what a ring allows
    assert error(out.logits, want[at - 1 : at]) < 2e-2
    (out,) = backend.run([Step(slots, at, tokens[at:], np.array([2]))])
    assert error(out.logits, want[21:]) < 2e-2


def test_part_of_a_long_step_may_be_accepted(bundles):
    bundle, tokens = bundles["mimo"], random_tokens(17, 4)
    want = whole(bundle.spec, oracle_weights(bundle), tokens)
    backend, pools = open_backend(bundle)
    slots = pools.admit(17)
    backend.run([Step(slots, 0, np.concatenate([tokens[:13], random_tokens(3, 5)]), np.array([], np.int64))])
    backend.commit([13])
    assert error(feed_from(backend, slots, tokens, 13), want[13:]) < 2e-2


def feed_from(backend, slots, tokens, at):
    rows = []
    for i in range(at, len(tokens)):
        (out,) = backend.run([Step(slots, i, tokens[i : i + 1], np.array([0]))])
        rows.append(out.logits.copy())
        backend.commit([1])
    return np.concatenate(rows)


def test_two_sequences_in_one_run(bundles):
    bundle = bundles["qwen"]
    a, b = random_tokens(12, 6), random_tokens(12, 7)
    backend, pools = open_backend(bundle)
    slots = pools.admit(12), pools.admit(12)
    feed(backend, slots[0], a[:9], [9])
    feed(backend, slots[1], b[:11], [11])
    outs = backend.run([Step(slots[0], 9, a[9:], np.arange(3)), Step(slots[1], 11, b[11:], np.array([0]))])
    backend.commit([3, 1])
    weights = oracle_weights(bundle)
    assert error(outs[0].logits, whole(bundle.spec, weights, a)[9:]) < 2e-2
    assert error(outs[1].logits, whole(bundle.spec, weights, b)[11:]) < 2e-2
    with pytest.raises(MimoEdgeError, match="one step of more than 4 rows"):
        backend.run([Step(slots[0], 0, a, np.array([0])), Step(slots[1], 0, b, np.array([0]))])


def test_best_tokens_are_the_logits_best(bundles):
    bundle, tokens = bundles["qwen"], random_tokens(8, 8)
    backend, pools = open_backend(bundle)
    slots = pools.admit(8)
    (out,) = backend.run([Step(slots, 0, tokens[:3], np.arange(3))])
    want = out.logits.argmax(1)
    assert backend.best(Step(slots, 0, tokens[:3], np.array([], np.int64))).tolist() == want.tolist()
    assert backend.last_step.step_s >= backend.last_step.queue_s > 0


def test_arrays_on_the_device_are_lent_and_taken(bundles):
    bundle, tokens = bundles["qwen"], random_tokens(7, 9)
    backend, pools = open_backend(bundle)
    (out,) = backend.run([Step(pools.admit(8), 0, tokens, np.array([6]))])
    hidden = backend.hidden
    assert hidden.shape == (16, bundle.spec.hidden_size)
    row = DeviceArray(hidden.address + 6 * 4 * 32, (1, 32), hidden.dtype, owner=backend)
    assert np.array_equal(backend.head(row), out.logits)
    assert backend.logits.shape == (4, 258)
    with pytest.raises(BadInputError, match=r"float16 \(1, 32\).*allowed: float32 \[rows, 32\] on GPU 0"):
        backend.head(DeviceArray(hidden.address, (1, 32), np.dtype("<f2")))
    with pytest.raises(BadInputError, match="on another kind of device"):
        backend.head(torch.zeros(1, 32))


def test_nothing_is_allocated_after_allocate_and_everything_is_given_back(bundles):
    bundle = bundles["mimo"]
    api = fake_cuda(bundle)
    backend = CudaBackend.open(bundle, api=api)
    layout = plan_layout(bundle.spec, 128)
    backend.allocate(layout)
    memory = backend.memory()
    stored = sum(b.nbytes for b in backend.programs.buffers.values() if b.role == "weight")
    assert stored <= memory["weights"] < stored + 256 * len(backend.programs.buffers)
    api.calls.clear()
    feed(backend, KvPools(layout).admit(20), random_tokens(20, 10), [16, 1, 2])
    assert not {c for c in api.calls if "Alloc" in c or "Module" in c or "Capture" in c or c == "cuLaunchKernelEx"}
    one = ["cuCtxSetCurrent", "cuMemcpyHtoDAsync", "cuGraphLaunch", "cuMemcpyDtoHAsync", "cuStreamSynchronize"]
    api.calls.clear()
    backend.run([Step(KvPools(layout).admit(20), 0, random_tokens(1, 11), np.array([0]))])
    assert api.calls == one
    backend.allocate(layout)  # again: the old pools go first
    assert backend.memory() == memory
    backend.close()
    assert not api.live and api.calls[-1] == "cuDevicePrimaryCtxRelease"


def test_a_step_that_does_not_fit_is_refused(bundles):
    backend, pools = open_backend(bundles["qwen"])
    slots = pools.admit(10)
    with pytest.raises(MimoEdgeError, match="rows up to 65 do not fit into 1 pages"):
        backend.run([Step(slots, 63, random_tokens(2, 0), np.array([0]))])
    with pytest.raises(MimoEdgeError, match="a step of 17 rows: this bundle's kernels take at most 16"):
        backend.run([Step(slots, 0, random_tokens(17, 0), np.array([0]))])
    with pytest.raises(MimoEdgeError, match=r"pages of 64 and a context of 256 tokens, not 32 and 128"):
        backend.allocate(plan_layout(backend.spec, 128, page_size=32))


def test_rows_copied_out_and_into_another_place_continue_the_sequence(bundles):
    bundle, tokens = bundles["mimo"], random_tokens(20, 12)
    want = whole(bundle.spec, oracle_weights(bundle), tokens)
    backend, pools = open_backend(bundle)
    assert isinstance(backend, RowCopies) and backend.row_format == "float16 cuda sm_87"
    here, there = pools.admit(70), pools.admit(100)
    feed(backend, here, tokens[:18], [16, 2])
    for kind, first in (("full", 0), ("window", 11)):
        layers = [bundle.spec.attention[layer.attention] for layer in bundle.spec.layers if layer.attention == kind]
        rows = np.full(sum(a.kv_elements for a in layers) * 2 * (18 - first), 0xAA, np.uint8)
        backend.read_rows(here, kind, first, 18, rows)
        backend.write_rows(there, kind, first, 18, rows)
    assert error(feed_from(backend, there, tokens, 18), want[18:]) < 2e-2
