"""Bundles to compare backends on a GPU with the reference, and what counts as equal (parity_cuda.py, tests/parity)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.backends.onnxruntime import FLOAT_MODEL
from mimo_edge.bundle import TOKENIZER, WEIGHTS, Bundle, BundleWriter
from mimo_edge.export.graph.cpu import emit_graphs
from mimo_edge.export.programs import add_kernels
from mimo_edge.export.quantize.rtn import quantize_rows
from mimo_edge.params import parameters, stored_tensors
from mimo_edge.spec import ModelSpec, read_spec
from mimo_edge.tensors import lay_out

SPECS = Path(__file__).parent / "specs"
ORIN, TOLERANCE = 87, 2e-2
TIE = 0.05  # logits: what float16 activations may turn around

Progress = Callable[[int, int, str], None]


def shapes() -> dict[str, ModelSpec]:
    """Models small enough for the reference on a CPU, with what the built-in one lacks."""
    gemma, seven = (read_spec(SPECS / f"{name}.json") for name in ("gemma-3-270m", "mimo-7b"))
    few = replace(seven, layers=seven.layers[:2], vocab_size=4000, max_context=8192)
    biased = {k: replace(a, qkv_bias=True) for k, a in few.attention.items()}
    return {
        "gemma": replace(gemma, layers=gemma.layers[4:8], vocab_size=8000, max_context=8192),
        "mimo-v2": read_spec(SPECS / "mimo-v2-small.json"),
        "7b, 2 layers, biases": replace(few, attention=biased),
    }


def random_weights(spec: ModelSpec, out: Path, capabilities: Sequence[int], seed: int, progress: Progress) -> Bundle:
    """A bundle of random weights that the reference and ONNX Runtime can read, too."""
    g = torch.Generator().manual_seed(seed)
    with BundleWriter(out) as writer:
        header, places = lay_out(stored_tensors(spec))
        with writer.path(WEIGHTS).open("wb") as file:
            file.write(header)
            for p in parameters(spec):
                values = torch.randn(p.shape, generator=g) * (p.shape[-1] ** -0.5 if len(p.shape) > 1 else 0.3)
                values = 1 + values if p.name.endswith("norm") else values
                quant = spec.quant.of(p.kind)
                for part in (values.numpy(),) if quant is None else quantize_rows(values.numpy(), quant, p.name):
                    file.write(np.ascontiguousarray(part).data)
        for name, graph in emit_graphs(spec, places, FLOAT_MODEL, accuracy_level=1):
            writer.path(name).write_bytes(graph.SerializeToString())
        writer.path(TOKENIZER).write_text("{}")
        add_kernels(writer, spec, capabilities, progress)
        return writer.finish(spec, "random", "random weights")


def open_for_orin(bundle: Bundle) -> CudaBackend:
    """The backend as if the bundle had nothing newer than Orin's kernels, whose PTX the driver then compiles."""
    files = {n: f for n, f in bundle.manifest.files.items() if "/sm_" not in n or f"/sm_{ORIN}/" in n}
    only = Bundle(bundle.path, bundle.spec, replace(bundle.manifest, files=files))
    return CudaBackend.open(only, ptx=True)
