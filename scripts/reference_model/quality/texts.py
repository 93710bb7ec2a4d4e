"""What is measured on: held-out commands and general text as rows, and where the answers lie in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scripts.reference_model.chat import BOS, SPECIAL
from scripts.reference_model.packing import ACTION, REPLY, Encoded, Rows, general_rows, sample_rows
from scripts.reference_model.prepare import load_encoded, load_tokens

CHUNK = 512  # tokens of general text that are one sample of the intervals
PROMPT_TOKENS, CONTINUATION = 128, 128  # of free continuations of general text


@dataclass(frozen=True)
class Answers:
    """Row and first and last position of every answer, and the number of its tokens that are action, int64 [N]."""

    row: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    action: NDArray[np.int64]

    def matches(self, rows: Rows, best: NDArray[np.int16]) -> NDArray[np.bool_]:
        """bool [1 + heads, sum of the answers' lengths]: column r of an answer is the row before its r-th token; the
        main model predicts that token, head i the one 1 + i later (False behind the answer's end)."""
        length = self.last - self.first + 1
        row, last = np.repeat(self.row, length), np.repeat(self.last, length)
        inside = np.arange(length.sum()) - np.repeat(length.cumsum() - length, length)
        at = np.repeat(self.first, length) + inside
        tokens = rows.tokens.astype(np.int16)
        return np.stack([(best[j, row, at - 1] == tokens[row, at + j]) & (at + j <= last) for j in range(len(best))])


def find_answers(rows: Rows, length: int) -> Answers:
    """In the order of the samples in the rows."""
    found = []
    for r in range(len(rows.tokens)):
        answer = np.flatnonzero((rows.kinds[r, :length] == ACTION) | (rows.kinds[r, :length] == REPLY))
        for piece in np.split(answer, np.flatnonzero(np.diff(rows.document[r, answer])) + 1):
            found.append((r, piece[0], piece[-1], (rows.kinds[r, piece] == ACTION).sum()))
    return Answers(*np.array(found, np.int64).T)


@dataclass(frozen=True)
class Texts:
    encoded: list[Encoded]
    groups: dict[str, list[str]]
    commands: Rows
    answers: Answers
    general: Rows
    prompts: NDArray[np.int64]


def load_texts(data: Path, length: int, limit: int | None) -> Texts:
    """`data` is prepare.py's output. `limit` takes so many commands, evenly, and as many rows of general text."""
    encoded, groups = load_encoded(data / "commands.npz")
    every = max(1, len(encoded) // limit) if limit else 1
    picked = slice(0, None, every)
    encoded, groups = encoded[picked], {k: v[picked] for k, v in groups.items()}
    general = load_tokens(data / "heldout.u16.xz")
    bos = SPECIAL.index(BOS)
    commands = sample_rows(encoded, length)
    rows = general_rows(general, bos, limit or len(general), length)
    prompts = continuation_prompts(general, bos, limit or 256)
    return Texts(encoded, groups, commands, find_answers(commands, length), rows, prompts)


def continuation_prompts(general: NDArray[np.uint16], bos: int, count: int) -> NDArray[np.int64]:
    """[count, PROMPT_TOKENS]: pieces of documents from everywhere in the text, each behind a begin token."""
    size = PROMPT_TOKENS - 1
    starts = np.flatnonzero(general == bos)
    pieces = []
    for first, stop in zip(starts + 1, [*starts[1:], len(general)], strict=True):
        pieces += [general[at : at + size] for at in range(first, stop - size, 4 * size)]
    chosen = [pieces[i] for i in np.linspace(0, len(pieces) - 1, count).astype(int)]
    return np.stack([np.concatenate([[bos], p]) for p in chosen]).astype(np.int64)


def loss_chunks(rows: Rows, nll: NDArray[np.float32]) -> NDArray[np.float64]:
    """[chunks, 2]: sums of the losses, and numbers of tokens, of CHUNK rows each; a document's first token is none."""
    length = nll.shape[1]
    inside = rows.document[:, 1 : 1 + length] == rows.document[:, :length]
    parts = [(x * inside).reshape(-1, min(CHUNK, length)).sum(1) for x in (nll.astype(np.float64), inside)]
    return np.stack(parts, 1)
