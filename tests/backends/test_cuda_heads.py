"""MTP heads of the cuda backend over a fake driver, in Triton's interpreter: drafts against the oracle, rounds against
plain decoding."""

from dataclasses import replace

import numpy as np
import pytest
import tiny_weights
import torch
from cuda_bundle import open_cuda, write_cuda_bundle
from rows import error
from specs import RandomWeights, gemma_spec, mimo_spec, qwen_spec

from mimo_edge.backends import oracle
from mimo_edge.backends.base import DraftHeads, DraftRounds, Round, Step
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.bundle import read_tensors
from mimo_edge.decoding.sampling import candidates, gumbel
from mimo_edge.errors import MimoEdgeError
from mimo_edge.export.programs.tuning import Tuning
from mimo_edge.kernels.windowed_attention.variants import Tuning as AttentionTuning
from mimo_edge.kv.layout import HEAD_ROWS, HIDDEN_ROWS, plan_layout
from mimo_edge.kv.pools import KvPools
from mimo_edge.request import GREEDY, SamplingParams
from mimo_edge.spec import MAX_DRAFTS, MtpSpec

WINDOW, VOCAB, CONTEXT, CHUNK = 5, 64, 64, 16
NONE = np.array([], np.int64)
# Few programs a launch: the interpreter takes as long for a small one as for a large one.
COARSE = Tuning(
    AttentionTuning(parts=1),
    {op: [{"tiles": 1, "row_tiles": 4, "warps": 1, "stages": 2}] for op in ("linear", "head", "gate_up")},
)
K = MAX_DRAFTS


def one_layer(spec, **changes):
    return replace(spec, layers=spec.layers[:1], max_context=CONTEXT, **changes)


MIMO = one_layer(mimo_spec(WINDOW, mtp=3))
SPECS = {
    "mimo-v2": MIMO,
    "mimo-7b": one_layer(qwen_spec(), mtp=MtpSpec(1, "full", "dense", order="hidden_first", zero_first=True)),
    "gated": one_layer(
        mimo_spec(WINDOW, gate=True), mtp=MtpSpec(1, "window", "dense", hidden="post_norm"), output_bias=True
    ),
    "norms": one_layer(gemma_spec((WINDOW, 7)), mtp=MtpSpec(1, "full", "dense", "hidden_first", "post_norm")),
    "chained": replace(MIMO, mtp=replace(MIMO.mtp, heads=2, chained=True)),
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return {name: write_cuda_bundle(folder / name, spec, vocab=VOCAB, tuning=COARSE) for name, spec in SPECS.items()}


class Agreeing(RandomWeights):
    """Blocks that add little, heads that see their token: they mostly draft what the model chooses."""

    def __init__(self, spec, seed):
        super().__init__(spec, seed)
        for name, value in self.tensors.items():
            if name.endswith((".o", ".down")):
                value *= 0.15
            elif name.endswith(".proj"):
                value.mul_(0.15)[:, : spec.hidden_size] += torch.eye(spec.hidden_size)
            elif name.endswith("norm"):
                value.fill_(1)


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_weights, "RandomWeights", Agreeing)
        return write_cuda_bundle(tmp_path_factory.mktemp("agreeing") / "b", MIMO, vocab=VOCAB, tuning=COARSE, seed=12)


def open_backend(bundle, heads=None):
    backend = open_cuda(bundle)
    layout = plan_layout(
        bundle.spec, CONTEXT, sequences=3, element_bytes=2, heads=backend.heads if heads is None else heads, chunk=CHUNK
    )
    backend.allocate(layout)
    pools = KvPools(layout)
    pools.admit(5)  # a neighbour, so that neither pages nor rings begin at 0
    return backend, layout, pools


def random_tokens(count, seed):
    return np.random.default_rng(seed).integers(0, VOCAB, count)


def evaluate(backend, slots, tokens, start=0):
    """Commits rows without asking for anything."""
    for at in range(0, len(tokens), CHUNK):
        part = tokens[at : at + CHUNK]
        backend.run([Step(slots, start + at, part, NONE)])
        backend.commit([len(part)])


class Oracle:
    """All rows of a text at once: the main model's hidden states and what each head says."""

    def __init__(self, bundle):
        self.spec = bundle.spec
        self.weights = BundleWeights(bundle.spec, read_tensors(bundle.file("weights.safetensors")), keep=True)

    def head(self, tokens, m, n, drafts=(), held=0):
        """Logits of head m behind n rows of `tokens`, with drafts behind token n; without rows in front of `held`."""
        rows = torch.arange(n)
        known = torch.from_numpy(np.concatenate([tokens[: n + 1], np.array(drafts, np.int64)]))
        past = [None] * len(self.spec.layers)
        hidden = oracle.forward(self.spec, self.weights, known[:n], rows, past, NONE).hidden
        for i in range(m + 1):
            if i == m or self.spec.mtp.chained:
                part = slice(held, n)
                ahead = known[part.start + 1 + i : n + 1 + i]
                args = (hidden[part], ahead, rows[part], None)
                logits, own, _, _ = oracle.mtp(self.spec, self.weights, i, *args)
                if self.spec.mtp.chained:
                    hidden[part] = own
        return logits[-1].numpy()


