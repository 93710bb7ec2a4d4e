"""Rows through a backend in chunks, and the oracle's rows to compare them with."""

import numpy as np
import torch

from mimo_edge.backends import oracle
from mimo_edge.backends.base import Step


def feed(backend, slots, tokens, chunks):
    """Logits [len(tokens), vocab] of all rows, evaluated in the given chunk sizes."""
    rows, at = [], 0
    for size in chunks:
        part = tokens[at : at + size]
        (out,) = backend.run([Step(slots, at, part, np.arange(len(part)))])
        rows.append(out.logits.copy())
        backend.commit([len(part)])
        at += len(part)
    return np.concatenate(rows)


def whole(spec, weights, tokens):
    """All rows at once without any cache."""
    positions = torch.arange(len(tokens))
    return oracle.forward(spec, weights, torch.from_numpy(tokens), positions, [None] * len(spec.layers)).logits.numpy()


def error(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)
