"""The fake engine with a cache folder, and what it should answer."""

import random

import numpy as np
from fakes import fake_engine, reply

from mimo_edge.cache import CacheOptions


def engine(folder, **options):
    kept = {k: options.pop(k) for k in ("bytes", "reserve", "disk_bytes", "disk_writes") if k in options}
    cache = CacheOptions(**{"bytes": 1 << 20, "folder": folder, "disk_bytes": 1 << 24} | kept)
    return fake_engine(**{"context": 512, "cache": cache} | options)


def prompt(n, seed=0):
    return random.Random(seed).choices(range(97, 123), k=n)


def expected(asked, n=5):
    return reply(fake_engine(context=512), asked, max_tokens=n).tokens


def reused(e, asked, n=5):
    result = reply(e, asked, max_tokens=n)
    assert result.tokens == expected(asked, n)
    return result.cache.reused_tokens


def rows_of(engine, session):
    """Committed rows where the sequence lies."""
    at, found = session.sequence, []
    for kind in engine.layout.row_kinds:
        first = at.first_held(kind.slots)
        found.append(np.empty((len(at.tokens) - first) * kind.token_bytes, np.uint8))
        engine.backend.read_rows(at.slots, kind.name, first, len(at.tokens), found[-1])
    return found
