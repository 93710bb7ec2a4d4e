"""compressed-tensors in its `pack-quantized` format (compressors/pack_quantized), 4 bits, by groups or by rows.

weight_packed int32 [N, K/8] along K, low nibble first, of level + 8; weight_scale [N, K/G]; weight_shape int64 [2];
weight_zero_point int32 [ceil(N/8), K/G], packed along N, of zero + 8, where the scheme is asymmetric. The offset of 8
is the same on levels and zeros, so both are kept with it and a symmetric layer has zeros of 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimo_edge.errors import BadInputError
from mimo_edge.export.families.fields import Fields
from mimo_edge.export.families.packed import (
    PackedTensor,
    Parts,
    Rows,
    check_matrix,
    check_order,
    check_part,
    check_scales,
    common,
    find_layers,
    group_of,
    nibbles,
)
from mimo_edge.export.families.tensors import StoredTensor, read_raw, to_float32

_SYMMETRIC_ZERO = 8


@dataclass(frozen=True)
class CompressedTensor(PackedTensor):
    def packed_rows(self, start: int, stop: int) -> Rows:
        scales = self.parts["weight_scale"]
        return Rows(
            read_raw(self.parts["weight_packed"], start, stop),
            to_float32(read_raw(scales, start, stop), scales.dtype),
            self._zeros(start, stop),
        )

    def _zeros(self, start: int, stop: int) -> NDArray[np.uint8]:
        groups = self.shape[1] // self.group
        if "weight_zero_point" not in self.parts:
            return np.full((stop - start, groups), _SYMMETRIC_ZERO, np.uint8)
        first = start // 8
        words = read_raw(self.parts["weight_zero_point"], first, -(-stop // 8)).view("<u4")
        zeros = nibbles(np.ascontiguousarray(words.T).view(np.uint8)).T
        return np.ascontiguousarray(zeros[start - 8 * first : stop - 8 * first])


def compressed_layers(fields: Fields, tensors: Mapping[str, StoredTensor]) -> dict[str, PackedTensor]:
    """Name of the float weight -> packed layer. Raises UnsupportedError and BadInputError naming field or tensor."""
    fields.text("format")
    fields.allow("format", "pack-quantized")
    fields.allow("kv_cache_scheme")
    if sparsity := fields.sub("sparsity_config"):
        sparsity.allow("format", "dense")
    schemes = fields.sub("config_groups")
    if schemes is None or not schemes.data:
        raise BadInputError(f"{fields.where}: no config_groups")
    sizes = {_scheme(scheme) for name in schemes.data if (scheme := schemes.sub(name))}
    found = find_layers(
        tensors, "weight_packed", ("weight_scale",), ("weight_zero_point", "weight_shape", "weight_g_idx")
    )
    return {f"{layer}.weight": _layer(parts, sizes) for layer, parts in found}


def _scheme(scheme: Fields) -> tuple[int, bool]:
    """Group size (-1: a row) and whether there are no zero points."""
    scheme.allow("format", "pack-quantized")
    scheme.allow("input_activations")
    scheme.allow("output_activations")
    weights = scheme.sub("weights")
    if weights is None:
        raise BadInputError(f"{scheme.where}: no weights")
    weights.integer("num_bits")
    weights.allow("num_bits", 4)
    weights.allow("type", "int")
    weights.allow("strategy", "group", "channel")
    weights.allow("dynamic", False)
    rowwise = weights.data.get("strategy") == "channel"
    return -1 if rowwise else weights.integer("group_size", -1), weights.flag("symmetric", True)


def _layer(parts: Parts, schemes: set[tuple[int, bool]]) -> CompressedTensor:
    main, scales, zeros = parts["weight_packed"], parts["weight_scale"], parts.get("weight_zero_point")
    check_matrix(main)
    n, k = main.shape[0], 8 * main.shape[1]
    if shape := parts.get("weight_shape"):
        check_part(shape, ("I64", "I32"), (2,))
        given = read_raw(shape, 0, 2).view("<i8" if shape.dtype == "I64" else "<i4").ravel().tolist()
        if given != [n, k]:
            raise BadInputError(f"{shape} says {given}, but {main} holds [{n}, {k}] weights")
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    check_part(scales, ("F16", "BF16", "F32"), (n, groups))
    declared = {size for size, symmetric in schemes if symmetric == (zeros is None)}
    if not declared:
        what = "has no weight_zero_point, but" if zeros is None else "has a weight_zero_point, but"
        raise BadInputError(f"{main} {what} the config has only {'a' if zeros is None else ''}symmetric schemes")
    group = group_of(main, k, groups, declared)
    if zeros:
        check_part(zeros, ("I32",), (-(-n // 8), groups))
    check_order(main, parts.get("weight_g_idx"), k, group)
    check_scales(scales)
    return CompressedTensor(**common(parts, "weight_packed", (n, k), group))
