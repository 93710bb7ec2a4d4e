"""A snapshot as files: their names, and what each holds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mimo_edge.kv.files import Header
from mimo_edge.kv.keys import Tokens, page_keys, snapshot_key

PAGE, SNAPSHOT = ".page", ".snapshot"


@dataclass(frozen=True)
class Stored:
    """`name` is the file of the snapshot's own rows, `pages` those of its pages. Names follow from the tokens."""

    name: str
    pages: tuple[str, ...] = field(repr=False)
    page_size: int
    root: bytes
    tokens: Tokens = field(repr=False)
    firsts: tuple[int, ...]

    @staticmethod
    def of(root: bytes, tokens: Tokens, firsts: tuple[int, ...], page_size: int) -> Stored:
        keys = page_keys(root, tokens, page_size)
        name = snapshot_key(root, keys, tokens, page_size).hex() + SNAPSHOT
        return Stored(name, tuple(k.hex() + PAGE for k in keys), page_size, root, tokens, firsts)

    def tokens_in(self, name: str) -> Tokens:
        """The tokens that one of the files holds."""
        if name == self.name:
            return self.tokens
        first = self.pages.index(name) * self.page_size
        return self.tokens[first : first + self.page_size]

    def header(self, name: str, rows: NDArray[np.uint8]) -> Header:
        root, key = self.root.hex(), key_in(name)
        if name == self.name:
            end = len(self.tokens)
            return Header("snapshot", root, key, self.page_size, end, list(self.firsts), end, rows.nbytes)
        return Header("page", root, key, self.page_size, self.pages.index(name), [], self.page_size, rows.nbytes)


def key_in(name: str) -> str:
    """The key that a file's name holds, in hexadecimal."""
    return name.split(".")[0]
