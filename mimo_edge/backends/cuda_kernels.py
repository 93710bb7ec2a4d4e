"""Compiled kernels of a bundle on a device: which ones fit, that they are unchanged, and how they are launched."""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Iterable
from functools import partial

from mimo_edge.backends.cuda_driver import CTYPES, Driver
from mimo_edge.bundle import Bundle
from mimo_edge.errors import BadInputError, MimoEdgeError, UnsupportedError
from mimo_edge.kernels.index import INDEX, KernelIndex, folder
from mimo_edge.kernels.launch import Launch

log = logging.getLogger("mimo_edge")


def targets(bundle: Bundle) -> list[int]:
    """Compute capabilities that the bundle has kernels for, ascending."""
    names = (name.split("/") for name in bundle.manifest.files)
    return sorted(int(p[1][3:]) for p in names if len(p) == 3 and p[0] == "kernels" and p[2] == INDEX)


def choose(bundle: Bundle, driver: Driver, ptx: bool) -> tuple[KernelIndex, bool]:
    """The index to use and whether its PTX is compiled by the driver instead of loading its cubins.

    Raises UnsupportedError, saying what the bundle has, what the device is and what to run, when none fits.
    """
    have, device = targets(bundle), driver.capability
    if device in have:
        index = read_index(bundle, device)
        need = int(index.ptxas.split(".")[0])
        if driver.version // 1000 < need:
            raise UnsupportedError(
                f"the NVIDIA driver supports CUDA {_cuda(driver.version)}, the bundle's kernels need {need}.0 or "
                "newer: update the driver, or export with TRITON_PTXAS_PATH set to an older ptxas"
            )
        return index, False
    older = [c for c in have if c <= device]
    if not (ptx and older):
        names = ", ".join(f"sm_{c}" for c in have) or "no kernels for a GPU"
        hint = f", or run the PTX of sm_{older[-1]} with --backend cuda-ptx" if older else ""
        raise UnsupportedError(
            f"{bundle.path} has {names}, this device ({driver.name}) is sm_{device}: "
            f"run `mimo-edge export SRC --target sm_{device} -o DIR`{hint}"
        )
    index = read_index(bundle, older[-1])
    if driver.version < (need := 1000 * int(index.ptxas.split(".")[0]) + 10 * int(index.ptxas.split(".")[1])):
        raise UnsupportedError(
            f"the NVIDIA driver supports CUDA {_cuda(driver.version)}, the bundle's PTX needs {_cuda(need)} or newer: "
            "update the driver"
        )
    log.info("backend cuda runs the PTX of %s on %s (sm_%d)", index.target, driver.name, device)
    return index, True


def read_index(bundle: Bundle, capability: int) -> KernelIndex:
    """The index of sm_`capability`. Raises BadInputError when it is of another target."""
    path = bundle.file(f"{folder(f'sm_{capability}')}/{INDEX}")
    index = KernelIndex.loads(path.read_bytes(), str(path))
    if index.target != f"sm_{capability}":
        raise BadInputError(f"{path} is the index of {index.target}: export the model again")
    return index


class Kernels:
    """The index's kernels as loaded modules. Raises BadInputError when a file is not the one the index describes."""

    def __init__(self, driver: Driver, bundle: Bundle, index: KernelIndex, ptx: bool, keys: Iterable[str]):
        self._driver, self._index = driver, index
        self._modules, self._functions = [], {}
        try:
            for key in keys:
                if key not in index.kernels:
                    raise BadInputError(
                        f"{bundle.path}: kernel {key} is not in the index of {index.target}: export again"
                    )
                entry = index.kernels[key]
                module = driver.load(_code(bundle, index, key, ptx))
                self._modules.append(module)
                self._functions[key] = driver.function(module, entry.entry, entry.shared)
        except MimoEdgeError:
            self.close()
            raise

    def has(self, launch: Launch) -> bool:
        return launch.variant.key in self._functions

    def prepare(self, launch: Launch, address: dict[str, int]) -> Callable[[], None]:
        """A call that queues the launch, with buffers' names replaced by addresses."""
        entry = self._index.kernels[launch.variant.key]
        values: list[ctypes._SimpleCData] = []
        for name, kind in entry.types.items():
            value = launch.args[name]
            if isinstance(value, str):
                values.append(ctypes.c_uint64(address[value]))
            else:
                values.append(CTYPES[kind](value))  # type: ignore[arg-type]
        values += [ctypes.c_uint64(0)] * entry.scratch
        function = self._functions[launch.variant.key]
        threads, overlap = 32 * entry.num_warps, entry.overlap
        return partial(self._driver.launch, function, launch.grid, threads, entry.shared, values, overlap)

    def close(self) -> None:
        for module in self._modules:
            self._driver.unload(module)
        self._modules, self._functions = [], {}


def _code(bundle: Bundle, index: KernelIndex, key: str, ptx: bool) -> bytes:
    suffix = "ptx" if ptx else "cubin"
    path = bundle.file(f"{folder(index.target)}/{key}.{suffix}")
    code = path.read_bytes()
    if hashlib.sha256(code).hexdigest() != getattr(index.kernels[key], suffix):
        raise BadInputError(f"{path} does not match the kernel index: copy or export the bundle again")
    return code


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
