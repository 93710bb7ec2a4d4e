"""The prefix cache over real backends with tiny random models: restored rows are the rows, tokens are the same."""

import random

import numpy as np
import pytest
from cached import rows_of
from fakes import EOS
from specs import ALL
from tiny_bundle import write_bundle

from mimo_edge import Engine
from mimo_edge.cache import CacheOptions

ROOM = CacheOptions(bytes=64 << 20)
BACKENDS = ["reference", "onnxruntime", "onnxruntime-float"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles")
    for name, spec in ALL.items():
        write_bundle(folder / name, spec)
    return folder


def conversation(rng):
    """Prompts of one client: turns that are appended, edited, taken back, sent again, or branched off."""
    prompts = [rng.choices(range(256), k=rng.randint(1, 40))]
    for _ in range(rng.randint(2, 4)):
        earlier = rng.choice(prompts[-2:])
        kept = rng.choice([len(earlier), len(earlier), len(earlier) - 3, rng.randint(0, len(earlier))])
        prompts.append([*earlier[: max(0, kept)], *rng.choices(range(256), k=rng.randint(1, 50))][:200])
    return prompts


def answer(engine, prompt, n):
    generation = engine.generate(prompt, max_tokens=n)
    list(generation)
    return generation.result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ALL)
def test_tokens_are_the_same_with_and_without_a_cache(name, backend, bundles):
    rng, reused = random.Random(f"{name} {backend}"), 0
    with (
        Engine.open(bundles / name, backend, threads=1) as plain,
        Engine.open(bundles / name, backend, threads=1, cache=ROOM) as cached,
    ):
        cached.chunk = 23
        for _ in range(3):
            said: list[int] = []
            for prompt in conversation(rng):
                asked = [*prompt, *said][:220]
                result = answer(cached, asked, 8)
                assert result.tokens == answer(plain, asked, 8).tokens
                reused += result.cache.reused_tokens
                said = [t for t in result.tokens if t != EOS] if rng.random() < 0.5 else []
        cached.cache.prefix.check_integrity()
    assert reused > 20


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mimo", "two-windows", "window-of-one", "window-only", "qwen"])
@pytest.mark.parametrize("n", [5, 64, 131])
def test_restored_rows_are_byte_for_byte_those_that_were_stored(name, backend, n, bundles):
    with Engine.open(bundles / name, backend, sessions=2, threads=1, cache=ROOM) as engine:
        prompt = np.random.default_rng(n).integers(0, 256, n).tolist()
        with engine.session() as a, engine.session() as b:
            list(a.generate(prompt, max_tokens=1))
            stored = rows_of(engine, a)
            reply = b.generate([*prompt, 7], max_tokens=1)
            assert b.sequence.tokens == prompt
            for x, y in zip(stored, rows_of(engine, b), strict=True):
                assert np.array_equal(x, y)
            list(reply)


@pytest.mark.parametrize("backend", BACKENDS)
def test_free_slots_may_hold_anything_when_rows_are_restored(backend, bundles):
    """What a restore does not write is never read: NaN there changes nothing."""
    with Engine.open(bundles / "mimo", backend, threads=1, cache=ROOM) as engine:
        prompt = list(b"a prompt that is longer than every window of the tiny models, twice over, and over")
        expected = answer(engine, prompt, 10).tokens
        for pools in engine.backend._pools:
            for pool in pools:
                pool[:] = float("nan")
        again = answer(engine, prompt, 10)
        assert again.cache.reused_tokens == len(prompt) - 1 and again.tokens == expected


def test_rows_of_exact_and_rounded_activations_are_told_apart(bundles):
    formats = set()
    for backend in BACKENDS:
        with Engine.open(bundles / "mimo", backend, threads=1, cache=ROOM) as engine:
            formats.add(engine.backend.row_format)
    assert len(formats) == 3
