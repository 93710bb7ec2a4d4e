"""GPTQ as AutoGPTQ and GPTQModel write it, 4 bits, and which of its two conventions for zeros a file really follows.

qweight int32 [K/8, N] along K, low nibble first; scales [K/G, N]; qzeros int32 [K/G, ceil(N/8)] along N, low nibble
first; g_idx int32 [K], the group of each input.

checkpoint_format `gptq` (v1) stores zeros less one, `gptq_v2` as they are, and metadata is known to be wrong. In a
symmetric layer every zero is 8, stored as 7 or 8: there the values decide. In an asymmetric one nothing marks the
convention, but weights average to nearly nothing: a reading that puts most groups a whole level off is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mimo_edge.errors import BadInputError, UnsupportedError
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
from mimo_edge.export.families.tensors import StoredTensor, read_columns, read_raw, to_float32

log = logging.getLogger(__name__)

_V1, _V2 = "gptq", "gptq_v2"
_ONES = np.uint32(0x11111111)  # one in each nibble
_STORED = {7: _V1, 8: _V2}  # what a symmetric layer holds -> convention
_NO_CHANCE = 16  # zeros of an asymmetric layer that are not all alike
# Asymmetric layers: offset in levels (the wrong convention is off by one), too few groups to say, weights looked at
_OFF, _FEW, _SAMPLE = 0.65, 1000, 1 << 20


@dataclass(frozen=True)
class GptqTensor(PackedTensor):
    v1: bool = False

    def packed_rows(self, start: int, stop: int) -> Rows:
        scales = self.parts["scales"]
        words = read_columns(self.parts["qweight"], start, stop).view("<u4")
        first = start // 8
        zeros = self.zeros(read_columns(self.parts["qzeros"], first, -(-stop // 8)))
        return Rows(
            np.ascontiguousarray(words.T).view(np.uint8),
            np.ascontiguousarray(to_float32(read_columns(scales, start, stop), scales.dtype).T),
            np.ascontiguousarray(zeros[:, start - 8 * first : stop - 8 * first].T),
        )

    def zeros(self, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """uint8 [K/G, bytes] as stored -> zeros uint8 [K/G, columns].

        v1 is made and undone a word at a time, so that a zero of 0 borrows from its neighbour and gives it back
        (GPTQModel, convert_gptq_v2_to_v1_format_module).
        """
        words = packed.view("<u4")
        return nibbles((words + _ONES if self.v1 else words).view(np.uint8))

    def stored_zeros(self) -> NDArray[np.uint8]:
        """As stored, uint8 [K/G, N]."""
        tensor = self.parts["qzeros"]
        return nibbles(read_raw(tensor, 0, tensor.rows))[:, : self.shape[0]]


def gptq_layers(fields: Fields, tensors: Mapping[str, StoredTensor]) -> dict[str, PackedTensor]:
    """Name of the float weight -> packed layer. Raises UnsupportedError and BadInputError naming field or tensor."""
    fields.integer("bits")
    fields.allow("bits", 4)
    fields.allow("checkpoint_format", _V1, _V2)
    fields.allow("format", _V1, _V2)
    fields.allow("is_marlin_format", False)
    fields.allow("pack_dtype", "int32")
    size = None if fields.data.get("dynamic") else [fields.integer("group_size")]  # dynamic: rules for single layers
    reordered = fields.flag("desc_act", False)
    found = find_layers(tensors, "qweight", ("qzeros", "scales"), ("g_idx",))
    return dict(_with_conventions({f"{n}.weight": _layer(p, size, reordered) for n, p in found}, fields))


def _layer(parts: Parts, size: list[int] | None, reordered: bool) -> GptqTensor:
    main, scales, g_idx = parts["qweight"], parts["scales"], parts.get("g_idx")
    check_matrix(main)
    k, n = 8 * main.shape[0], main.shape[1]
    groups = scales.shape[0] if len(scales.shape) == 2 else 1
    check_part(scales, ("F16", "BF16", "F32"), (groups, n))
    check_part(parts["qzeros"], ("I32",), (groups, -(-n // 8)))
    group = group_of(main, k, groups, size)
    if reordered and g_idx is None:
        raise UnsupportedError(f"{main}: desc_act is true and there is no g_idx, so the order of inputs is unknown")
    check_order(main, g_idx, k, group)
    check_scales(scales)
    return GptqTensor(**common(parts, "qweight", (n, k), group))


def _with_conventions(layers: dict[str, GptqTensor], fields: Fields) -> dict[str, GptqTensor]:
    claim, declared = fields.text("checkpoint_format", fields.text("format", _V1)), fields.flag("sym", False)
    symmetric: dict[str, str] = {}
    for name, layer in layers.items():
        stored = layer.stored_zeros()
        alike = (stored == stored[0, 0]).all() and (declared or stored.size >= _NO_CHANCE)
        if alike and int(stored[0, 0]) in _STORED:
            symmetric[name] = _STORED[int(stored[0, 0])]
        elif declared:
            raise BadInputError(
                f"{layer.parts['qzeros']} holds zeros from {stored.min()} to {stored.max()}, but the config says sym: "
                "symmetric layers store 7 (gptq) or 8 (gptq_v2) only"
            )
    lying = [name for name, found in symmetric.items() if found != claim]
    if lying:
        log.warning(
            "%s: checkpoint_format is %r, but %d layers (%s, ...) store the zeros of %r: read as these say",
            fields.where, claim, len(lying), lying[0], symmetric[lying[0]],
        )  # fmt: skip
    _check_convention({n: t for n, t in layers.items() if n not in symmetric}, claim, fields)
    return {n: replace(t, v1=symmetric.get(n, claim) == _V1) for n, t in layers.items()}


def _check_convention(layers: dict[str, GptqTensor], claim: str, fields: Fields) -> None:
    """Asymmetric layers: the typical mean of a group's levels must be its zero, read as the config says."""
    if claim == _V1:
        for layer in layers.values():
            _check_borrows(layer, fields)
    offsets = [_offsets(replace(layer, v1=claim == _V1)) for layer in layers.values()]
    if sum(map(len, offsets)) < _FEW:
        return
    off = float(np.median(np.concatenate(offsets)))
    if abs(off) > _OFF:
        other = _V1 if claim == _V2 else _V2
        raise BadInputError(
            f"{fields.where}: checkpoint_format is {claim!r}, but read so the weights of {len(layers)} asymmetric "
            f"layers are {off:+.2f} levels off zero: is it {other!r}? Then change it in the config"
        )


