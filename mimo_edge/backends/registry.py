"""Backends by name. A loader imports its library only when it is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mimo_edge.backends.base import Backend
from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.extras import needs_extra

if TYPE_CHECKING:
    from mimo_edge.bundle import Bundle

log = logging.getLogger("mimo_edge")
DEFAULT = "onnxruntime"


def _onnxruntime(bundle: Bundle, threads: int | None, float_activations: bool = False) -> Backend:
    from mimo_edge.backends.onnxruntime import OnnxRuntimeBackend

    return OnnxRuntimeBackend.open(bundle, threads, float_activations)


def _cuda(bundle: Bundle, threads: int | None, ptx: bool = False) -> Backend:
    from mimo_edge.backends.cuda import CudaBackend

    return CudaBackend.open(bundle, ptx)


def _tensorrt(bundle: Bundle, threads: int | None) -> Backend:
    from mimo_edge.backends.tensorrt import TensorRtBackend

    return TensorRtBackend.open(bundle)


def _reference(bundle: Bundle, threads: int | None) -> Backend:
    with needs_extra("export", "backend 'reference'"):
        import torch

        from mimo_edge.backends.reference import ReferenceBackend
    if threads is not None:
        torch.set_num_threads(threads)
    return ReferenceBackend.open(bundle)


LOADERS: dict[str, Callable[[Bundle, int | None], Backend]] = {
    "onnxruntime": _onnxruntime,
    # slower; 8-bit activations let a token depend, through rounding, on how rows were grouped into steps
    "onnxruntime-float": partial(_onnxruntime, float_activations=True),
    "tensorrt": _tensorrt,
    "cuda": _cuda,
    # lets the driver compile an older GPU's kernels where the bundle has none for this one
    "cuda-ptx": partial(_cuda, ptx=True),
    "reference": _reference,
}


def _auto(bundle: Bundle, threads: int | None) -> Backend:
    """An engine of TensorRT, else the GPU's kernels, where the bundle has some for it and they can be used."""
    from mimo_edge.backends.cuda_kernels import targets

    reasons = ["the bundle has no kernels for a GPU"]
    if targets(bundle):
        reasons = []
        for name in ("tensorrt", "cuda"):
            try:
                backend = LOADERS[name](bundle, threads)
            except UnsupportedError as e:
                reasons.append(f"{name} cannot be used: {e}")
                continue
            why = {"tensorrt": "there is an engine for this GPU", "cuda": "the bundle has kernels for this GPU"}[name]
            log.info("backend %s, as %s", name, "; ".join([why, *reasons]))
            return backend
    log.info("backend %s, as %s", DEFAULT, "; ".join(reasons))
    return LOADERS[DEFAULT](bundle, threads)


def load(name: str, bundle: Bundle, threads: int | None = None) -> Backend:
    """The backend `name` ("auto" chooses one and logs why) with the bundle's weights, nothing allocated yet.

    Raises BadInputError on an unknown name, UnsupportedError when its library is missing.
    """
    if name == "auto":
        return _auto(bundle, threads)
    if name not in LOADERS:
        raise BadInputError(f"unknown backend {name!r} (allowed: auto, {', '.join(sorted(LOADERS))})")
    return LOADERS[name](bundle, threads)
