"""Device memory of the cuda backend: a few large allocations made once, and weights streamed into them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from mimo_edge.backends.cuda_driver import Driver, OutOfMemoryError
from mimo_edge.errors import BadInputError

CHUNK = 256 << 20  # Orin refuses large single allocations (L4T 36.4.7: above about 1 GiB, less when fragmented)
UNIT = 2 << 20  # what the driver of a GPU with memory of its own rounds an allocation up to
_ALIGN = 256
_PINNED = 8 << 20


def place(sizes: Mapping[str, int], chunk: int = CHUNK) -> tuple[list[int], dict[str, tuple[int, int]]]:
    """Packs named pieces, in order, into allocations of at most `chunk` bytes; a larger piece gets one of its own.

    Returns the allocations' sizes and name -> (allocation, offset); offsets are multiples of 256.
    """
    chunks: list[int] = []
    places = {}
    current = -1  # the allocation that still takes pieces
    for name, nbytes in sizes.items():
        rounded = -(-max(nbytes, 1) // _ALIGN) * _ALIGN
        if rounded > chunk:
            places[name] = (len(chunks), 0)
            chunks.append(rounded)
            continue
        if current < 0 or chunks[current] + rounded > chunk:
            current = len(chunks)
            chunks.append(0)
        places[name] = (current, chunks[current])
        chunks[current] += rounded
    return chunks, places


def taken(sizes: Mapping[str, int]) -> int:
    """Bytes that an Arena of these pieces takes of the device."""
    return sum(-(-nbytes // UNIT) * UNIT for nbytes in place(sizes)[0])


class Arena:
    """Named pieces of device memory: `address[name]`. Raises OutOfMemoryError, nothing kept, if they do not fit."""

    def __init__(self, driver: Driver, sizes: Mapping[str, int]):
        self._driver = driver
        self._chunks: list[int] = []
        chunks, places = place(sizes)
        self.nbytes = sum(chunks)
        try:
            for nbytes in chunks:
                self._chunks.append(driver.malloc(nbytes))
        except OutOfMemoryError:
            self.close()
            raise
        self.address = {name: self._chunks[i] + offset for name, (i, offset) in places.items()}
        self.sizes = dict(sizes)

    def fill(self, name: str, byte: int) -> None:
        self._driver.fill(self.address[name], byte, self.sizes[name])

    def close(self) -> None:
        for address in self._chunks:
            self._driver.free(address)
        self._chunks = []


def read_places(path: Path) -> dict[str, tuple[int, int]]:
    """Name -> (offset, bytes) in the device weights' file. Raises BadInputError when the text is damaged."""
    try:
        return {name: (int(at), int(n)) for name, (at, n) in json.loads(path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise BadInputError(f"{path} is damaged ({e}): export the model again") from None


def staging(nbytes: int) -> int:
    """Bytes of each of the two buffers that so many bytes of weights are streamed through: at most 2 % of them, unless
    that is too little to be read at once."""
    return min(_PINNED, max(256 << 10, nbytes // 50))


def stream(driver: Driver, path: Path, places: Mapping[str, tuple[int, int]], arena: Arena) -> None:
    """Copies the pieces of `path` into the arena through two small page-locked buffers: one fills while one is sent.

    The file's pages are given back as they are read: on Orin host and device share one memory.
    """
    size = staging(sum(nbytes for _, nbytes in places.values()))
    buffers = [driver.pinned(size) for _ in range(2)]
    turn = 0
    try:
        with path.open("rb", buffering=0) as file:
            for name, (offset, nbytes) in places.items():
                for at in range(0, nbytes, size):
                    part = buffers[turn][: min(size, nbytes - at)]
                    file.seek(offset + at)
                    if file.readinto(part.data) != len(part):
                        raise BadInputError(f"{path} ends early: copy or export the bundle again")
                    driver.sync()  # the other buffer was sent
                    driver.upload(arena.address[name] + at, part)
                    turn = 1 - turn
                os.posix_fadvise(file.fileno(), offset, nbytes, os.POSIX_FADV_DONTNEED)
        driver.sync()
    finally:
        for buffer in buffers:
            driver.unpin(buffer)