def draft_all(backend, slots, tokens, n, start):
    """Every head's logits behind n rows, rows from `start` on evaluated anew; drafts are the best tokens."""
    drafts, rows = [], []
    for m in range(backend.heads):
        known = np.concatenate([tokens[start + 1 + m : n + 1], np.array(drafts, np.int64)])
        rows.append(backend.draft(slots, m, start, start, known).copy())
        drafts.append(int(rows[-1].argmax()))
    return drafts, rows


@pytest.mark.parametrize("name", SPECS)
def test_drafts_behind_a_prompt_and_behind_later_rows(bundles, name):
    """All rows in one call, in pieces and padded; then only the newest four, on the ring or the pages as they are."""
    bundle, tokens, n = bundles[name], random_tokens(30, 1), 13
    backend, layout, pools = open_backend(bundle)
    assert isinstance(backend, DraftHeads) and isinstance(backend, DraftRounds) and backend.heads == layout.heads
    slots, windowed = pools.admit(40), layout.head_attention.window is not None
    evaluate(backend, slots, tokens[:n])
    # a chain needs more than a window for the oracle's own rows
    start = n - K - WINDOW if windowed and name != "chained" else n - (K + WINDOW + 1)
    start = start if windowed else 0
    held = start if name == "chained" else 0
    want = Oracle(bundle)
    drafts, rows = draft_all(backend, slots, tokens, n, start)
    for m, row in enumerate(rows):
        assert error(row, want.head(tokens, m, n, drafts[:m], held)) < 2e-2, m
    backend.run([Step(slots, n, tokens[n : n + 1], NONE)])
    backend.commit([1])  # no draft held: the newest K + 1 rows were not final
    m, n = backend.heads - 1, n + 1
    for head in range(0 if name == "chained" else m, m + 1):
        drafted = random_tokens(head, 2)
        row = backend.draft(slots, head, start, n - K - 1, np.concatenate([tokens[n + head - K : n + 1], drafted]))
    assert error(row, want.head(tokens, m, n, drafted, held)) < 2e-2
    backend.close()


def gap(logits, sampling, position):
    """The best token, and by how much its score leads."""
    if sampling.temperature == 0:
        ids, scores = np.arange(len(logits)), logits.astype(np.float64)
    else:
        ids, scores = candidates(logits, sampling)
        scores = scores + gumbel(sampling.seed, position, ids)
    order = np.argsort(-scores, kind="stable")[:2]
    return int(ids[order[0]]), scores[order[0]] - scores[order[-1]] if len(order) > 1 else 1.0


def check_tokens(bundle, tokens, first, sampling):
    """Tokens from `first` on are what plain decoding samples, but for near ties."""
    rows, weights = torch.arange(len(tokens) - 1), Oracle(bundle).weights
    past = [None] * len(bundle.spec.layers)
    logits = oracle.forward(bundle.spec, weights, torch.from_numpy(tokens[:-1]), rows, past).logits.numpy()
    right = [gap(logits[i - 1], sampling, i) for i in range(first, len(tokens))]
    clear = [(token, best) for token, (best, lead) in zip(tokens[first:], right, strict=True) if lead > 0.02]
    assert len(clear) > 0.8 * len(right) and all(token == best for token, best in clear)


def by_rounds(backend, slots, prompt, count, sampling, drafts):
    """`count` tokens in rounds of up to `drafts` drafts, and how many each round accepted."""
    evaluate(backend, slots, prompt[:-1])
    tokens, n, accepted = list(prompt), len(prompt) - 1, []
    held = max(0, n - K - WINDOW)
    for m in range(drafts):  # the heads catch up
        backend.catch_up(slots, m, held, held, np.array(tokens[held + 1 + m : n - K + m], np.int64))
    while len(tokens) < len(prompt) + count:
        known = np.array(tokens[max(0, n - K) :], np.int64)
        most = min(drafts, len(prompt) + count - len(tokens))
        new = backend.round(Round(slots, n, known, most, held, sampling)).tolist()
        backend.commit([len(new)])
        tokens += new
        n += len(new)
        accepted.append(len(new) - 1)
    return tokens[len(prompt) :], accepted


def test_rounds_give_the_tokens_of_plain_decoding(agreeing):
    """Rings wrap, drafts are accepted and rejected at every position, the last round has room for one draft."""
    backend, _, pools = open_backend(agreeing)
    prompt, counts = random_tokens(11, 4), set()
    for sampling, count in ((GREEDY, 7), (SamplingParams(temperature=0.8, min_p=0.001, seed=2**33 + 8), 8)):
        slots = pools.admit(60)
        got, accepted = by_rounds(backend, slots, prompt, count, sampling, 3)
        tokens = np.concatenate([prompt, got])
        check_tokens(agreeing, tokens, len(prompt), sampling)
        counts |= set(accepted)
    assert counts == {0, 1, 2, 3}
    # all rows of the heads are what the text's tokens make them
    n = len(tokens) - 2
    row = backend.draft(slots, 1, 0, n - K - 1, tokens[n + 1 - K : n + 2])
    assert error(row, Oracle(agreeing).head(tokens, 1, n, tokens[-1:])) < 2e-2
    backend.close()


