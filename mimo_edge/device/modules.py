"""The Jetson Orin modules as data. Nothing here was measured by us; `sources` says where a figure comes from.

All of them have compute capability 8.7, 164 KiB of shared memory a multiprocessor and one memory for CPU and GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from mimo_edge.errors import BadInputError

GIB = 1 << 30
CAPABILITY = 87

SHEETS = "NVIDIA's Jetson data sheets (multiprocessors, clocks, memory bus, TOPS)"
_SUPER = "NVIDIA's announcement of Super mode, JetPack 6.2"
_BY_CLOCK = "Super mode's clock; the operations follow from it"
_SIZE = "memory left by carve-outs: as Linux reports it in public logs"
_GUESS = "memory left by carve-outs: estimated from the sizes seen on the others"


@dataclass(frozen=True)
class Module:
    """`memory` is what Linux sees (MemTotal), `bandwidth` bytes a second, `tops` NVIDIA's sparse INT8 figure of the
    whole module, None where it published none. `base` names the module whose clocks a Super mode raises."""

    name: str
    title: str
    nominal_gb: int
    memory: int
    bandwidth: float
    multiprocessors: int
    gpu_hz: float
    tops: int | None
    sources: tuple[str, ...]
    base: str | None = None

    @property
    def flops(self) -> float:
        """Dense float16 operations a second of the matrix units: 2,048 a clock and multiprocessor."""
        return 2048 * self.multiprocessors * self.gpu_hz


def _gib(x: float) -> int:
    return int(x * GIB)


_ALL = (
    Module("orin-nano-4gb", "Orin Nano 4 GB", 4, _gib(3.3), 34e9, 4, 625e6, 20, (SHEETS, _GUESS)),
    Module(
        "orin-nano-4gb-super", "Orin Nano 4 GB, Super", 4, _gib(3.3), 51e9, 4, 1020e6, 34,
        (SHEETS, _SUPER, _GUESS), "orin-nano-4gb",
    ),
    Module("orin-nano-8gb", "Orin Nano 8 GB", 8, _gib(7.4), 68e9, 8, 625e6, 40, (SHEETS, _SIZE)),
    Module(
        "orin-nano-8gb-super", "Orin Nano 8 GB, Super", 8, _gib(7.4), 102e9, 8, 1020e6, 67,
        (SHEETS, _SUPER, _SIZE), "orin-nano-8gb",
    ),
    Module("orin-nx-8gb", "Orin NX 8 GB", 8, _gib(7.1), 102.4e9, 8, 765e6, 70, (SHEETS, _SIZE)),
    Module(
        "orin-nx-8gb-super", "Orin NX 8 GB, Super", 8, _gib(7.1), 102.4e9, 8, 1173e6, 117,
        (SHEETS, _SUPER, _BY_CLOCK, _SIZE), "orin-nx-8gb",
    ),
    Module("orin-nx-16gb", "Orin NX 16 GB", 16, _gib(15.3), 102.4e9, 8, 918e6, 100, (SHEETS, _GUESS)),
    Module(
        "orin-nx-16gb-super", "Orin NX 16 GB, Super", 16, _gib(15.3), 102.4e9, 8, 1173e6, 157,
        (SHEETS, _SUPER, _BY_CLOCK, _GUESS), "orin-nx-16gb",
    ),
    Module("agx-orin-32gb", "AGX Orin 32 GB", 32, _gib(29.5), 204.8e9, 14, 930e6, 200, (SHEETS, _GUESS)),
    Module(
        # Its clock is not published, so the figures stay those of the module without Super mode.
        "agx-orin-32gb-super", "AGX Orin 32 GB, Super", 32, _gib(29.5), 204.8e9, 14, 930e6, None,
        (SHEETS, "JetPack 7.2's release notes; without figures, so those of the module without Super", _GUESS),
        "agx-orin-32gb",
    ),
    Module("agx-orin-64gb", "AGX Orin 64 GB", 64, _gib(61.4), 204.8e9, 16, 1300e6, 275, (SHEETS, _SIZE)),
)  # fmt: skip
MODULES = {m.name: m for m in sorted(_ALL, key=lambda m: m.base is not None)}  # Super modes last


def module(name: str) -> Module:
    """Raises BadInputError, with all names, on one that does not exist."""
    if name not in MODULES:
        raise BadInputError(f"unknown module {name!r} (known: {', '.join(MODULES)})")
    return MODULES[name]
