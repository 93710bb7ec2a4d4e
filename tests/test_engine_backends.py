"""The engine over real backends with tiny random models: chunks, sessions and backends lead to the same tokens."""

import logging
import sys

import pytest
from specs import ALL
from tiny_bundle import write_bundle

from mimo_edge import Engine, SamplingParams
from mimo_edge.backends import registry
from mimo_edge.backends.onnxruntime import OnnxRuntimeBackend
from mimo_edge.errors import BadInputError, UnsupportedError

SAMPLED = SamplingParams(temperature=1, seed=3)
PROMPT = "a prompt that is longer than every window of the tiny models"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """name -> path of a bundle."""
    folder = tmp_path_factory.mktemp("bundles")
    for name, spec in ALL.items():
        write_bundle(folder / name, spec)
    return folder


def tokens(engine, prompt=PROMPT, n=25, sampling=SAMPLED):
    generation = engine.generate(prompt, max_tokens=n, sampling=sampling)
    list(generation)
    return generation.result.tokens


@pytest.mark.parametrize("name", ALL)
def test_backends_and_chunks_lead_to_the_same_tokens(name, bundles):
    with Engine.open(bundles / name, "reference") as engine:
        expected = tokens(engine)
    for backend in ("onnxruntime", "onnxruntime-float"):
        with Engine.open(bundles / name, backend, threads=1) as engine:
            for engine.chunk in (1, 7, 256):
                assert tokens(engine) == expected, (backend, engine.chunk)
    assert len(set(expected)) > 4


@pytest.mark.parametrize("backend", ["reference", "onnxruntime"])
@pytest.mark.parametrize("name", ["mimo", "two-windows", "qwen", "window-of-one"])
def test_a_session_continues_as_if_it_had_read_everything_at_once(name, backend, bundles):
    with Engine.open(bundles / name, backend, sessions=2, threads=1) as engine, engine.session() as session:
        prompt = list(PROMPT.encode())
        for turn in range(3):
            reply = session.generate(prompt, max_tokens=15, sampling=SAMPLED)
            list(reply)
            assert reply.result.tokens == tokens(engine, prompt, 15)
            assert reply.result.cache.reused_tokens == (len(prompt) - 1 - 6 if turn else 0)
            prompt += [*reply.result.tokens, *b" more."]
            assert 257 not in prompt


@pytest.mark.parametrize("backend", ["reference", "onnxruntime"])
def test_interleaved_generations_do_not_disturb_each_other(backend, bundles):
    with Engine.open(bundles / "mimo", backend, sessions=2, threads=1) as engine:
        prompts = [PROMPT, PROMPT[::-1]]
        alone = [tokens(engine, p, 30) for p in prompts]
        running = [engine.generate(p, max_tokens=30, sampling=SAMPLED) for p in prompts]
        while any(g.finish_reason is None for g in running):
            for g in running:
                next(g, None)
        assert [g.result.tokens for g in running] == alone


def test_memory_is_reported_as_stored_and_allocated(bundles):
    with Engine.open(bundles / "mimo", max_context=100, sessions=2, threads=1) as engine:
        memory = engine.memory()
        assert memory.full_kv_bytes == 2 * 128 * 2 * (12 + 8) * 4  # 2 sequences, 2 pages of 64, 2 layers
        assert memory.window_kv_bytes == 2 * 3 * (8 + 3) * 2 * (12 + 8) * 4
        assert 0 < memory.weights_bytes <= (bundles / "mimo" / "weights.safetensors").stat().st_size
        assert engine.load_s > 0


def test_the_choice_of_a_backend_is_explained_once(bundles, monkeypatch):
    log, records, handler = logging.getLogger("mimo_edge"), [], logging.Handler()
    handler.emit = records.append
    monkeypatch.setattr(log, "handlers", [handler])
    log.setLevel(logging.INFO)  # what the command line does; kept, as nothing else depends on it
    with Engine.open(bundles / "qwen", threads=1) as engine:
        assert isinstance(engine.backend, OnnxRuntimeBackend)
        tokens(engine, n=3)
    assert [r.getMessage().split(",")[0] for r in records] == ["backend onnxruntime"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "npu"}, r"unknown backend 'npu' \(allowed: auto, cuda, cuda-ptx, onnxruntime, o"),
        ({"max_context": 257}, r"context 257 is out of range \(allowed: 1 to 256"),
        ({"max_context": 0}, "context 0"),
        ({"sessions": 0}, "sessions 0"),
        ({"threads": 0}, "threads 0"),
    ],
)
def test_values_out_of_range_are_refused_before_weights_are_loaded(options, message, bundles, monkeypatch):
    monkeypatch.setattr(OnnxRuntimeBackend, "__init__", lambda *a: pytest.fail("loaded"))
    with pytest.raises(BadInputError, match=message):
        Engine.open(bundles / "qwen", **options)


def test_a_missing_library_is_named_with_the_command_that_installs_it(bundles, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError, match=r"needs torch: run `pip install 'mimo-edge\[export\]'`"):
        Engine.open(bundles / "qwen", "reference")


def test_our_own_missing_modules_are_not_blamed_on_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mimo_edge.backends.reference", None)
    with pytest.raises(ModuleNotFoundError, match="mimo_edge"):
        registry.load("reference", None)


def test_a_request_that_cannot_start_gives_its_room_back(bundles, monkeypatch):
    def broken(*_args):
        assert engine.pools.pages.used > 0
        raise RuntimeError("cannot start")

    with Engine.open(bundles / "qwen", threads=1) as engine:
        monkeypatch.setattr(engine, "speculation", broken)
        with pytest.raises(RuntimeError, match="cannot start"):
            engine.generate(PROMPT)
        assert engine.pools.pages.used == engine.pools.rings.used == 0