def copy_rows(backend, layout, here, there, n):
    """What a cached prefix holds of heads and hidden states."""
    for kind in layout.row_kinds:
        if kind.name in (HEAD_ROWS, HIDDEN_ROWS):
            first = 0 if kind.window is None else max(0, n - kind.window + 1)
            rows = np.full(kind.token_bytes * (n - first), 0xAA, np.uint8)
            backend.read_rows(here, kind.name, first, n, rows)
            backend.write_rows(there, kind.name, first, n, rows)


def test_copied_rows_of_a_head_that_sees_everything_draft_as_the_first_do(bundles):
    bundle, tokens, n = bundles["mimo-7b"], random_tokens(15, 5), 13
    backend, layout, pools = open_backend(bundle)
    here, there = pools.admit(20), pools.admit(20)
    evaluate(backend, here, tokens[:n])
    backend.catch_up(here, 0, 0, 0, tokens[1 : n - K])
    copy_rows(backend, layout, here, there, n)
    rows = [backend.draft(s, 0, 0, n - K - 1, tokens[n - K : n + 1]).copy() for s in (here, there)]
    assert np.array_equal(*rows) and rows[0].any()
    backend.close()


def test_copied_hidden_states_bring_a_head_back_and_older_rows_count_as_if_there_were_none(bundles):
    """The window of the newest rows reaches back to 5; what the ring has in front of row 8 is another text's."""
    bundle, tokens, n = bundles["gated"], random_tokens(15, 6), 13
    backend, layout, pools = open_backend(bundle)
    here, there = pools.admit(20), pools.admit(20)
    evaluate(backend, here, tokens[:n])
    copy_rows(backend, layout, here, there, n)
    backend.catch_up(there, 0, 5, 5, random_tokens(8, 8))
    got = backend.draft(there, 0, 8, 8, tokens[9 : n + 1])
    assert error(got, Oracle(bundle).head(tokens, 0, n, held=8)) < 2e-2
    backend.close()


def test_without_heads_nothing_is_kept_for_them(bundles):
    bundle = bundles["mimo-v2"]
    backend, layout, _ = open_backend(bundle)
    with_heads = backend.memory()["kv"]
    assert with_heads >= layout.full_bytes + layout.window_bytes
    few, fewer, _ = open_backend(bundle, heads=1)
    assert fewer.heads == 1 and few.memory()["kv"] < with_heads
    none, layout, pools = open_backend(bundle, heads=0)
    names = none.programs.with_heads(0).buffers
    assert not [n for n, b in names.items() if b.role == "kv" and n.startswith("mtp.")]
    assert none.memory()["kv"] < few.memory()["kv"]
    slots, tokens = pools.admit(5), random_tokens(1, 9)
    none.best(Step(slots, 0, tokens, NONE))
    with pytest.raises(MimoEdgeError, match="the layout that was allocated has no MTP heads"):
        none.round(Round(slots, 1, tokens, 1, 0, GREEDY))
    with pytest.raises(MimoEdgeError, match="a round of 2 drafts behind 1 rows: 1 heads, 2 tokens"):
        few.round(Round(slots, 1, random_tokens(2, 9), 2, 0, GREEDY))


def test_layouts_that_the_kernels_do_not_fit_are_refused(bundles, tmp_path):
    bundle = bundles["mimo-7b"]
    backend = open_cuda(bundle)
    with pytest.raises(MimoEdgeError, match="the kernels are for 1 MTP heads, not 2: export the model again"):
        backend.allocate(plan_layout(bundle.spec, CONTEXT, heads=2, chunk=CHUNK))
    with pytest.raises(MimoEdgeError, match="the kernels keep 28 hidden states, not 36: evaluate at most 16 rows a s"):
        backend.allocate(plan_layout(bundle.spec, CONTEXT, heads=1, chunk=24))
    old = write_cuda_bundle(tmp_path / "old", one_layer(qwen_spec()), vocab=VOCAB, tuning=COARSE)
    assert open_cuda(old).heads == 0


def test_a_round_is_one_copy_in_one_graph_and_one_copy_out(bundles):
    """Logits that are not finite give no token."""
    backend, _, pools = open_backend(bundles["gated"])
    slots, api = pools.admit(20), backend.driver._api
    evaluate(backend, slots, random_tokens(2, 1))
    api.calls.clear()
    asked = Round(slots, 2, random_tokens(3, 2), 1, 0, GREEDY)
    tokens = backend.round(asked)
    assert api.calls == [
        "cuCtxSetCurrent", "cuMemcpyHtoDAsync", "cuGraphLaunch", "cuMemcpyDtoHAsync", "cuStreamSynchronize"
    ]  # fmt: skip
    assert backend.last_step.step_s >= backend.last_step.queue_s > 0 and (tokens >= 0).all()
    backend.commit([1])
    backend._arenas["weights"].fill("norm", 0xFF)
    assert backend.round(asked)[0] == -1
    backend.close()
