"""A checkpoint with layers that are stored in 4 bits: which they are, and which formats they dictate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families.fields import Fields
from mimo_edge.export.families.layout import Layout
from mimo_edge.export.families.packed import PackedTensor
from mimo_edge.export.families.packed_awq import awq_layers
from mimo_edge.export.families.packed_compressed import compressed_layers
from mimo_edge.export.families.packed_gptq import gptq_layers
from mimo_edge.export.families.tensors import StoredTensor, read_rows
from mimo_edge.export.quantize.rtn import GROUPS
from mimo_edge.params import parameters
from mimo_edge.spec import ModelSpec, QuantSpec, TensorQuant

log = logging.getLogger(__name__)

METHODS: Mapping[str, Callable[[Fields, Mapping[str, StoredTensor]], dict[str, PackedTensor]]] = {
    "awq": awq_layers,
    "gptq": gptq_layers,
    "compressed-tensors": compressed_layers,
}


def with_packed(config: Fields, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """`tensors` in which one PackedTensor, named as the float weight would be, replaces the parts of each packed layer.

    Reads scales, zeros and orders, and a sample of weights, to check them. Unchanged when the config names no method
    that is known here. Raises UnsupportedError (bits, layout, order, scales that are no float16 values) and
    BadInputError (missing or contradictory parts) naming the field or tensor.
    """
    fields = config.sub("quantization_config")
    read = METHODS.get(fields.text("quant_method", "")) if fields else None
    if fields is None or read is None:
        return tensors
    layers = read(fields, tensors)
    if not layers:
        raise BadInputError(f"{fields.where}: quant_method {fields.text('quant_method')!r}, but no layer is packed so")
    parts = {part.name for layer in layers.values() for part in layer.parts.values()}
    return {n: t for n, t in tensors.items() if n not in parts} | layers


def without_zero_biases(tensors: dict[str, StoredTensor], layout: Layout) -> dict[str, StoredTensor]:
    """Some packers give every layer a bias; where the family has none and it is all zeros, it says nothing."""
    used = {piece.tensor for pieces in layout.values() for piece in pieces}
    packed = [n.removesuffix("weight") + "bias" for n, t in tensors.items() if isinstance(t, PackedTensor)]
    spare = [n for n in packed if n in tensors and n not in used and tensors[n].dtype in ("F16", "BF16", "F32")]
    zero = {n for n in spare if not read_rows(tensors[n], 0, tensors[n].rows).any()}
    return {n: t for n, t in tensors.items() if n not in zero}


def packed_formats(spec: ModelSpec, tensors: Mapping[str, StoredTensor], layout: Layout) -> QuantSpec:
    """The format of each kind that has packed layers: 4 bits in the largest groups that divide all of theirs.

    Layers of such a kind that the checkpoint left in float are quantised to the same format; a warning counts them.
    Raises UnsupportedError for a fused parameter that is packed in part.
    """
    groups: dict[str, set[int]] = {}
    left: dict[str, list[str]] = {}
    for param in (p for p in parameters(spec) if p.kind != "float"):
        pieces = [tensors[piece.tensor] for piece in layout[param.name]]
        packed = [t for t in pieces if isinstance(t, PackedTensor)]
        if packed and len(packed) < len(pieces):
            loose = next(t for t in pieces if not isinstance(t, PackedTensor))
            raise UnsupportedError(f"{loose} is in float, but {packed[0].name}, one matrix with it here, is packed")
        if packed:
            groups.setdefault(param.kind, set()).update(t.group for t in packed)
        else:
            left.setdefault(param.kind, []).append(pieces[0].name)
    formats = {
        kind: TensorQuant(4, max(g for g in GROUPS if all(size % g == 0 for size in sizes)))
        for kind, sizes in groups.items()
    }
    for kind, names in left.items():
        if kind in formats:
            log.warning(
                "%d layers (%s, ...) are in float beside packed ones: they are quantised to 4 bits in groups of %d too",
                len(names), names[0], formats[kind].group,
            )  # fmt: skip
    if spec.tied and "embedding" in formats:
        formats["head"] = formats["embedding"]
    return QuantSpec(**formats)
