"""What machine this is, from its files: model, JetPack, memory, disks, container. Never NVML, which Orin does not have.

/etc/nv_tegra_release          # R36 (release), REVISION: 4.3, ...       JetPack's Linux for Tegra
/proc/device-tree/model        NVIDIA Jetson Orin Nano ...               which board
/proc/self/mounts, /sys/block  where a folder lies: NVMe, eMMC, SD card
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mimo_edge.device.modules import GIB, MODULES, Module
from mimo_edge.device.system import System

FAMILIES = {"orin nano": "orin-nano", "orin nx": "orin-nx", "agx orin": "agx-orin"}  # as device trees name them
# Linux for Tegra release -> JetPack, and the CUDA version of its driver (the newest that a cubin may need).
OLDEST = 36  # release that this version was made for
JETPACKS = {35: ("5", 11), 36: ("6", 12), 38: ("7.0", 13), 39: ("7.2", 13)}


def installed(name: str) -> str | None:
    """Version of a distribution; None where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def free_bytes(path: Path) -> int:
    """Of the disk that holds `path`, or its nearest folder that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def writable(path: Path) -> bool:
    """Whether files can be made in `path`, or it itself in the nearest folder that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.access(path, os.W_OK)


@dataclass(frozen=True)
class Machine:
    """Everything that is asked about a machine; tests put their own answers in."""

    system: System = field(default_factory=System)
    python: tuple[int, int] = (sys.version_info[0], sys.version_info[1])
    installed: Callable[[str], str | None] = installed
    free: Callable[[Path], int] = free_bytes
    writable: Callable[[Path], bool] = writable
    usable: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)

    @property
    def model(self) -> str | None:
        """The board as its device tree names it; None where there is no device tree, as on a PC."""
        return self.system.text("/proc/device-tree/model")

    @property
    def jetson(self) -> bool:
        return "jetson" in (self.model or "").lower()

    @property
    def release(self) -> tuple[int, int, int] | None:
        """Linux for Tegra's release, (36, 4, 3)."""
        found = re.search(
            r"R(\d+) \(release\), REVISION: (\d+)\.(\d+)", self.system.text("/etc/nv_tegra_release") or ""
        )
        return (int(found[1]), int(found[2]), int(found[3])) if found else None

    @property
    def container(self) -> bool:
        return self.system.exists("/.dockerenv") or self.system.exists("/run/.containerenv")

    @property
    def family(self) -> str | None:
        """ "orin-nano", "orin-nx" or "agx-orin"; None for any other board."""
        model = (self.model or "").lower()
        return next((name for words, name in FAMILIES.items() if words in model), None)

    def module(self, power_mode: str | None) -> Module | None:
        """The module of this family whose memory is nearest; in Super mode if the power mode's name says so."""
        fits = [m for m in MODULES.values() if m.base is None and self.family and m.name.startswith(self.family)]
        if not fits:
            return None
        total = self.system.memory()["MemTotal"]
        plain = min(fits, key=lambda m: abs(m.nominal_gb * GIB - total))
        raised = power_mode == "MAXN_SUPER" or (power_mode == "25W" and plain.name.startswith("orin-nano"))
        return MODULES.get(f"{plain.name}-super", plain) if raised else plain

    def disk(self, path: Path) -> Disk | None:
        """The disk that holds a folder; None where its mount does not tell (overlay, network)."""
        where = [line.split(" ") for line in (self.system.text("/proc/self/mounts") or "").splitlines()]
        under = [w for w in where if len(w) > 1 and _inside(str(path), w[1])]
        device = max(under, key=lambda w: len(w[1]))[0] if under else ""
        if device == "/dev/root":
            found = re.search(r"root=(/dev/\S+)", self.system.text("/proc/cmdline") or "")
            device = found[1] if found else device
        name = re.fullmatch(r"/dev/(nvme\d+n\d+|mmcblk\d+|sd[a-z]+)(?:p?\d+)?", device)
        return Disk(name[1], self._kind(name[1])) if name else None

    def _kind(self, name: str) -> str:
        if name.startswith("nvme"):
            return "NVMe"
        if name.startswith("mmcblk"):
            return "SD card" if self.system.text(f"/sys/block/{name}/device/type") == "SD" else "eMMC"
        return "USB or SATA"


@dataclass(frozen=True)
class Disk:
    name: str
    kind: str

    @property
    def slow(self) -> bool:
        return self.name.startswith("mmcblk")


def _inside(path: str, mount: str) -> bool:
    return mount == "/" or path == mount or path.startswith(mount + "/")
