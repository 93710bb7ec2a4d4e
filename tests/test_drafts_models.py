"""Drafts with tiny random models on the reference backend: the same tokens as without, up to rounding.

Heads of random models are never right, so drafts come from a prophet that knows the reply and is right most of the
time; the heads run all the same.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import BOS, EOS, fake_text
from specs import RandomWeights, mimo_spec, qwen_spec
from tiny_bundle import write_bundle

from mimo_edge.backends import oracle
from mimo_edge.backends.reference import ReferenceBackend
from mimo_edge.cache import CacheOptions
from mimo_edge.engine import Engine
from mimo_edge.evaluation.ties import first_difference, margin
from mimo_edge.request import SamplingParams
from mimo_edge.spec import MtpSpec

EPSILON = 1e-3  # logits of random models are near 1, and float32 rounding near 1e-6
WINDOW = 8
SPECS = {
    "mimo": mimo_spec(WINDOW, mtp=3),
    "gated": mimo_spec(WINDOW, gate=True, mtp=3),
    "experts": mimo_spec(WINDOW, moe=True, mtp=3),
    "7b": replace(qwen_spec(), mtp=MtpSpec(1, "full", "dense", order="hidden_first", zero_first=True)),
    "chained": replace(mimo_spec(WINDOW, mtp=3), mtp=MtpSpec(3, "window", "mtp", chained=True)),
}
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(1.0, seed=3),
    SamplingParams(0.8, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3, seed=4),
    SamplingParams(repetition_penalty=1.5),
]


class Prophet(ReferenceBackend):
    """`reply` holds the tokens behind `start` rows; every fifth draft is wrong. `said` is what heads said."""

    reply, start, said = (), 0, ()

    def draft(self, slots, head, held, start, tokens):
        logits = super().draft(slots, head, held, start, tokens).copy()
        assert np.isfinite(logits).all()
        self.said = [*self.said, (head, start + len(tokens), tokens.tolist(), logits.copy())]
        position = start + len(tokens) + 1 + head
        at = position - self.start
        if 0 <= at < len(self.reply):
            logits[self.reply[at] ^ (position % 5 == 0)] = 100
        return logits


def engine_of(name, weights=None, **options):
    spec = replace(SPECS[name], vocab_size=258, bos_id=BOS, eos_ids=(EOS,))
    options = {"max_context": 160, "chunk": 16} | options
    return Engine(spec, fake_text(spec), Prophet(spec, weights or RandomWeights(spec, 7)), **options)


def ask(engine, prompt, foretold=(), **options):
    backend = (engine if isinstance(engine, Engine) else engine._engine).backend
    backend.reply, backend.start = foretold, len(prompt)
    generation = engine.generate(prompt, **options)
    list(generation)
    return generation.result


def assert_equal(engine, prompt, want, got, params):
    """Equal but for a tie: the two tokens at the first difference, behind the same text."""
    at = first_difference(want, got)
    if at is None:
        return
    text = [*prompt, *want[:at]]
    with torch.inference_mode():
        past = [None] * len(engine.spec.layers)
        weights = engine.backend._weights
        out = oracle.forward(engine.spec, weights, torch.tensor(text), torch.arange(len(text)), past)
    by = margin(out.logits[-1].numpy(), (want[at], got[at]), len(text), params, text)
    assert by < EPSILON, f"token {at} is {got[at]} instead of {want[at]}, by {by}"


@pytest.fixture(scope="module")
def weights():
    return {
        name: RandomWeights(replace(spec, vocab_size=258), seed) for seed, (name, spec) in enumerate(SPECS.items(), 1)
    }


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("params", SAMPLINGS, ids=["greedy", "sampled", "filtered", "penalty"])
def test_any_number_of_drafts_gives_the_same_tokens(name, params, weights):
    """Across the window, a page of 64 rows, and the context's end."""
    r = random.Random(name)
    engine = engine_of(name, weights[name])
    for length, most in ((1, 14), (55, 16), (145, 40)):
        prompt = r.choices(range(256), k=length)
        want = ask(engine, prompt, max_tokens=most, sampling=params, drafts=0)
        for drafts in (*range(1, engine.layout.heads + 1), "auto"):
            got = ask(engine, prompt, want.tokens, max_tokens=most, sampling=params, drafts=drafts)
            assert_equal(engine, prompt, want.tokens, got.tokens, params)
            if drafts != "auto" and len(want.tokens) > 8:
                assert got.mtp.steps < len(want.tokens) - 1 and 0 < got.mtp.accepted < got.mtp.drafted


