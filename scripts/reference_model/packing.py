"""Rows of tokens for training. Row r of a run is a function of (seed, r) alone, so that a run can resume anywhere.

A row is either one piece of general text or conversations followed by general text. Tokens see only their own
document; kinds say what a token is for:

    PROMPT    seen, not learned          ACTION, REPLY   the two parts of an answer, learned with more weight
    GENERAL   learned
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from scripts.reference_model.chat import BOS, END, prompt
from scripts.reference_model.collect import SEPARATOR
from scripts.reference_model.dialogue import Sample, make_sample
from scripts.reference_model.intents import frequencies

PROMPT, ACTION, REPLY, GENERAL = 0, 1, 2, 3
LOOKAHEAD = 4  # tokens behind a row: the main target and one more for each head
CHAT_ROWS = 0.8  # share of rows that hold conversations
FLAT = 0.4  # share of conversations whose intent is drawn evenly: rare ones need more than their natural share
EMPHASIS = 0.08  # share of conversations of the kinds below, which depend on more than the command's words
EMPHASISED = ("ask", "ask", "unsupported", "cancel", "none")
CHAT_FILL = 0.8  # share of such a row that conversations fill


@dataclass(frozen=True)
class Rows:
    """All [B, S + LOOKAHEAD]: tokens uint16, document int16 (counts up in a row), kinds uint8, position int32
    (within the document)."""

    tokens: NDArray[np.uint16]
    document: NDArray[np.int16]
    kinds: NDArray[np.uint8]
    position: NDArray[np.int32]


def tokenize_general(path: Path, tokenizer: Tokenizer) -> NDArray[np.uint16]:
    """All documents as one stream: BOS text END BOS text END ..."""
    bos, end = tokenizer.token_to_id(BOS), tokenizer.token_to_id(END)
    texts = lzma.decompress(path.read_bytes()).decode().split(SEPARATOR)
    parts: list[NDArray[np.uint16]] = []
    for start in range(0, len(texts), 1024):
        for e in tokenizer.encode_batch_fast(texts[start : start + 1024], add_special_tokens=False):
            parts.append(np.array([bos, *e.ids, end], np.uint16))
    return np.concatenate(parts)


Encoded = tuple[list[int], list[int]]


def encode_sample(sample: Sample, tokenizer: Tokenizer) -> Encoded:
    """(token ids of prompt, answer and END; their kinds). The line break belongs to the action."""
    texts = [prompt(sample), sample.action + "\n", sample.reply + END]
    parts = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    kinds = [kind for kind, ids in zip((PROMPT, ACTION, REPLY), parts, strict=True) for _ in ids]
    return [i for ids in parts for i in ids], kinds


class Packer:
    """Makes rows; holds the general text's tokens, which may be a memory map."""

    def __init__(self, tokenizer: Tokenizer, general: NDArray[np.uint16], length: int, seed: int):
        self._tokenizer, self._general, self._seed = tokenizer, general, seed
        self._width = length + LOOKAHEAD
        self._bos = tokenizer.token_to_id(BOS)

    def rows(self, first: int, count: int) -> Rows:
        made = [self._row(Random(f"{self._seed}:{r}")) for r in range(first, first + count)]
        return Rows(*(np.stack(column) for column in zip(*made, strict=True)))

    def _row(self, rng: Random) -> tuple[NDArray, NDArray, NDArray, NDArray]:
        tokens = np.empty(self._width, np.uint16)
        kinds = np.full(self._width, GENERAL, np.uint8)
        at = 0
        starts = []
        if rng.random() < CHAT_ROWS:
            while at < self._width * CHAT_FILL:
                ids, sorts = encode_sample(make_sample(rng, "train", _intent(rng)), self._tokenizer)
                if at + len(ids) > self._width:
                    break
                starts.append(at)
                tokens[at : at + len(ids)] = ids
                kinds[at : at + len(ids)] = sorts
                at += len(ids)
        rest = self._width - at
        begin = rng.randrange(len(self._general) - rest)
        tokens[at:] = self._general[begin : begin + rest]
        starts += [at, *(at + 1 + np.flatnonzero(tokens[at + 1 :] == self._bos)).tolist()]
        document, position = _spans(starts, self._width)
        return tokens, document, kinds, position


def _intent(rng: Random) -> str | None:
    """The intent to train on, or None for one drawn by frequency."""
    roll = rng.random()
    if roll < EMPHASIS:
        return rng.choice(EMPHASISED)
    return rng.choice(frequencies()[0]) if roll < EMPHASIS + FLAT else None


def _spans(starts: list[int], width: int) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
    """(number of the document, position within it) of every token; `starts` begins with 0."""
    begins = np.zeros(width, np.int32)
    begins[sorted({s for s in starts if 0 < s < width})] = 1
    document = begins.cumsum()
    first = np.flatnonzero(np.r_[1, begins[1:]])
    return document.astype(np.int16), (np.arange(width) - first[document]).astype(np.int32)


def sample_rows(samples: list[Encoded], length: int) -> Rows:
    """Encoded samples for evaluation, one after another in rows of `length` + LOOKAHEAD, none cut; what is left of a
    row is PAD (0), not learned, a document of its own."""
    filled: list[list[Encoded]] = [[]]
    room = length
    for ids, sorts in samples:
        if len(ids) > room:
            filled.append([])
            room = length
        filled[-1].append((ids, sorts))
        room -= len(ids)
    width = length + LOOKAHEAD
    out = Rows(*(np.zeros((len(filled), width), t) for t in (np.uint16, np.int16, np.uint8, np.int32)))
    for r, row in enumerate(filled):
        starts, at = [0], 0
        for ids, sorts in row:
            out.tokens[r, at : at + len(ids)], out.kinds[r, at : at + len(ids)] = ids, sorts
            at += len(ids)
            starts.append(at)
        out.document[r], out.position[r] = _spans(starts, width)
    return out


def general_rows(general: NDArray[np.uint16], bos: int, count: int, length: int) -> Rows:
    """The first `count` rows of a general text, for evaluation."""
    width = length + LOOKAHEAD
    count = min(count, len(general) // width)
    tokens = np.asarray(general[: count * width]).reshape(count, width)
    spans = [_spans([0, *np.flatnonzero(row == bos).tolist()], width) for row in tokens]
    document, position = (np.stack(column) for column in zip(*spans, strict=True))
    return Rows(tokens, document, np.full(tokens.shape, GENERAL, np.uint8), position)
