"""GGUF headers: metadata and where tensors lie. Types and block sizes come from the `gguf` library.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The library's own reader makes several numpy arrays
for every token of the vocabulary (15 s for 262,144 tokens); this one takes well under a second and bounds every length.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families.fields import Fields
from mimo_edge.export.families.tensors import StoredTensor

_T = gguf.GGUFValueType
_FORMATS = {
    **{_T.UINT8: "B", _T.INT8: "b", _T.UINT16: "H", _T.INT16: "h", _T.UINT32: "I", _T.INT32: "i", _T.FLOAT32: "f"},
    **{_T.BOOL: "?", _T.UINT64: "Q", _T.INT64: "q", _T.FLOAT64: "d"},
}


@dataclass(frozen=True)
class GgufFile:
    """metadata: key -> number, bool, str or list. tensors: shapes in row-major order (a row's K is last)."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


class _Cursor:
    """Reads forward through the header; running past the file's end is a BadInputError."""

    def __init__(self, data: mmap.mmap, path: Path):
        self.data, self.path, self.at = data, path, 0

    def take(self, size: int) -> int:
        """Moves on by `size` bytes and returns where they begin."""
        start = self.at
        if size > len(self.data) - start:
            raise BadInputError(f"{self.path} is truncated: its header runs past byte {len(self.data)}; copy it again")
        self.at += size
        return start

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        fmt = f"<{count}{code}"
        return struct.unpack_from(fmt, self.data, self.take(struct.calcsize(fmt)))

    def string(self) -> str:
        (size,) = self.scalars("Q")
        start = self.take(size)
        return self.data[start : start + size].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _T.STRING:
            return self.string()
        if kind != _T.ARRAY:
            return self.scalars(self._format(kind))[0]
        (kind,), (count,) = self.scalars("I"), self.scalars("Q")
        if kind == _T.STRING:
            return [self.string() for _ in range(count)]
        code = self._format(kind)
        if count > len(self.data):
            self.take(count)  # says that the file is truncated
        return list(self.scalars(code, count))

    def _format(self, kind: int) -> str:
        if kind not in _FORMATS:
            raise BadInputError(f"{self.path}: unknown metadata type {kind}; the file is damaged or newer than GGUF 3")
        return _FORMATS[_T(kind)]


def read_gguf(path: Path) -> GgufFile:
    """Parses the header. Raises BadInputError when the file is no GGUF, damaged or shorter than its header says,
    UnsupportedError for versions, byte orders, split files and tensor types that cannot be read."""
    if path.stat().st_size < 24:
        raise BadInputError(f"{path}: not a GGUF file ({path.stat().st_size} bytes)")
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data, path)
        if data[cursor.take(4) : 4] != b"GGUF":
            raise BadInputError(f"{path}: not a GGUF file (expected a .gguf file or a Hugging Face folder)")
        (version,), (tensor_count, key_count) = cursor.scalars("I"), cursor.scalars("Q", 2)
        if version not in (2, 3):
            raise UnsupportedError(
                f"{path}: GGUF version {version:#x} is not supported (supported: little-endian 2 and 3)"
            )
        try:
            metadata = {cursor.string(): cursor.value(*cursor.scalars("I")) for _ in range(key_count)}
            fields = Fields(metadata, str(path))
            if fields.integer("split.count", 1) > 1:
                raise UnsupportedError(
                    f"{path} is one part of a split model: join it with llama-gguf-split --merge first"
                )
            headers = [_tensor_header(cursor) for _ in range(tensor_count)]
        except UnicodeDecodeError:
            raise BadInputError(f"{path}: text in the header is not UTF-8; the file is damaged") from None
        alignment = max(fields.integer("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT), 1)
        base = -(-cursor.at // alignment) * alignment
        tensors = {name: _tensor(path, name, shape, kind, base + at, len(data)) for name, shape, kind, at in headers}
    return GgufFile(metadata, tensors)


def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    (dims,) = cursor.scalars("I")
    sizes = cursor.scalars("Q", dims)
    (kind,), (offset,) = cursor.scalars("I"), cursor.scalars("Q")
    return name, sizes[::-1], kind, offset


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, size: int) -> StoredTensor:
    try:
        dtype = gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise UnsupportedError(
            f"{path}: tensor {name} has ggml type {kind}, unknown to the installed gguf library"
        ) from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[dtype]
    if not shape or shape[-1] % block:
        raise BadInputError(f"{path}: tensor {name} {list(shape)} does not fill whole blocks of {dtype.name} ({block})")
    nbytes = math.prod(shape) // block * block_bytes
    if offset + nbytes > size:
        raise BadInputError(
            f"{path} is truncated: tensor {name} ends at byte {offset + nbytes} of {size}; copy it again"
        )
    return StoredTensor(name, path, dtype.name, shape, offset, nbytes)
