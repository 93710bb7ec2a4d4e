"""MTP heads of the CPU backends against heads without rings: random accept counts, gaps, restarts, neighbours, NaN."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from heads import HEADS, Game, K, PlainHeads, play
from rows import error, feed, whole
from specs import mimo_spec
from tiny_bundle import write_bundle
from tiny_weights import INT4, quantised, write_weights

from mimo_edge.backends.base import DraftHeads, Step
from mimo_edge.backends.onnxruntime import MODEL, OnnxRuntimeBackend
from mimo_edge.backends.reference import ReferenceBackend
from mimo_edge.bundle import head_graphs
from mimo_edge.export.graph.cpu import emit_cpu, emit_cpu_head
from mimo_edge.kv.layout import HEAD_ROWS, HIDDEN_ROWS, plan_layout
from mimo_edge.kv.pools import KvPools
from mimo_edge.kv.windows import first_visible, ring_positions
from mimo_edge.spec import QuantSpec

TOKENS, CHUNK = 75, 16
BACKENDS = ["reference", "onnxruntime"]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny products; threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def open_backend(tmp_path):
    """(name, spec) -> (backend without pools, oracle weights)."""

    def open_it(name, spec, accuracy_level=1):
        header, weights = write_weights(spec, tmp_path)
        if name == "reference":
            return ReferenceBackend(spec, weights), weights
        onnx.save(emit_cpu(spec, header, accuracy_level), tmp_path / MODEL)
        graphs = [tmp_path / graph for graph in head_graphs(MODEL, spec)]
        for m, graph in enumerate(graphs):
            onnx.save(emit_cpu_head(spec, header, m, accuracy_level), graph)
        return OnnxRuntimeBackend(spec, tmp_path / MODEL, threads=1, heads=graphs), weights

    return open_it


def allocate(backend, spec, context=80, sequences=2, poison=False):
    layout = plan_layout(spec, context, sequences, page_size=5, heads=spec.mtp.heads, chunk=CHUNK)
    backend.allocate(layout)
    if poison:
        for pool in pools_of(backend, spec):
            pool[...] = np.nan
    return KvPools(layout)


def pools_of(backend, spec):
    kinds = [HEAD_ROWS, HIDDEN_ROWS, *{layer.attention for layer in spec.layers}]
    return [np.asarray(pool) for kind in kinds for layer in backend._host_pools(kind) for pool in layer]


def quant_of(name):
    """Half of the specs float, half quantised."""
    return QuantSpec() if list(HEADS).index(name) % 2 else INT4


def random_tokens(spec, rng, count=TOKENS):
    return rng.integers(0, spec.vocab_size, count)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", HEADS)
def test_drafts_equal_those_of_heads_without_rings(name, backend, open_backend):
    spec, rng = quantised(HEADS[name], quant_of(name)), np.random.default_rng(1)
    opened, weights = open_backend(backend, spec)
    assert isinstance(opened, DraftHeads) and opened.heads == spec.mtp.heads
    pools = allocate(opened, spec, poison=True)
    games = [Game(opened, spec, weights, pools.admit(80), random_tokens(spec, rng), rng) for _ in range(2)]
    assert play(games, rng) < 1e-4
    assert games[0].n > TOKENS - K - 1 and len(games[0].errors) > 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_context_shorter_than_the_window(backend, open_backend):
    spec, rng = quantised(mimo_spec(30, mtp=3)), np.random.default_rng(2)
    opened, weights = open_backend(backend, spec)
    pools = allocate(opened, spec, context=21, poison=True)
    games = [Game(opened, spec, weights, pools.admit(21), random_tokens(spec, rng, 21), rng) for _ in range(2)]
    assert play(games, rng, rounds=12) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mimo", "mimo-7b"])
def test_a_long_prompt_then_the_heads_catch_up_in_one_call(name, backend, open_backend):
    """Chunks longer than the ring of hidden states, and a first draft as long as the heads see back."""
    spec, rng = quantised(HEADS[name]), np.random.default_rng(3)
    opened, weights = open_backend(backend, spec)
    pools = allocate(opened, spec, poison=True)
    tokens, n = random_tokens(spec, rng), 70
    slots, plain = pools.admit(80), PlainHeads(spec, weights, tokens)
    feed(opened, slots, tokens[:n], [40, 14, CHUNK])
    window = opened._layout.head_attention.window
    start = n - K - window if window else n - opened._layout.rings[HIDDEN_ROWS]
    for head in range(spec.mtp.heads):
        ahead = random_tokens(spec, rng, n - start)
        got = opened.draft(slots, head, start, start, ahead)
        assert error(got, plain.draft(head, start, start, ahead)) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_that_nobody_asked_for_cost_nothing(backend, open_backend):
    """No pool, no graph loaded, no hidden states; the model's logits are the same."""
    spec = quantised(mimo_spec(mtp=3))
    opened, weights = open_backend(backend, spec)
    tokens = random_tokens(spec, np.random.default_rng(4), 30)
    logits = []
    for heads in (0, 3):
        layout = plan_layout(spec, 64, heads=heads, chunk=CHUNK)
        opened.allocate(layout)
        logits.append(feed(opened, KvPools(layout).admit(64), tokens, [20, 1, 9]))
        assert (opened._heads is None) == (heads == 0)
    assert np.array_equal(*logits) and error(logits[0], whole(spec, weights, tokens)) < 1e-5
    if backend == "onnxruntime":
        assert not opened._heads._lanes


