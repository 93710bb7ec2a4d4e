"""The onnxruntime backend on pools against the oracle: chunks, rings that wrap, window edges, NaN in free slots."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from rows import error, feed, whole
from specs import ALL, FULL, WINDOW, mimo_spec
from tiny_weights import quantised, write_weights

from mimo_edge.backends.base import Step
from mimo_edge.backends.onnxruntime import FLOAT_MODEL, MODEL, OnnxRuntimeBackend
from mimo_edge.backends.onnxruntime_session import Binding
from mimo_edge.bundle import BundleWriter
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.export.graph.cpu import emit_cpu
from mimo_edge.kv.layout import SequenceSlots, plan_layout
from mimo_edge.kv.pools import KvPools

TOKENS = 41
SPECS = {name: quantised(spec) for name, spec in ALL.items()}


@pytest.fixture
def open_backend(tmp_path):
    """spec -> (backend with pools, KvPools, oracle weights)."""

    def open_it(spec, accuracy_level=1, context=64, page_size=5, sequences=2):
        header, weights = write_weights(spec, tmp_path)
        onnx.save(emit_cpu(spec, header, accuracy_level), tmp_path / MODEL)
        backend = OnnxRuntimeBackend(spec, tmp_path / MODEL, threads=1)
        layout = plan_layout(spec, context, sequences=sequences, page_size=page_size)
        backend.allocate(layout)
        return backend, KvPools(layout), weights

    return open_it


def random_tokens(spec, seed, count=TOKENS):
    return np.random.default_rng(seed).integers(0, spec.vocab_size, count)


@pytest.mark.parametrize("name", SPECS)
def test_any_chunking_gives_the_oracles_logits(name, open_backend):
    spec = SPECS[name]
    tokens = random_tokens(spec, 3)
    backend, pools, weights = open_backend(spec)
    want = whole(spec, weights, tokens)
    for chunks in ([1] * TOKENS, [TOKENS], [1, 7, 20, 13], [30, *[1] * 11]):
        slots = pools.admit(TOKENS)
        assert error(feed(backend, slots, tokens, chunks), want) < 1e-5, chunks
        pools.release(slots)


@pytest.mark.parametrize("name", SPECS)
def test_nan_in_free_slots_changes_nothing(name, open_backend):
    spec = SPECS[name]
    tokens = random_tokens(spec, 4)
    backend, pools, weights = open_backend(spec)
    for pool in backend._pools:
        pool[0].fill(np.nan), pool[1].fill(np.nan)
    pools.admit(9)  # a neighbour, so that the sequence does not start at slot 0
    got = feed(backend, pools.admit(TOKENS), tokens, [11, 1, 1, 28])
    assert error(got, whole(spec, weights, tokens)) < 1e-5


def test_two_sequences_in_one_run_equal_each_alone(open_backend):
    spec = SPECS["mimo"]
    a, b = random_tokens(spec, 5, 60).reshape(2, 30)
    backend, pools, weights = open_backend(spec)
    slots = [pools.admit(30), pools.admit(30)]
    outs = []
    for i in range(0, 30, 3):
        steps = [Step(s, i, t[i : i + 3], np.array([2])) for s, t in zip(slots, (a, b), strict=True)]
        outs.append([o.logits[0].copy() for o in backend.run(steps)])
        backend.commit([3, 3])
    for j, tokens in enumerate((a, b)):
        assert error(np.stack([o[j] for o in outs]), whole(spec, weights, tokens)[2::3]) < 1e-5


def test_rows_that_are_not_accepted_leave_no_trace(open_backend):
    """Four rows a step, 0 to 4 of them accepted, past several turns of the ring: plain decoding's logits all along."""
    spec = quantised(mimo_spec(window=5))
    rng = np.random.default_rng(6)
    tokens = random_tokens(spec, 6)
    backend, pools, weights = open_backend(spec)
    want = whole(spec, weights, tokens)
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


def test_a_run_that_is_not_committed_is_an_abort(open_backend):
    spec = SPECS["mimo"]
    tokens = random_tokens(spec, 7, 20)
    backend, pools, _ = open_backend(spec)
    slots = pools.admit(20)
    feed(backend, slots, tokens[:12], [12])
    before = [pool.copy() for pair in backend._pools for pool in pair]
    backend.run([Step(slots, 12, tokens[12:], np.array([0]))])
    after = [pool for pair in backend._pools for pool in pair]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("window", [1, 2, 7, None])
