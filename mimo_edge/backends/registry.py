"""Backends by name. A loader imports its library only when it is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mimo_edge.backends.base import Backend
from mimo_edge.errors import BadInputError
from mimo_edge.extras import needs_extra

if TYPE_CHECKING:
    from mimo_edge.bundle import Bundle

log = logging.getLogger("mimo_edge")
DEFAULT = "onnxruntime"


def _onnxruntime(bundle: Bundle, threads: int | None, float_activations: bool = False) -> Backend:
    from mimo_edge.backends.onnxruntime import OnnxRuntimeBackend

    return OnnxRuntimeBackend.open(bundle, threads, float_activations)


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
    "reference": _reference,
}


def load(name: str, bundle: Bundle, threads: int | None = None) -> Backend:
    """The backend `name` ("auto" chooses one and logs why) with the bundle's weights, nothing allocated yet.

    Raises BadInputError on an unknown name, UnsupportedError when its library is missing.
    """
    if name == "auto":
        name = DEFAULT
        log.info("backend %s, as this version has none for a GPU and this is the fastest on a CPU", name)
    if name not in LOADERS:
        raise BadInputError(f"unknown backend {name!r} (allowed: auto, {', '.join(sorted(LOADERS))})")
    return LOADERS[name](bundle, threads)
