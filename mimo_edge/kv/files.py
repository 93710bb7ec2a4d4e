"""One file an entry, which says by itself what it is and whether it is whole.

    magic | length of the header | header (JSON) | tokens int32 | rows | SHA-256 of all before

Files appear under their names only when complete: written beside, flushed, renamed. A reader trusts nothing: not the
name, not the size, not the header, until the checksum agrees.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mimo_edge.disk import open_file
from mimo_edge.kv.keys import FORMAT, Tokens, as_tokens

MAGIC = b"mimo-kv1"
DIGEST = 32
BLOCK = 4096  # a file system's unit: what a file takes
TEMPORARY = ".partial"
_LIMIT = 1 << 20  # bytes of a header; a larger number there is damage


class Damaged(Exception):
    """A file is not what it should be; the message is the reason."""


@dataclass(frozen=True)
class Header:
    """`at` is a page's index or a snapshot's end; `firsts` are a snapshot's oldest rows, a kind. So many `tokens`, and
    so many bytes of `rows`, follow."""

    kind: str
    root: str
    key: str
    page_size: int
    at: int
    firsts: list[int]
    tokens: int
    rows: int
    format: int = FORMAT


def size_of(header: Header) -> int:
    """Bytes of the file, without rounding to blocks."""
    return len(MAGIC) + 4 + len(_encode(header)) + 4 * header.tokens + header.rows + DIGEST


def on_disk(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def write(path: Path, header: Header, tokens: Tokens, rows: NDArray[np.uint8]) -> Path:
    """Writes and flushes the file beside `path`; the caller renames it. Raises OSError, leaving nothing behind."""
    head = _encode(header)
    parts = [memoryview(MAGIC + struct.pack("<I", len(head)) + head), memoryview(tokens.tobytes()), rows.data]
    digest = hashlib.sha256()
    temp = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)  # rows tell what was said
        try:
            for part in parts:
                digest.update(part)
                _write_all(fd, part)
            _write_all(fd, memoryview(digest.digest()))
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    return temp


def read_header(path: Path) -> tuple[Header, Tokens]:
    """Header and tokens, as cheap as they come: the checksum is not looked at. Raises Damaged, OSError."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(MAGIC) + 4)
        if len(start) < len(MAGIC) + 4 or not start.startswith(MAGIC):
            raise Damaged("not a cache file")
        (length,) = struct.unpack("<I", start[len(MAGIC) :])
        header = _decode(file.read(length) if length < _LIMIT else b"")
        if size_of(header) != size:
            raise Damaged("wrong size")
        return header, as_tokens(np.frombuffer(file.read(4 * header.tokens), "<i4"))


def read(path: Path) -> tuple[Header, Tokens, NDArray[np.uint8]]:
    """Everything, with the checksum verified. Raises Damaged, OSError."""
    with open_file(path) as file:
        data = np.fromfile(file, np.uint8)
    if len(data) < len(MAGIC) + 4 + DIGEST or data[: len(MAGIC)].tobytes() != MAGIC:
        raise Damaged("not a cache file")
    if hashlib.sha256(data.data[:-DIGEST]).digest() != data[-DIGEST:].tobytes():
        raise Damaged("wrong checksum")
    (length,) = struct.unpack("<I", data[len(MAGIC) : len(MAGIC) + 4].tobytes())
    at = len(MAGIC) + 4 + length
    header = _decode(data[len(MAGIC) + 4 : at].tobytes())
    if size_of(header) != len(data):
        raise Damaged("wrong size")
    rows = at + 4 * header.tokens
    return header, as_tokens(data[at:rows].view("<i4")), data[rows : rows + header.rows]


def _encode(header: Header) -> bytes:
    return json.dumps(asdict(header), sort_keys=True).encode()


def _decode(data: bytes) -> Header:
    try:
        fields = json.loads(data)
        header = Header(**fields)
        whole = [header.page_size, header.at, header.tokens, header.rows, *header.firsts]
        if header.format != FORMAT or header.page_size < 1:
            raise Damaged(f"format {header.format}, this version reads {FORMAT}")
        if not all(type(n) is int and 0 <= n < 1 << 48 for n in whole) or _encode(header) != data:
            raise Damaged("damaged header")
        return header
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise Damaged("damaged header") from e


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]
