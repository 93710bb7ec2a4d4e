"""Single launches on a GPU through the driver, on copies of CPU tensors."""

import ctypes
import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from mimo_edge.backends.cuda_driver import CTYPES, Driver
from mimo_edge.kernels.aot import compile_variants
from mimo_edge.kernels.index import KernelEntry
from mimo_edge.kernels.launch import Variant

_LOADED: dict[tuple[str, str], tuple[Any, KernelEntry]] = {}


@functools.cache
def driver() -> Driver:
    return Driver()


def _load(target: str, variant: Variant) -> tuple[Any, KernelEntry]:
    """The variant's function and its entry of the index, compiled for `target`."""
    if (target, variant.key) not in _LOADED:
        capability = int(target.removeprefix("sm_"))
        with tempfile.TemporaryDirectory() as folder:
            entry = compile_variants([variant], capability, Path(folder)).kernels[variant.key]
            suffix = "cubin" if driver().capability == capability else "ptx"
            module = driver().load((Path(folder) / f"{variant.key}.{suffix}").read_bytes())
        _LOADED[target, variant.key] = driver().function(module, entry.entry, entry.shared), entry
    return _LOADED[target, variant.key]


def launch(target: str, variant: Variant, grid, args: dict) -> None:
    """Copies tensors to the device, launches, and copies them back; one tensor given twice stays one."""
    function, entry = _load(target, variant)
    d, memory = driver(), {}
    tensors = {t.data_ptr(): t for t in args.values() if isinstance(t, torch.Tensor)}
    for at, t in tensors.items():
        memory[at] = d.malloc(max(t.nbytes, 16))
        d.upload(memory[at], t.numpy())
    values = [
        ctypes.c_uint64(memory[v.data_ptr()]) if isinstance(v, torch.Tensor) else CTYPES[variant.types[n]](v)
        for n, v in args.items()
    ]
    values += [ctypes.c_uint64(0)] * entry.scratch
    d.launch(function, grid, 32 * entry.num_warps, entry.shared, values)
    for at, t in tensors.items():
        d.download(t.numpy(), memory[at])
    d.sync()
    for address in memory.values():
        d.free(address)
