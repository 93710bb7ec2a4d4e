"""Rows for training steps from worker processes, in the order of the steps whatever the workers' speed."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from scripts.reference_model.packing import Packer, Rows

AHEAD = 48  # batches in the making
_packer: Packer | None = None


def _start(tokenizer: str, general: str, length: int, seed: int) -> None:
    global _packer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _packer = Packer(Tokenizer.from_file(tokenizer), np.load(general, mmap_mode="r"), length, seed)


def _make(first: int, count: int) -> Rows:
    assert _packer
    return _packer.rows(first, count)


def feed(
    tokenizer: Path, general: Path, *, first: int, stop: int, batch: int, length: int, seed: int, workers: int
) -> Iterator[Rows]:
    """Batches of steps [first, stop). `general` is a .npy file of tokens; 0 workers means this process."""
    settings = (str(tokenizer), str(general), length, seed)
    if workers == 0:
        _start(*settings)
        for step in range(first, stop):
            yield _make(step * batch, batch)
        return
    with multiprocessing.get_context("fork").Pool(workers, _start, settings) as pool:
        waiting = deque(pool.apply_async(_make, (s * batch, batch)) for s in range(first, min(first + AHEAD, stop)))
        for step in range(first, stop):
            rows = waiting.popleft().get()
            if step + AHEAD < stop:
                waiting.append(pool.apply_async(_make, ((step + AHEAD) * batch, batch)))
            yield rows