def first_drafts(backend, spec, tokens, ahead):
    """Logits of every head behind the same rows."""
    slots = allocate(backend, spec).admit(80)
    feed(backend, slots, tokens, [len(tokens)])
    return [backend.draft(slots, head, 0, 0, ahead).copy() for head in range(spec.mtp.heads)]


def test_heads_differ(open_backend):
    """One head three times over would draft fairly well, so that it is one's own is asserted."""
    spec, rng = quantised(mimo_spec(mtp=3)), np.random.default_rng(5)
    backend, weights = open_backend("onnxruntime", spec)
    tokens, ahead = random_tokens(spec, rng, 12), random_tokens(spec, rng, 12)
    plain = PlainHeads(spec, weights, tokens)
    want = [plain.draft(head, 0, 0, ahead) for head in range(3)]
    for got in (
        first_drafts(backend, spec, tokens, ahead),
        first_drafts(ReferenceBackend(spec, weights), spec, tokens, ahead),
    ):
        assert all(error(a, b) < 1e-4 for a, b in zip(got, want, strict=True))
        assert min(error(got[a], got[b]) for a, b in ((0, 1), (0, 2), (1, 2))) > 0.2
    backend._head_graphs = [backend._head_graphs[0]] * 3
    same = first_drafts(backend, spec, tokens, ahead)
    assert error(same[0], want[0]) < 1e-4 and min(error(same[i], want[i]) for i in (1, 2)) > 0.2


def test_8_bit_activations_are_close_and_not_exact(open_backend):
    spec, rng = quantised(mimo_spec(mtp=3)), np.random.default_rng(6)
    backend, weights = open_backend("onnxruntime", spec, accuracy_level=4)
    tokens, ahead = random_tokens(spec, rng, 12), random_tokens(spec, rng, 12)
    plain = PlainHeads(spec, weights, tokens)
    for head, got in enumerate(first_drafts(backend, spec, tokens, ahead)):
        assert 1e-4 < error(got, plain.draft(head, 0, 0, ahead)) < 0.2


