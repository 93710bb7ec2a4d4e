"""How much memory there is for us: of a module by its data, of this machine by what its kernel says.

Where the GPU is integrated there is one memory, and MemAvailable is the figure: cudaMemGetInfo counts the page cache as
used, although it can be had at once. A discrete GPU's memory only its driver knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mimo_edge.device.modules import Module
from mimo_edge.device.system import System
from mimo_edge.errors import UnsupportedError

MIB = 1 << 20
# Orin Nano 8 GB, JetPack 6.2, no desktop: 7.4 GiB in all, 6.8 GiB available after the start (public log).
SYSTEM_USE = 614 * MIB
RESERVE, RESERVE_SHARE = 768 * MIB, 0.10  # left to cameras, drivers and whatever else wakes up


@dataclass(frozen=True)
class GpuMemory:
    """Of the GPU in use: `capability` is 87 on Orin, `integrated` means that it shares the machine's memory; free and
    total bytes are cudaMemGetInfo's."""

    capability: int
    integrated: bool
    free: int
    total: int


@dataclass(frozen=True)
class Capacity:
    """`available` bytes now (of a module: after a start without a desktop), of which `reserve` are left alone.

    `device_only`: the memory of a discrete GPU, in which only device buffers count.
    """

    name: str
    total: int
    available: int
    reserve: int
    source: str
    device_only: bool = False

    @property
    def usable(self) -> int:
        return max(0, self.available - self.reserve)


def reserve_of(total: int) -> int:
    return max(RESERVE, int(RESERVE_SHARE * total))


def of_module(module: Module) -> Capacity:
    source = "the module's memory less what the system takes without a desktop"
    return Capacity(module.title, module.memory, module.memory - SYSTEM_USE, reserve_of(module.memory), source)


def of_machine(system: System | None = None, gpu: GpuMemory | None = None) -> Capacity:
    """This machine, or this container: whichever leaves less. `gpu` None: everything runs on the CPU."""
    system = system or System()
    if gpu is not None and not gpu.integrated:
        return Capacity("this GPU", gpu.total, gpu.free, 0, "cudaMemGetInfo, as the GPU is discrete", True)
    memory = system.memory()
    total, available, source = memory["MemTotal"], memory["MemAvailable"], "MemAvailable"
    limit = system.cgroup_limit()
    if limit is not None and limit.total < total:
        total, available = limit.total, min(available, limit.free)
        source = f"the memory limit of this container or service ({limit.where})"
    return Capacity("this machine", total, available, reserve_of(total), source)


def gpu_memory(api: Any = None) -> GpuMemory | None:
    """What the driver says of the first GPU; None without a driver, a GPU or cuda-python. `api`: as Driver takes it."""
    from mimo_edge.backends.cuda_driver import Driver

    try:
        driver = Driver(0, api)
    except UnsupportedError:
        return None
    try:
        return GpuMemory(driver.capability, driver.integrated, *driver.memory())
    finally:
        driver.close()
