"""The prefix cache through the cuda backend, over a fake driver: rows come back byte for byte."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from cached import rows_of
from cuda_bundle import open_cuda, write_cuda_bundle
from fakes import reply
from specs import gemma_spec

from mimo_edge import Engine
from mimo_edge.backends import registry
from mimo_edge.cache import CacheOptions

LENGTH = 66  # tokens: a whole page and a part of one; rings have wrapped


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    """Two windows and a full layer; the driver is the fake one."""
    monkeypatch.setitem(registry.LOADERS, "cuda", lambda bundle, threads: open_cuda(bundle))
    spec = gemma_spec((5, 11))
    return write_cuda_bundle(tmp_path / "bundle", replace(spec, layers=spec.layers[:3])).path


def opened(path, folder):
    cache = CacheOptions(bytes=64 << 20, folder=folder)
    return Engine.open(path, "cuda", max_context=128, sessions=3, cache=cache)


def asked(engine, session, prompt):
    """(result, rows in place before anything was evaluated, last logits) of one token behind a prompt."""
    seen, run = [], engine.backend.run
    engine.backend.run = lambda steps: [seen.append(o.logits.copy()) or o for o in run(steps)]
    engine.backend.best = None  # logits, please
    generation = session.generate(prompt, max_tokens=1)
    rows = rows_of(engine, session)
    list(generation)
    engine.backend.run = run
    return generation.result, rows, seen[-1]


def test_a_hit_restores_the_rows_and_the_logits_behind_them(bundle, tmp_path):
    prompt = np.random.default_rng(5).integers(0, 256, LENGTH).tolist()
    with opened(bundle, tmp_path / "a") as engine, engine.session() as own, engine.session() as other:
        reply(own, prompt, max_tokens=1)
        stored = rows_of(engine, own)
        engine.cache.flush()
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        with opened(bundle, tmp_path / "b") as another, another.session() as session:  # as after a restart
            from_file = asked(another, session, [*prompt, 7])
            assert another.cache.disk.counters["loaded"] == 1
        from_memory = asked(engine, other, [*prompt, 7])
        kept = asked(engine, own, [*prompt, 7])
        assert other.sequence.slots != own.sequence.slots
    for result, rows, logits in (kept, from_memory, from_file):
        assert result.cache.reused_tokens == LENGTH and result.tokens == kept[0].tokens
        assert all(np.array_equal(a, b) and a.any() for a, b in zip(stored, rows, strict=True))
        assert np.array_equal(logits, kept[2])
