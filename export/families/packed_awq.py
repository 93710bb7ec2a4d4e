"""AWQ in its `gemm` layout, as AutoAWQ writes it (awq/modules/linear/gemm.py).

qweight int32 [K, N/8], qzeros int32 [K/G, N/8], scales float16 [K/G, N]: eight neighbouring outputs share a word, the
i-th nibble from below holding output ORDER[i] of the eight. Zeros are stored as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimo_edge.export.families.fields import Fields
from mimo_edge.export.families.packed import (
    PackedTensor,
    Parts,
    Rows,
    check_matrix,
    check_part,
    check_scales,
    common,
    find_layers,
    group_of,
    nibbles,
)
from mimo_edge.export.families.tensors import StoredTensor, read_columns, to_float32
from mimo_edge.export.quantize.rtn import pack

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACE = [ORDER.index(i) for i in range(8)]  # the nibble that holds output i


@dataclass(frozen=True)
class AwqTensor(PackedTensor):
    def packed_rows(self, start: int, stop: int) -> Rows:
        scales = self.parts["scales"]
        return Rows(
            pack(_outputs(self.parts["qweight"], start, stop), 4),
            np.ascontiguousarray(to_float32(read_columns(scales, start, stop), scales.dtype).T),
            _outputs(self.parts["qzeros"], start, stop),
        )


def _outputs(tensor: StoredTensor, start: int, stop: int) -> NDArray[np.uint8]:
    """Columns [start, stop) of the unpacked matrix as rows: uint8 [stop - start, tensor.rows]."""
    first = start // 8
    packed = nibbles(read_columns(tensor, first, -(-stop // 8)))
    ordered = packed.reshape(tensor.rows, -1, 8)[..., _PLACE].reshape(tensor.rows, -1)
    return np.ascontiguousarray(ordered[:, start - 8 * first : stop - 8 * first].T)


def awq_layers(fields: Fields, tensors: Mapping[str, StoredTensor]) -> dict[str, PackedTensor]:
    """Name of the float weight -> packed layer. Raises UnsupportedError and BadInputError naming field or tensor."""
    bits = "bits" if fields.has("bits") else "w_bit"
    fields.integer(bits)
    fields.allow(bits, 4)
    for name in ("version", "checkpoint_format", "format"):
        fields.allow(name, "gemm", "GEMM")
    size = fields.integer("group_size" if fields.has("group_size") else "q_group_size")
    found = find_layers(tensors, "qweight", ("qzeros", "scales"), ())
    return {f"{layer}.weight": _layer(parts, size) for layer, parts in found}


def _layer(parts: Parts, size: int) -> AwqTensor:
    main, scales = parts["qweight"], parts["scales"]
    check_matrix(main)
    k, n = main.shape[0], 8 * main.shape[1]
    groups = scales.shape[0] if len(scales.shape) == 2 else 1
    check_part(scales, ("F16", "BF16", "F32"), (groups, n))
    check_part(parts["qzeros"], ("I32",), (groups, n // 8))
    group = group_of(main, k, groups, [size])
    check_scales(scales)
    return AwqTensor(**common(parts, "qweight", (n, k), group))
