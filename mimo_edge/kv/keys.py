"""Names of cached pages and snapshots: a hash over everything that their rows depend on.

    root = H(cache format, model, row format, tenant salt)
    page i = H(page i-1 or root, tokens of page i)
    snapshot = H(last whole page or root, tokens behind it, "end")

Equal names mean equal rows; whoever reuses rows compares the tokens as well.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

FORMAT = 1  # of cached rows, in memory and in files; raise it when their order or meaning changes
KEY_BYTES = 16

Tokens = NDArray[np.int32]


def root_key(fingerprint: str, row_format: str, salt: bytes = b"") -> bytes:
    """`fingerprint` is the bundle's (weights, gates and MTP heads, spec, tokenizer); `row_format` says how the backend
    computes rows, and the sizes of pages and rings; `salt` keeps tenants apart."""
    parts = [p.encode() for p in (f"mimo-edge prefix {FORMAT}", fingerprint, row_format)]
    return _hash(b"".join(len(p).to_bytes(4, "little") + p for p in [*parts, salt]))


def page_keys(root: bytes, tokens: Tokens, page_size: int) -> list[bytes]:
    """Keys of the whole pages of `tokens`."""
    keys, parent = [], root
    for at in range(0, len(tokens) - page_size + 1, page_size):
        parent = _hash(parent + tokens[at : at + page_size].tobytes())
        keys.append(parent)
    return keys


def snapshot_key(root: bytes, pages: list[bytes], tokens: Tokens, page_size: int) -> bytes:
    """Key of a snapshot behind `tokens`, whose whole pages have the keys `pages`."""
    parent = pages[-1] if pages else root
    return _hash(parent + tokens[len(pages) * page_size :].tobytes() + b"end")


def as_tokens(tokens) -> Tokens:
    return np.ascontiguousarray(tokens, np.dtype("<i4"))


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES).digest()
