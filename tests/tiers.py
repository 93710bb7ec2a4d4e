"""A folder of cached rows whose content follows from its tokens, so that anybody can check it."""

import random

import numpy as np

from mimo_edge.kv.keys import as_tokens
from mimo_edge.kv.stored import Stored
from mimo_edge.kv.tiers import DiskTier

SIZE, DAY = 8, 1 << 30


def open_tier(path, model="a" * 32, budget=1 << 20, daily=DAY):
    tier = DiskTier(path, model, budget, daily)
    tier.scan()
    return tier


def rows_of(tokens, n):
    return np.resize(np.frombuffer(as_tokens(tokens).tobytes(), np.uint8), n)


def put(tier, tokens, root=b"root", own=5000, page=9000):
    stored = Stored.of(root, as_tokens(tokens), (0, 3), SIZE)
    pages = {n: rows_of(tokens[: (i + 1) * SIZE], page) for i, n in enumerate(stored.pages)}
    return stored if tier.store(stored, rows_of(tokens, own), pages) else None


def is_right(tier, stored, own=5000, page=9000):
    loaded = tier.load(stored)
    return loaded is not None and all(
        np.array_equal(rows, rows_of(stored.tokens[:n], size))
        for rows, n, size in [
            (loaded[0], len(stored.tokens), own),
            *((rows, (i + 1) * SIZE, page) for i, rows in enumerate(loaded[1])),
        ]
    )


def tokens(n, seed=0):
    return random.Random(seed).choices(range(200_000), k=n)
