"""Weights in the layout of the kernels, in a file of their own beside weights.safetensors.

weights.safetensors stays as it is, so that the same bundle answers on every backend (the reference that the GPU is
compared with, too), its fingerprint does not depend on targets, and one device file serves all compute capabilities.
The price is disk: the device file has about the size of the other. A GPU reads only its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mimo_edge.backends.oracle import rope_frequencies
from mimo_edge.kernels.int4_linear import layout
from mimo_edge.kernels.launch import Buffer
from mimo_edge.params import Param, parameters
from mimo_edge.spec import ModelSpec

Progress = Callable[[int, int, str], None]
_ALIGN = 256
_PARTS = ("q", "scales", "zeros")


def device_weights(spec: ModelSpec) -> dict[str, Buffer]:
    """Weight buffers by name: NAME of a float parameter, NAME.q, .scales and .zeros of a quantised one, and
    frequencies.KIND, the rotary frequencies of an attention kind."""
    out = {}
    for p in parameters(spec):
        quant = spec.quant.of(p.kind)
        if quant is None:
            out[p.name] = Buffer("fp32", p.shape, "weight")
            continue
        for part, (dtype, shape) in layout.shapes(*p.shape, quant, stacked(p)).items():
            out[f"{p.name}.{part}"] = Buffer(dtype, shape, "weight")
    return out | {name: Buffer("fp32", values.shape, "weight") for name, values in frequencies(spec).items()}


def lay_out(spec: ModelSpec) -> tuple[dict[str, tuple[int, int]], int]:
    """(offset, bytes) of each buffer in the device weights' file, and its size."""
    places, total = {}, 0
    for name, b in device_weights(spec).items():
        places[name] = total, b.nbytes
        total += -(-b.nbytes // _ALIGN) * _ALIGN
    return places, total


def write_device_weights(
    spec: ModelSpec, tensors: dict[str, NDArray], data: Path, index: Path, progress: Progress | None = None
) -> None:
    """Repacks the bundle's `tensors` (weights.safetensors, mapped), some thousand rows at a time, into the file `data`;
    `index` gets name -> [offset, bytes]."""
    places, total = lay_out(spec)
    done = 0
    with data.open("wb") as file:
        file.truncate(total)
        for name, at, values in _pieces(spec, tensors):
            raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            file.seek(places[name][0] + at)
            file.write(raw.data)
            done += len(raw)
            if progress:
                progress(done, total, "device weights")
    index.write_text(json.dumps(places) + "\n")


def _pieces(spec: ModelSpec, tensors: dict[str, NDArray]) -> Iterator[tuple[str, int, NDArray]]:
    """(buffer, byte offset in it, values) of everything that `device_weights` names."""
    for p in parameters(spec):
        quant = spec.quant.of(p.kind)
        if quant is None:
            yield p.name, 0, tensors[p.name]
            continue
        shapes = layout.shapes(*p.shape, quant, stacked(p))
        tile_bytes = {part: Buffer(dtype, shape[1:], "weight").nbytes for part, (dtype, shape) in shapes.items()}
        for start, stop, tile in layout.row_blocks(p.shape[0], stacked(p)):
            q, scales, zeros = (tensors[f"{p.name}.{part}"][start:stop] for part in _PARTS)
            packed = layout.pack(q, scales, zeros, quant.bits)
            for part in _PARTS:
                yield f"{p.name}.{part}", tile * tile_bytes[part], getattr(packed, part)
    for name, values in frequencies(spec).items():
        yield name, 0, values


def frequencies(spec: ModelSpec) -> dict[str, NDArray[np.float32]]:
    """Rotary frequencies by buffer, for each kind of attention that layers and heads use."""
    out = {}
    heads = [spec.mtp.attention] if spec.mtp else []
    for kind in dict.fromkeys([*(layer.attention for layer in spec.layers), *heads]):
        a = spec.attention[kind]
        out[f"frequencies.{kind}"] = rope_frequencies(a).numpy() if a.rotary_dim else np.zeros(1, np.float32)
    return out


def stacked(p: Param) -> int:
    """How many matrices lie behind each other in a parameter."""
    return 2 if p.name.endswith("gate_up") else 1
