"""Device layout of a quantised matrix: from `mimo_edge.params.stored` to what the kernels load. NumPy only.

Rows come in tiles of 32, K in chunks of 32. A warp's 32 lanes (lane = 4 * row8 + quad) read one chunk of one tile as
one run of 512 bytes, 16 bytes a lane: rows row8, row8 + 8, row8 + 16, row8 + 24, each 8 weights from 8 * quad on. That
is the order in which the matrix instruction wants them, so nothing is exchanged between lanes.

    q       int32   [tiles, K/32, bits/4, 8 row8, 4 quad, 4 rows of 8]
    scales  float16 [tiles, K/G, 8 row8, 4 rows of 8]
    zeros   uint8   [tiles, K/G, 8 row8, 4 rows of 8]

With 4 bits a word's weight 2j + h lies at bit 4j + 16h; with 8 bits word i holds weights 4i .. 4i+3 and weight 2j + h
of these lies at bit 8j + 16h: a mask of the word gives a pair of neighbours in two float16 halves. A tile's tail is
rows of scale 0. Stacked matrices (gate, then up) are padded each for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_edge.spec import TensorQuant

TILE = 32  # rows


def tiles(rows: int) -> int:
    """Tiles that `rows` rows of one matrix take."""
    return -(-rows // TILE)


@dataclass(frozen=True)
class Packed:
    """Device arrays of consecutive tiles: q int32, scales float16, zeros uint8, shaped as the module says."""

    q: NDArray[np.int32]
    scales: NDArray[np.float16]
    zeros: NDArray[np.uint8]


def shapes(n: int, k: int, quant: TensorQuant, stacked: int = 1) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Buffers of an [n, k] matrix: suffix -> (DType, shape). `stacked` equal matrices lie behind each other."""
    count = stacked * tiles(n // stacked)
    return {
        "q": ("i32", (count, k // 32, quant.bits // 4, 8, 4, 4)),
        "scales": ("fp16", (count, k // quant.group, 8, 4)),
        "zeros": ("u8", (count, k // quant.group, 8, 4)),
    }


def row_blocks(n: int, stacked: int = 1, rows: int = 2048) -> list[tuple[int, int, int]]:
    """How to pack [n, K] piece by piece: (first row, end row, first tile), pieces of at most `rows` (a multiple of
    32)."""
    each = n // stacked
    return [
        (part * each + start, part * each + min(start + rows, each), part * tiles(each) + start // TILE)
        for part in range(stacked)
        for start in range(0, each, rows)
    ]


def pack(q: NDArray[np.uint8], scales: NDArray[np.float32], zeros: NDArray[np.uint8], bits: int) -> Packed:
    """Rows of one matrix, starting at a tile's first row: q [n, K/G, G*bits/8], scales [n, K/G], zeros [n, ...]."""
    n, groups = scales.shape
    pad = tiles(n) * TILE - n
    words = np.ascontiguousarray(q.reshape(n, -1)).view("<u4")
    words = _pairs(words, bits).reshape(n, -1, 4, bits // 4)  # row, chunk, quad, word
    words = np.pad(words, ((0, pad), (0, 0), (0, 0), (0, 0))).reshape(-1, 4, 8, *words.shape[1:])
    packed = words.transpose(0, 3, 5, 2, 4, 1)  # tile, chunk, word, row8, quad, rows of 8
    return Packed(
        np.ascontiguousarray(packed).view(np.int32),
        _groups(scales.astype(np.float16), pad),
        _groups(_zeros(zeros, groups, bits), pad),
    )


def _pairs(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    """Moves value 2j + h of each word from bit bits * (2j + h) to bit bits * j + 16 * h."""
    out = np.zeros_like(words)
    mask = np.uint32((1 << bits) - 1)
    for i in range(32 // bits):
        j, h = divmod(i, 2)
        out |= ((words >> np.uint32(bits * i)) & mask) << np.uint32(bits * j + 16 * h)
    return out


def _zeros(zeros: NDArray[np.uint8], groups: int, bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return zeros[:, :groups]
    return np.stack((zeros & 15, zeros >> 4), axis=-1).reshape(len(zeros), -1)[:, :groups]


def _groups(values: NDArray[Any], pad: int) -> NDArray[Any]:
    """[n, K/G] -> [tiles, K/G, 8, 4]."""
    padded = np.pad(values, ((0, pad), (0, 0)))
    return np.ascontiguousarray(padded.reshape(-1, 4, 8, values.shape[1]).transpose(0, 3, 2, 1))
