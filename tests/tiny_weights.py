"""Random weights of a tiny spec, written as a bundle writes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specs import RandomWeights

from mimo_edge.backends.reference import BundleWeights
from mimo_edge.export.quantize.rtn import quantize_rows
from mimo_edge.params import parameters, stored_tensors
from mimo_edge.spec import ModelSpec, QuantSpec, TensorQuant
from mimo_edge.tensors import Location, lay_out, read_tensors

WEIGHTS = "weights.safetensors"
INT4 = QuantSpec(*[TensorQuant(4, 32)] * 4)


def quantised(spec: ModelSpec, quant: QuantSpec = INT4) -> ModelSpec:
    return replace(spec, quant=quant)


def write_weights(spec: ModelSpec, folder: Path, seed: int = 0) -> tuple[dict[str, Location], BundleWeights]:
    """Writes weights.safetensors into `folder`; returns its header and the same weights for the oracle."""
    random = RandomWeights(spec, seed)
    arrays = {}
    for p in parameters(spec):
        value, quant = random.get(p.name).numpy(), spec.quant.of(p.kind)
        if quant is None:
            arrays[p.name] = value
        else:
            parts = quantize_rows(value, quant, p.name)
            arrays |= {f"{p.name}.{part}": a for part, a in zip(("q", "scales", "zeros"), parts, strict=True)}
    head, places = lay_out(stored_tensors(spec))
    with (folder / WEIGHTS).open("wb") as file:
        file.write(head)
        for t in stored_tensors(spec):
            file.write(arrays[t.name].tobytes())
    return places, BundleWeights(spec, read_tensors(folder / WEIGHTS), keep=True)
