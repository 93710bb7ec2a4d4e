"""TensorRT 10.3 to 11 and TensorRT-RTX behind one small surface: the module, its version, what it needs to run.

JetPack brings the module `tensorrt` (10.3 with 6.2, 10.16 with 7.2); TensorRT-RTX for desktop GPUs is `tensorrt_rtx`,
or `tensorrt_rtx_bindings` from the wheels tensorrt-rtx-cu13-libs and -bindings. Every name used of them is checked
against the bindings of 10.3, 10.16 and 11 by scripts/check_tensorrt_api.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mimo_edge.errors import UnsupportedError

MODULES = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")
FIRST, LAST = (10, 3), (11,)  # versions of tensorrt; RTX counts on its own
_INSTALL = "on a Jetson, JetPack's package python3-libnvinfer in a virtual environment with --system-site-packages"


@dataclass(frozen=True)
class TensorRt:
    """`version` has all of its parts: an engine is for exactly one. `rtx`: it knows neither Orin nor Hopper."""

    module: Any
    version: str
    rtx: bool

    @property
    def name(self) -> str:
        """For people and for names of folders: tensorrt-10.3.0."""
        return f"tensorrt{'-rtx' if self.rtx else ''}-{self.version}"


def load(modules: Sequence[str] = MODULES) -> TensorRt:
    """The first of the modules that is installed. Raises UnsupportedError when none is, or one of another version."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError) as e:  # a library that it needs is missing
            raise UnsupportedError(f"TensorRT (module {name}) cannot be loaded ({e}): install {_INSTALL}") from None
        return checked(module, "rtx" in name)
    raise UnsupportedError(f"TensorRT is not installed (modules {', '.join(modules)}): install {_INSTALL}")


def checked(module: Any, rtx: bool) -> TensorRt:
    version = str(module.__version__)
    parts = tuple(int(p) for p in version.split(".")[:2] if p.isdigit())
    if not rtx and not (parts >= FIRST and parts[:1] <= LAST):
        raise UnsupportedError(
            f"TensorRT {version} (works with 10.3 to 11): use the one that JetPack 6.2 or newer brings, {_INSTALL}"
        )
    if list(module.PluginField("x", np.array([3, 5], np.int32), module.PluginFieldType.INT32).data) != [3, 5]:
        raise UnsupportedError(  # seen with 10.3, whose fields then repeat their first number
            f"TensorRT {version} and NumPy {np.__version__} do not work together: run `pip install 'numpy<2'`"
        )
    return TensorRt(module, version, rtx)


@contextmanager
def library_path() -> Iterator[str | None]:
    """What LD_LIBRARY_PATH must begin with in a process that parses ONNX: TensorRT-RTX's parser opens
    libtensorrt_rtx.so, which its wheel has under another name. None where nothing is needed."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    library = Path(spec.submodule_search_locations[0]) / "libtensorrt_rtx.so.1" if spec else None  # type: ignore[index]
    if library is None or not library.is_file():
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="mimo-edge-rtx-") as folder:
        Path(folder, "libtensorrt_rtx.so").symlink_to(library)
        yield folder
