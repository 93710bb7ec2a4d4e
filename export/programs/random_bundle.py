"""A bundle of random weights: the speed of a shape without its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from mimo_edge.bundle import TOKENIZER, WEIGHTS, Bundle, BundleWriter
from mimo_edge.export.programs.bundle import Progress, compile_kernels, device_bytes
from mimo_edge.export.programs.lower import check_supported
from mimo_edge.export.programs.weights import frequencies, lay_out, stacked
from mimo_edge.kernels import index
from mimo_edge.kernels.int4_linear import layout
from mimo_edge.params import parameters
from mimo_edge.spec import ModelSpec, QuantSpec, TensorQuant

_BLOCK = 64 << 20
_NO_WORDS = '{"added_tokens": [], "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}}'


def random_bundle(spec: ModelSpec, out: Path, capabilities: Sequence[int], progress: Progress, seed: int = 0) -> Bundle:
    """Writes the bundle `out`, of 4-bit groups of 64 where the spec says nothing. Only the cuda backend runs it: it has
    device weights alone. Its tokenizer knows no words. Raises UnsupportedError and MimoEdgeError as add_kernels does.
    """
    q = TensorQuant(4, 64)
    spec = replace(spec, mtp=None, quant=QuantSpec(q, q, q, q) if spec.quant == QuantSpec() else spec.quant)
    check_supported(spec)
    with BundleWriter(out) as writer:
        writer.reserve(device_bytes(spec))
        compile_kernels(writer, spec, capabilities, progress)
        _write(spec, writer.path(index.WEIGHTS), writer.path(index.WEIGHTS_INDEX), seed)
        writer.path(WEIGHTS).write_text("{}")
        writer.path(TOKENIZER).write_text(_NO_WORDS)
        return writer.finish(spec, ",".join(f"sm_{c}" for c in capabilities), f"random weights, {spec.family}")


def _write(spec: ModelSpec, data: Path, places_file: Path, seed: int) -> None:
    """Levels and zeros from one random block, over and over; scales that keep activations near 1; norms of 1."""
    rng = np.random.default_rng(seed)
    block = np.frombuffer(rng.bytes(_BLOCK), np.uint8)
    places, _ = lay_out(spec)
    with data.open("wb") as file:
        for p in parameters(spec):
            quant = spec.quant.of(p.kind)
            if quant is None:
                norm = len(p.shape) == 1 and p.name.endswith("norm")
                values = np.ones(p.shape) if norm else rng.standard_normal(p.shape) * p.shape[-1] ** -0.5
                _put(file, places[p.name], values.astype("<f4"))
                continue
            scale = p.shape[1] ** -0.5 / (2.0**quant.bits * 6**-0.5)  # the spread of a random level less a random zero
            shapes = layout.shapes(*p.shape, quant, stacked(p))
            _put(file, places[f"{p.name}.scales"], np.full(shapes["scales"][1], scale, np.float16))
            _put(file, places[f"{p.name}.zeros"], block >> (8 - quant.bits))
            _put(file, places[f"{p.name}.q"], block)
        for name, values in frequencies(spec).items():
            _put(file, places[name], values)
    places_file.write_text(json.dumps(places) + "\n")


def _put(file: BinaryIO, place: tuple[int, int], values: NDArray) -> None:
    """Writes `values`, again and again where the place is larger."""
    offset, nbytes = place
    raw = np.ascontiguousarray(values).data.cast("B")
    file.seek(offset)
    for start in range(0, nbytes, len(raw)):
        file.write(raw[: min(len(raw), nbytes - start)])