def test_a_huge_key_is_seen_at_distance_w_minus_1_and_not_at_w(window, open_backend):
    """Key and value of one position are made huge in the pool; logits of later single tokens change iff it is seen."""
    spec = quantised(replace(mimo_spec(window or 8), layers=(FULL if window is None else WINDOW,)))
    tokens, huge = random_tokens(spec, 8, 14), 3
    backend, pools, _ = open_backend(spec)
    slots = pools.admit(14)
    feed(backend, slots, tokens[: huge + 1], [huge + 1])
    ring = backend._layout.rings.get("window")
    slot = huge if window is None else huge % ring
    for t in range(huge + 1, huge + 1 + (ring or 9) - 1):  # while the ring still holds the position
        step = [Step(slots, t, tokens[t : t + 1], np.array([0]))]
        plain = backend.run(step)[0].logits.copy()
        saved = [pool[slot].copy() for pool in backend._pools[0]]
        backend._pools[0][0][slot] *= 1e3
        backend._pools[0][1][slot] = 1e6
        seen = not np.array_equal(backend.run(step)[0].logits, plain)
        for pool, row in zip(backend._pools[0], saved, strict=True):
            pool[slot] = row
        backend.run(step)
        backend.commit([1])
        assert seen == (window is None or t - huge < window), t


def test_no_logits_when_none_are_wanted(open_backend):
    spec = SPECS["gemma"]
    tokens = random_tokens(spec, 9, 10)
    backend, pools, weights = open_backend(spec)
    slots = pools.admit(10)
    (out,) = backend.run([Step(slots, 0, tokens[:9], np.array([], np.int64))])
    assert out.logits.shape == (0, spec.vocab_size)
    backend.commit([9])
    (out,) = backend.run([Step(slots, 9, tokens[9:], np.array([0]))])
    assert error(out.logits, whole(spec, weights, tokens)[9:]) < 1e-5


def test_weights_and_kv_are_bound_not_copied(open_backend):
    """A value written into the pool after binding is what the next run sees, without binding again."""
    spec = SPECS["qwen"]
    tokens = random_tokens(spec, 10, 6)
    backend, pools, _ = open_backend(spec)
    slots = pools.admit(6)
    feed(backend, slots, tokens[:5], [5])
    before = backend.run([Step(slots, 5, tokens[5:], np.array([0]))])[0].logits.copy()
    backend._pools[0][1][slots.pages[0] * 5] += 1
    [(_, lane)] = backend._pending
    lane.binding.run(1, 5)
    assert not np.allclose(lane.logits, before)


def test_a_device_s_copies_of_inputs_are_renewed_for_every_step():
    """Providers other than the CPU's copy an input when it is bound."""

    class OnDevice:
        def __init__(self):
            self.bound, self.ran = {}, []

        def get_providers(self):
            return ["CUDAExecutionProvider", "CPUExecutionProvider"]

        def io_binding(self):
            return self

        def bind_cpu_input(self, name, array):
            self.bound[name] = array.copy()

        def run_with_iobinding(self, binding, options):
            self.ran.append(self.bound["past"].tolist())

    session, past = OnDevice(), np.zeros(2, np.float32)
    binding = Binding(session)
    binding.input("past", past)
    binding.run(1, 0)
    past += 1
    binding.run(1, 1)
    assert session.ran == [[0, 0], [1, 1]]


def test_pages_out_of_order_and_rows_beyond_the_pages_are_refused(open_backend):
    spec = SPECS["qwen"]
    backend, _, _ = open_backend(spec)
    step = Step(SequenceSlots((0, 2), 0), 0, np.array([1]), np.array([0]))
    with pytest.raises(MimoEdgeError, match="one run"):
        backend.run([step])
    with pytest.raises(MimoEdgeError, match="do not fit into 2 pages of 5"):
        backend.run([replace(step, slots=SequenceSlots((0, 1), 0), start=10)])


def test_opens_the_graph_that_the_bundle_has_for_the_precision(tmp_path):
    spec = SPECS["mimo"]
    with BundleWriter(tmp_path / "bundle") as writer:
        header, weights = write_weights(spec, writer.path("."))
        onnx.save(emit_cpu(spec, header, 4), writer.path(MODEL))
        writer.path("tokenizer.json").write_text("{}")
        onnx.save(emit_cpu(spec, header, 1), writer.path(FLOAT_MODEL))
        bundle = writer.finish(spec, "cpu", "tiny")
    tokens = random_tokens(spec, 11)
    want = whole(spec, weights, tokens)
    errors = []
    for exact in (False, True):
        backend = OnnxRuntimeBackend.open(bundle, threads=1, float_activations=exact)
        layout = plan_layout(spec, 64)
        backend.allocate(layout)
        errors.append(error(feed(backend, KvPools(layout).admit(64), tokens, [20, 21]), want))
        backend.close()
    assert 1e-4 < errors[0] < 0.2 and errors[1] < 1e-5


def test_a_graph_that_cannot_be_loaded_is_one_line(tmp_path):
    (tmp_path / MODEL).write_bytes(b"not a graph")
    with pytest.raises(MimoEdgeError, match=r"cannot load .*model\.cpu\.onnx") as caught:
        OnnxRuntimeBackend(SPECS["mimo"], tmp_path / MODEL)
    assert "\n" not in str(caught.value) and not isinstance(caught.value, BadInputError)
