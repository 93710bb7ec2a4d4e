"""Tensors as they lie in files, and their rows as float32.

Rows are read with plain file reads instead of a mapping: pages of a mapping count as resident memory until it is
closed, and a checkpoint is often larger than the memory that an export may use.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mimo_edge.errors import BadInputError

QUANTISED_DTYPES = ("F8_", "F4", "F6_", "I8", "U8", "I32", "U32")  # how quantised weights appear in safetensors files
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class StoredTensor:
    """`nbytes` bytes at `offset` of `file`; dtype is a safetensors dtype or a ggml type, in capitals."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def rows(self) -> int:
        """Leading dimensions flattened; a 1-D tensor has rows of one element."""
        return self.shape[0] if len(self.shape) == 1 else math.prod(self.shape[:-1])

    def __str__(self) -> str:
        return f"tensor {self.name} in {self.file}"


@functools.cache
def readable(dtype: str) -> bool:
    """Whether `read_rows` can turn the dtype into float32."""
    if dtype in ("F32", "F16", "BF16"):
        return True
    import gguf

    if dtype not in gguf.GGMLQuantizationType.__members__:
        return False
    kind = gguf.GGMLQuantizationType[dtype]
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    try:
        gguf.quants.dequantize(block, kind)
    except NotImplementedError:
        return False
    return True


def read_rows(tensor: StoredTensor, start: int, stop: int) -> NDArray[np.float32]:
    """Rows [start, stop), float32 [stop - start, K] (K = 1 for a 1-D tensor). Raises BadInputError on a short file."""
    return to_float32(read_raw(tensor, start, stop), tensor.dtype)


def read_raw(tensor: StoredTensor, start: int, stop: int) -> NDArray[np.uint8]:
    """The bytes of rows [start, stop), uint8 [stop - start, bytes a row]. Raises BadInputError on a short file."""
    row_bytes = tensor.nbytes // tensor.rows
    try:
        with tensor.file.open("rb") as f:
            f.seek(tensor.offset + start * row_bytes)
            raw = np.fromfile(f, np.uint8, (stop - start) * row_bytes)
    except OSError as e:
        raise BadInputError(f"{tensor}: cannot read the file ({e.strerror})") from None
    if raw.size != (stop - start) * row_bytes:
        raise BadInputError(f"{tensor}: the file ends inside the tensor; copy or download it again")
    return raw.reshape(stop - start, row_bytes)


def read_columns(tensor: StoredTensor, start: int, stop: int) -> NDArray[np.uint8]:
    """The bytes of columns [start, stop) of a matrix, uint8 [rows, bytes]; reads all of it, a few MiB at a time."""
    item = tensor.nbytes // math.prod(tensor.shape)
    out = np.empty((tensor.rows, (stop - start) * item), np.uint8)
    step = max(1, _CHUNK_BYTES * tensor.rows // tensor.nbytes)
    for at in range(0, tensor.rows, step):
        block = read_raw(tensor, at, min(at + step, tensor.rows))
        out[at : at + len(block)] = block[:, start * item : stop * item]
    return out


def to_float32(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """uint8 [n, bytes] of a readable dtype -> float32 [n, K]."""
    if dtype == "F32":
        return raw.view("<f4")
    if dtype == "F16":
        return raw.view("<f2").astype(np.float32)
    if dtype == "BF16":  # the upper half of a float32
        bits = raw.view("<u2").astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    import gguf

    with np.errstate(all="ignore"):  # broken scales are reported by name, from the values
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[dtype])