def _offsets(layer: GptqTensor) -> NDArray[np.float32]:
    """Mean of level - zero of the first groups of all rows (about a million weights of them)."""
    rows, group = layer.shape[0], layer.group
    count = min(layer.shape[1] // group, max(1, _SAMPLE // (rows * group)))
    words = read_raw(layer.parts["qweight"], 0, count * group // 8).view("<u4")
    levels = nibbles(np.ascontiguousarray(words.T).view(np.uint8)).reshape(rows, count, group)
    zeros = layer.zeros(read_raw(layer.parts["qzeros"], 0, count))[:, :rows]
    return (levels.mean(axis=-1, dtype=np.float32) - zeros.T).ravel()


def _check_borrows(layer: GptqTensor, fields: Fields) -> None:
    """A zero of 0 is stored as 15 in v1. Whether it took one from its neighbour depends on the writer; GPTQModel's
    does. Older AutoGPTQ spoiled all zeros of the word that lie above it, so an unknown writer's file is refused."""
    meta = fields.sub("meta")
    if meta and "gptqmodel" in str(meta.data.get("quantizer")):
        return
    stored = read_raw(layer.parts["qzeros"], 0, layer.parts["qzeros"].rows)
    by_nibble = (nibbles(stored) + 1) & 15
    if not np.array_equal(replace(layer, v1=True).zeros(stored), by_nibble):
        raise UnsupportedError(
            f"{layer.parts['qzeros']} holds zeros of 0 in the convention 'gptq', which stores them as -1; only files "
            "by GPTQModel (meta.quantizer) say how: use a checkpoint in the format 'gptq_v2'"
        )
