"""Linear layers that a checkpoint already stores in 4 bits: integers, scales and zeros are handed on as they are.

A `PackedTensor` stands where the float weight [N out, K in] would: weight = (level - zero) * scale, exact in float32
because scales are float16 values. The formats are in packed_awq.py, packed_gptq.py and packed_compressed.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families.tensors import StoredTensor, read_raw, to_float32
from mimo_edge.export.quantize.rtn import Quantized, pack

GROUP_UNIT = 32  # our smallest group: coarser ones are multiples of it, whose scales are repeated
Parts = Mapping[str, StoredTensor]


class Rows(NamedTuple):
    """levels uint8 [n, K/2], low nibble first along K; scales float32 [n, K/G]; zeros uint8 [n, K/G], one a byte."""

    levels: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8]


@dataclass(frozen=True)
class PackedTensor(StoredTensor, ABC):
    """`name`, `offset` and `nbytes` are those of the integers, `shape` is [N, K]; `group` weights share a scale."""

    parts: Parts
    group: int

    @abstractmethod
    def packed_rows(self, start: int, stop: int) -> Rows:
        """Rows [start, stop). Raises BadInputError on a short file."""

    def dequantised(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop) as float32 [stop - start, K]."""
        rows = self.packed_rows(start, stop)
        values = nibbles(rows.levels).reshape(*rows.zeros.shape, self.group).astype(np.float32)
        values -= rows.zeros[..., None]
        values *= rows.scales[..., None]
        return values.reshape(stop - start, self.shape[1])

    def regrouped(self, start: int, stop: int, group: int) -> Quantized:
        """Rows [start, stop) as params.stored lays them out, in groups of `group`, which must divide ours."""
        rows, repeat = self.packed_rows(start, stop), self.group // group
        q = rows.levels.reshape(stop - start, -1, group // 2)
        return q, rows.scales.repeat(repeat, axis=1), pack(rows.zeros.repeat(repeat, axis=1), 4)

    def __str__(self) -> str:
        return f"packed tensor {self.name} in {self.file}"


def find_layers(
    tensors: Mapping[str, StoredTensor], main: str, others: Collection[str], optional: Collection[str]
) -> Iterator[tuple[str, Parts]]:
    """(layer, its parts) for each tensor LAYER.`main`. Raises BadInputError if one of `others` is missing beside it,
    or if the layer has a float weight too."""
    for name in sorted(tensors):
        layer, _, last = name.rpartition(".")
        if last != main:
            continue
        if f"{layer}.weight" in tensors:
            raise BadInputError(f"{tensors[name]}: there is {layer}.weight too, so which of them is meant?")
        parts = {p: tensors[f"{layer}.{p}"] for p in (main, *others, *optional) if f"{layer}.{p}" in tensors}
        for other in others:
            if other not in parts:
                raise BadInputError(f"tensor {layer}.{other} is missing beside {tensors[name]}")
        yield layer, parts


def common(parts: Parts, main: str, shape: tuple[int, int], group: int) -> dict[str, Any]:
    """The fields of a PackedTensor."""
    t = parts[main]
    return {"name": t.name, "file": t.file, "dtype": "W4", "shape": shape, "offset": t.offset, "nbytes": t.nbytes,
            "parts": parts, "group": group}  # fmt: skip


def check_part(tensor: StoredTensor, dtypes: Collection[str], shape: tuple[int, ...]) -> None:
    """Raises UnsupportedError on another dtype, BadInputError on another shape."""
    if tensor.dtype not in dtypes:
        raise UnsupportedError(f"{tensor} has dtype {tensor.dtype} (supported here: {', '.join(dtypes)})")
    if tensor.shape != shape:
        raise BadInputError(f"{tensor} has shape {list(tensor.shape)}, its layer's other tensors imply {list(shape)}")


def check_matrix(tensor: StoredTensor) -> None:
    """The integers must be a matrix of 32-bit words."""
    if tensor.dtype != "I32" or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise UnsupportedError(
            f"{tensor} is {tensor.dtype} {list(tensor.shape)} (supported: a matrix of I32, eight 4-bit weights each)"
        )


def group_of(main: StoredTensor, k: int, groups: int, declared: Collection[int] | None) -> int:
    """Weights that share a scale, from the number of `groups` in a row of `k`; it must be one that the config
    declares (-1: one group a row; None: the config has rules a layer, so any).

    Raises UnsupportedError when rows do not divide or the size is no multiple of 32, BadInputError on a contradiction.
    """
    sizes = {k // groups} if declared is None else {k if g == -1 else g for g in declared}
    dividing = {g for g in sizes if 0 < g <= k and k % g == 0}
    if not dividing:
        raise UnsupportedError(f"{main}: rows of {k} weights do not divide into groups of {max(sizes)}")
    group = next((g for g in dividing if k // g == groups), None)
    if group is None:
        raise BadInputError(
            f"{main}: the scales beside it make {groups} groups of a row of {k} weights, but the config's group_size "
            f"{max(sizes)} makes {k // max(dividing)}"
        )
    if group % GROUP_UNIT:
        raise UnsupportedError(f"{main}: groups of {group} are not supported (supported: multiples of {GROUP_UNIT})")
    return group


def check_order(main: StoredTensor, g_idx: StoredTensor | None, k: int, group: int) -> None:
    """Raises UnsupportedError if g_idx, the group of each input, says that groups are not consecutive inputs."""
    if g_idx is None:
        return
    check_part(g_idx, ("I32",), (k,))
    if not np.array_equal(read_raw(g_idx, 0, k).view("<i4").ravel(), np.arange(k) // group):
        raise UnsupportedError(
            f"{g_idx} reorders the inputs of {main.name} (desc_act): use a checkpoint made without activation order"
        )


def check_scales(scales: StoredTensor) -> None:
    """Bundles keep scales as float16 values, so others are refused here instead of being rounded.

    Raises BadInputError on NaN or infinite scales, UnsupportedError on values that float16 does not have.
    """
    values = to_float32(read_raw(scales, 0, scales.rows), scales.dtype)
    if not np.isfinite(values).all():
        raise BadInputError(f"{scales} holds NaN or infinite scales; the file is damaged or was saved broken")
    with np.errstate(over="ignore"):
        inexact = values[values.astype(np.float16) != values]
    if inexact.size:
        raise UnsupportedError(
            f"{scales} holds {inexact.size} {scales.dtype} scales that are not float16 values, such as {inexact[0]:g}: "
            "use a checkpoint with float16 scales or export from the unquantised one"
        )


def nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8 [..., B] -> uint8 [..., 2B], low nibble first."""
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1)
