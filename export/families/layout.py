"""Where each canonical parameter lies in a checkpoint: rows of one or several tensors, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.export.families.packed import PackedTensor
from mimo_edge.export.families.tensors import QUANTISED_DTYPES, StoredTensor, read_rows, readable
from mimo_edge.export.quantize.rtn import Quantized
from mimo_edge.params import Param, parameters
from mimo_edge.spec import AttentionSpec, ModelSpec, TensorQuant


@dataclass(frozen=True)
class Piece:
    """`rows` consecutive rows of a parameter: the rows from `start` of a tensor whose whole shape must be `shape`.

    Leading dimensions are flattened, so an expert is a range of rows of a 3-D tensor. `head` > 0: each head of that
    many rows is stored with its two rotary halves interleaved (llama.cpp). `add` is added to every value.
    """

    tensor: str
    shape: tuple[int, ...]
    rows: int
    start: int = 0
    head: int = 0
    add: float = 0.0


COMPUTED = ("rotary_emb.", "attn_rot_embd.")  # tables in old checkpoints that follow from the config
Layout = dict[str, tuple[Piece, ...]]


@dataclass(frozen=True)
class Naming:
    """Names of a decoder's tensors in one file format.

    `top`: names of embed, norm and head. `layer`: prefix with `{}` for the layer's index. `parts`: local parameter name
    -> tensor names behind the prefix; several names are stacked. `heads`, `head_parts`: the same for MTP heads.
    """

    top: Mapping[str, str]
    layer: str
    parts: Mapping[str, tuple[str, ...]]
    heads: str = ""
    head_parts: Mapping[str, tuple[str, ...]] | None = None


def attention_at(spec: ModelSpec, name: str) -> AttentionSpec:
    """The attention kind of the layer that the canonical parameter `name` belongs to."""
    scope, index, *_ = name.split(".")
    if scope == "mtp":
        assert spec.mtp is not None
        return spec.attention[spec.mtp.attention]
    return spec.attention_of(int(index))


def plain_layout(spec: ModelSpec, naming: Naming) -> Layout:
    """The layout of a checkpoint that stores q, k, v, gate and up apart and experts one by one."""
    return {p.name: _stack(p, _tensors(p.name, naming), _split(spec, p)) for p in parameters(spec)}


def _tensors(name: str, naming: Naming) -> list[str]:
    if name in naming.top:
        return [naming.top[name]]
    scope, index, part = name.split(".", 2)
    prefix = naming.layer if scope == "layers" else naming.heads
    if scope == "mtp" and not part.startswith("layer."):
        assert naming.head_parts is not None
        names = list(naming.head_parts[part])
    else:
        names = _part(part.removeprefix("layer."), naming)
    return [prefix.format(index) + n for n in names]


def _part(part: str, naming: Naming) -> list[str]:
    expert = ""
    if part.startswith("experts."):
        _, expert, part = part.split(".")
        part = f"experts.{part}"
    return [n.format(expert) for n in naming.parts[part]]


def _split(spec: ModelSpec, param: Param) -> tuple[int, ...]:
    if param.name.endswith((".qkv", ".qkv.bias")):
        a = attention_at(spec, param.name)
        return a.q_rows, a.k_rows, a.v_rows
    if param.name.endswith(".gate_up"):
        return (param.shape[0] // 2,) * 2
    return (param.shape[0],)


def _stack(param: Param, tensors: list[str], rows: tuple[int, ...]) -> tuple[Piece, ...]:
    return tuple(Piece(t, (n, *param.shape[1:]), n) for t, n in zip(tensors, rows, strict=True))


def check_layout(
    spec: ModelSpec, tensors: Mapping[str, StoredTensor], layout: Layout, layer_prefix: str, quantised: str | None
) -> None:
    """Every parameter must be there, with the shape that the config implies and a readable dtype, and nothing that
    belongs to a layer may be left over: an unread bias or norm would silently change the model.

    `quantised` names the config's quantisation, if it has one: then a missing tensor means packed weights.
    Raises BadInputError or UnsupportedError naming the tensor.
    """
    used = set()
    for param in parameters(spec):
        for piece in layout[param.name]:
            used.add(piece.tensor)
            tensor = tensors.get(piece.tensor)
            if tensor is None and quantised:
                raise UnsupportedError(
                    f"{piece.tensor} is missing and the config says {quantised}: export from the unquantised checkpoint"
                )
            if tensor is None:
                raise BadInputError(f"tensor {piece.tensor} is missing in the checkpoint (the config calls for it)")
            _check_tensor(tensor, piece.shape)
    for name in sorted(tensors.keys() - used):
        if name.startswith(layer_prefix) and not any(n in name for n in COMPUTED):
            raise UnsupportedError(
                f"{tensors[name]} has no place in family {spec.family} with {len(spec.layers)} layers"
            )


def _check_tensor(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, PackedTensor) and not readable(tensor.dtype):
        kind = UnsupportedError if tensor.dtype.startswith(QUANTISED_DTYPES) else BadInputError
        raise kind(
            f"{tensor} has dtype {tensor.dtype} (readable: BF16, F16, F32; export from the unquantised checkpoint)"
        )
    if tensor.shape != shape:
        raise BadInputError(f"{tensor} has shape {list(tensor.shape)}, the config implies {list(shape)}")


class LayoutSource:
    """`Source` over files: reads the rows asked from the pieces that hold them."""

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, StoredTensor], layout: Layout):
        self._params = {p.name: p for p in parameters(spec)}
        self._tensors, self._layout = tensors, layout

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        param = self._params.get(name)
        if param is None:
            raise BadInputError(f"no parameter {name!r} in this model")
        stop = param.shape[0] if stop is None else stop
        if not 0 <= start <= stop <= param.shape[0]:
            raise BadInputError(f"{name}: rows [{start}, {stop}) are outside 0..{param.shape[0]}")
        out = np.empty((stop - start, *param.shape[1:]), np.float32)
        at = 0
        for piece, low, high in self._parts(name, start, stop):
            rows = self._rows(piece, low, high)
            out[at : at + high - low] = rows.reshape(high - low, *param.shape[1:])
            at += high - low
        return out

    def ready(self, name: str, quant: TensorQuant, start: int = 0, stop: int | None = None) -> Quantized | None:
        """Rows [start, stop) as the checkpoint stores them, if that is `quant` (coarser groups repeat their scales)."""
        stop = self._params[name].shape[0] if stop is None else stop
        tensors = [self._tensors[piece.tensor] for piece in self._layout[name]]
        if quant.bits != 4 or not all(isinstance(t, PackedTensor) and t.group % quant.group == 0 for t in tensors):
            return None
        found = []
        for piece, low, high in self._parts(name, start, stop):
            tensor = self._tensors[piece.tensor]
            assert isinstance(tensor, PackedTensor) and not piece.head and not piece.add
            found.append(tensor.regrouped(piece.start + low, piece.start + high, quant.group))
        q, scales, zeros = (np.concatenate(part) for part in zip(*found, strict=True))
        return q, scales, zeros

    def _parts(self, name: str, start: int, stop: int) -> Iterator[tuple[Piece, int, int]]:
        """The pieces that hold rows [start, stop) of the parameter, each with the range of its own rows."""
        first = 0  # the parameter's row at which the piece begins
        for piece in self._layout[name]:
            low, high = max(start, first), min(stop, first + piece.rows)
            if low < high:
                yield piece, low - first, high - first
            first += piece.rows

    def _rows(self, piece: Piece, low: int, high: int) -> NDArray[np.float32]:
        """Rows [low, high) of the piece."""
        tensor = self._tensors[piece.tensor]
        if isinstance(tensor, PackedTensor):
            values = tensor.dequantised(piece.start + low, piece.start + high)
        elif not piece.head:
            values = read_rows(tensor, piece.start + low, piece.start + high)
        else:
            a, b = low // piece.head * piece.head, -(-high // piece.head) * piece.head  # whole heads
            values = read_rows(tensor, piece.start + a, piece.start + b)
            halves = values.reshape(-1, piece.head // 2, 2, values.shape[1]).swapaxes(1, 2)
            values = halves.reshape(b - a, -1)[low - a : high - a]
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):
            raise BadInputError(f"{tensor} holds NaN or infinite values; the file is damaged or was saved broken")
        return values + np.float32(piece.add) if piece.add else values
