"""Teacher-forced probabilities, through the engine's backend as it generates."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mimo_edge.backends.base import Step
from mimo_edge.engine import Engine

LOGITS = 1 << 24  # held at a time: a large vocabulary gets fewer rows a step
WINDOW = 2048  # tokens of a text that see each other


def losses(engine: Engine, tokens: list[int]) -> NDArray[np.float64]:
    """Negative log probability (nats) of every token behind the first, [len(tokens) - 1]."""
    rows = max(1, min(engine.chunk, LOGITS // engine.spec.vocab_size))
    slots = engine.pools.admit(len(tokens))
    parts = []
    try:
        for at in range(0, len(tokens) - 1, rows):
            known = np.array(tokens[at : min(at + rows, len(tokens) - 1)], np.int64)
            [out] = engine.backend.run([Step(slots, at, known, np.arange(len(known)))])
            parts.append(_losses(out.logits, np.array(tokens[at + 1 : at + 1 + len(known)])))
            engine.backend.commit([len(known)])
    finally:
        engine.pools.release(slots)
    return np.concatenate(parts)


def _losses(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> NDArray[np.float64]:
    top = logits.max(1)
    total = np.exp(logits - top[:, None]).sum(1, dtype=np.float64)
    return np.log(total) + top - logits[np.arange(len(targets)), targets]


def windows(engine: Engine, text: str) -> Iterator[list[int]]:
    """Token ids of a text in pieces that fit into the context, each behind the model's begin token, if it has one."""
    bos = engine.spec.bos_id
    begin = [] if bos is None else [bos]
    tokens = engine.text.encode(text)
    tokens = tokens[1:] if begin and tokens[:1] == begin else tokens
    size = min(WINDOW, engine.layout.context) - len(begin)
    for at in range(0, len(tokens), size):
        piece = begin + tokens[at : at + size]
        if len(piece) > 1:
            yield piece
