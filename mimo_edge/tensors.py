"""weights.safetensors: where each tensor lies, and how to read it without copying. Format: 8 bytes of header length
(little-endian), a JSON header, the tensors back to back (https://github.com/huggingface/safetensors#format)."""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimo_edge.errors import BadInputError
from mimo_edge.params import Stored

_DTYPES: dict[str, np.dtype] = {"F32": np.dtype("<f4"), "U8": np.dtype("u1")}
_ALIGN = 64  # of the first tensor, so that mapped float rows start on a cache line


class Location(NamedTuple):
    """One tensor in the file. dtype is F32 or U8, `offset` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def lay_out(tensors: Sequence[Stored]) -> tuple[bytes, dict[str, Location]]:
    """The bytes before the first tensor, and the place of each tensor, in the order given."""
    ends = list(itertools.accumulate(t.nbytes for t in tensors))
    entries = {
        t.name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [end - t.nbytes, end]}
        for t, end in zip(tensors, ends, strict=True)
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    header = struct.pack("<Q", len(text)) + text
    starts = [len(header) + end - t.nbytes for t, end in zip(tensors, ends, strict=True)]
    return header, {t.name: Location(t.dtype, t.shape, at, t.nbytes) for t, at in zip(tensors, starts, strict=True)}


def read_header(path: Path) -> dict[str, Location]:
    """Places of all tensors of the file. Raises BadInputError if the header or the file's size is wrong."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if 8 + length > size:
            raise BadInputError(f"{path}: {size} bytes, too short for its header: export the model again")
        text = file.read(length)
    try:
        return {name: _location(entry, 8 + length, size) for name, entry in json.loads(text).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise BadInputError(f"{path}: damaged header ({e}): export the model again") from None


def read_tensors(path: Path) -> dict[str, NDArray]:
    """Name -> read-only array mapped from the file; nothing is read until it is used.

    A float tensor behind one of an odd size is not aligned; NumPy copes, other libraries may need a copy.
    """
    places = read_header(path)
    data = np.memmap(path, dtype=np.uint8, mode="r")
    return {
        name: data[p.offset : p.offset + p.nbytes].view(_DTYPES[p.dtype]).reshape(p.shape) for name, p in places.items()
    }


def _location(entry: dict, data_start: int, file_size: int) -> Location:
    dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
    begin, end = (int(n) for n in entry["data_offsets"])
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype}")
    if min(shape, default=1) < 0 or end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise ValueError(f"shape {shape} in {end - begin} bytes")
    if begin < 0 or data_start + end > file_size:
        raise ValueError(f"bytes {begin} to {end} of {file_size - data_start}")
    return Location(dtype, shape, data_start + begin, end - begin)