@pytest.mark.parametrize("name", ["mimo", "7b", "chained"])
@pytest.mark.parametrize("cache", [None, CacheOptions(bytes=64 << 20)], ids=["", "cache"])
def test_conversations_with_any_number_of_drafts(name, cache, weights):
    """Prompts that are appended, taken back, sent again or edited, in a session and out of it."""
    r = random.Random(f"{name} {cache is None}")
    plain = engine_of(name, weights[name], drafts=0)
    engine = engine_of(name, weights[name], cache=cache, sessions=2)
    reused = 0
    with engine.session() as session:
        prompt = r.choices(range(256), k=30)
        for turn in range(10):
            params = SAMPLINGS[turn % 2]
            want = ask(plain, prompt, max_tokens=9, sampling=params)
            drafts = r.choice([1, engine.layout.heads, "auto"])
            asked = session if turn % 3 else engine
            got = ask(asked, prompt, want.tokens, max_tokens=9, sampling=params, drafts=drafts)
            assert_equal(plain, prompt, want.tokens, got.tokens, params)
            reused += got.cache.reused_tokens
            kept = r.choice([len(prompt), len(prompt), len(prompt) - 2, 20])
            prompt = [*prompt[:kept], *want.tokens[: r.randint(0, 8)], *r.choices(range(256), k=r.randint(0, 9))][:140]
    assert reused > 40


@pytest.mark.parametrize("name", SPECS)
def test_drafts_are_those_of_heads_computed_from_scratch_on_the_true_tokens(name, weights):
    """After any history: logits behind the last row against one pass over the whole text."""
    engine = engine_of(name, weights[name], sessions=1)
    spec = engine.spec
    with engine.session() as session:
        first = ask(session, list(range(1, 40)), max_tokens=20, drafts=0)
        ask(session, list(range(1, 40)), first.tokens, max_tokens=20, drafts=1)
        engine.backend.said = []
        result = ask(session, list(range(1, 38)), max_tokens=24, drafts=engine.layout.heads)
    text = [*range(1, 38), *result.tokens]
    with torch.inference_mode():
        past = [None] * len(spec.layers)
        hidden = oracle.forward(spec, weights[name], torch.tensor(text), torch.arange(len(text)), past).hidden
        checked = 0
        for head, n, tokens, got in engine.backend.said:
            ahead = tokens[-1 - head :]  # the pending token and the drafts before this one
            if n < 37 or n + head >= len(text):
                continue  # of a catch-up, whose last rows nobody asks
            if spec.mtp.chained and n < 37 + WINDOW * head + 4:
                continue  # until a window of rows has passed, rows of a chain lack what its heads saw before
            known = torch.tensor([*text[:n], *ahead])
            inputs = hidden[:n]
            for m in range(head + 1) if spec.mtp.chained else [head]:
                rows = known[1 + m : 1 + m + n]
                want, inputs_of_next, _, _ = oracle.mtp(spec, weights[name], m, inputs, rows, torch.arange(n), None)
                inputs = inputs_of_next if spec.mtp.chained else inputs
            assert np.linalg.norm(want[-1].numpy() - got) <= 1e-4 * np.linalg.norm(got), (head, n)
            checked += 1
    assert checked >= 10 if spec.mtp.chained else checked >= 8 * engine.layout.heads


@pytest.mark.parametrize("name", ["mimo", "7b", "chained"])
def test_the_onnxruntime_backend_gives_the_same_tokens(name, tmp_path):
    """A bundle with the heads' graphs, cache on; drafts are foretold here too, and the heads run."""
    bundle = write_bundle(tmp_path / "bundle", SPECS[name])
    with (
        Engine.open(bundle.path, "onnxruntime-float", threads=1, drafts=0) as plain,
        Engine.open(bundle.path, "onnxruntime-float", threads=1, cache=CacheOptions(bytes=64 << 20)) as engine,
    ):
        backend, inner = engine.backend, engine.backend.draft
        backend.reply, backend.start = (), 0

        def draft(slots, head, held, start, tokens):
            logits = inner(slots, head, held, start, tokens).copy()
            at = start + len(tokens) + 1 + head - backend.start
            if 0 <= at < len(backend.reply) and at % 4:
                logits[backend.reply[at]] = 100
            return logits

        backend.draft = draft
        for length, params in ((3, SAMPLINGS[0]), (60, SAMPLINGS[1]), (70, SAMPLINGS[1])):
            prompt = list(range(1, 1 + length))
            want = ask(plain, prompt, max_tokens=14, sampling=params)
            for drafts in (engine.layout.heads, "auto"):
                got = ask(engine, prompt, want.tokens, max_tokens=14, sampling=params, drafts=drafts)
                assert got.tokens == want.tokens
            assert engine.layout.heads == SPECS[name].mtp.heads