def test_a_full_ring_is_bound_once(open_backend, monkeypatch):
    spec, rng = quantised(mimo_spec(mtp=1)), np.random.default_rng(8)
    backend, weights = open_backend("onnxruntime", spec)
    pools = allocate(backend, spec)
    game = Game(backend, spec, weights, pools.admit(80), random_tokens(spec, rng), rng)
    game.step(40)
    game._compare(0, 29, 29)
    game._compare(0, 29, 36)
    lane, bound = backend._heads._lanes[0], []
    monkeypatch.setattr(type(lane), "_input", lambda self, name, array: bound.append(name) or array)
    for _ in range(6):
        game.step(1)
        game._compare(0, 29, game.n - K - 1)
    assert game.worst < 1e-4 and not bound


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mimo", "mimo-7b", "chained-full"])
def test_rows_copied_to_another_sequence_draft_alike(name, backend, open_backend):
    """Hidden states, and rows of heads that see everything, come out and go in as bytes."""
    spec, rng = quantised(HEADS[name]), np.random.default_rng(9)
    opened, _ = open_backend(backend, spec)
    pools, n = allocate(opened, spec, poison=True), 33
    a, b, tokens = pools.admit(80), pools.admit(80), random_tokens(spec, rng)
    for at in range(0, n, 11):
        feed_at(opened, a, tokens, at, 11)
        eager = opened._layout.head_attention.window is None
        logits = [opened.draft(a, h, 0 if eager else at, at, tokens[at + 1 : at + 12]) for h in range(spec.mtp.heads)]
    for kind in opened._layout.row_kinds:
        first = 0 if kind.slots is None else max(0, n - kind.slots)
        rows = np.full((n - first) * kind.token_bytes, 255, np.uint8)
        opened.read_rows(a, kind.name, first, n, rows)
        opened.write_rows(b, kind.name, first, n, rows)
        again = np.zeros_like(rows)
        opened.read_rows(b, kind.name, first, n, again)
        assert np.array_equal(rows, again) and np.isfinite(rows.view(np.float32)).all()
    start = n - K - 1 if opened._layout.head_attention.window is None else n - 11
    for head in range(spec.mtp.heads):
        held = 0 if opened._layout.head_attention.window is None else start
        want = opened.draft(a, head, held, start, tokens[start + 1 : n + 1]).copy()
        assert np.array_equal(opened.draft(b, head, held, start, tokens[start + 1 : n + 1]), want)
    assert logits[-1].shape == (spec.vocab_size,)


def feed_at(backend, slots, tokens, at, count):
    backend.run([Step(slots, at, tokens[at : at + count], np.array([0]))])
    backend.commit([count])


def test_bundles_without_graphs_of_heads_do_not_draft(tmp_path):
    bundle = write_bundle(tmp_path / "bundle", replace(mimo_spec(mtp=3)))
    assert OnnxRuntimeBackend.open(bundle, threads=1).heads == 3
    old = replace(
        bundle,
        manifest=replace(bundle.manifest, files={n: f for n, f in bundle.manifest.files.items() if "mtp" not in n}),
    )
    backend = OnnxRuntimeBackend.open(old, threads=1)
    assert backend.heads == 0
    layout = plan_layout(bundle.spec, 64)
    backend.allocate(layout)
    assert feed(backend, KvPools(layout).admit(64), np.arange(9), [9]).shape == (9, 258)


@pytest.mark.parametrize("window", [2, 3, 5])
def test_a_ring_of_window_plus_k_slots_is_the_smallest_that_is_exact(window):
    """Every draft that rewrites up to K+1 rows, over all lengths: what a row sees in the ring is what it should."""

    def exact(ring):
        for ends in np.ndindex(*(K + 2,) * 3):  # rows gained between four drafts
            slots, end = {}, 20
            for p in range(end):
                slots[p % ring] = p
            for gained in ends:
                n = end + gained
                for start in range(max(end - K - 1, 0), end + 1):
                    oldest = first_visible(start, window)
                    seen = [p for p in ring_positions(start, ring) if p >= oldest]
                    if sorted(seen) != list(range(oldest, start)) or any(slots[p % ring] != p for p in seen):
                        return False
                slots |= {p % ring: p for p in range(end - K - 1, n)}
                end = n
        return True

    assert exact(window + K) and not exact(window + K - 1)
