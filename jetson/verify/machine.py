"""What happens to a Jetson while something runs: memory, swap, temperatures, power, throttling. Without root."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from mimo_edge.device import power
from mimo_edge.device.probe import JETPACKS, Machine
from mimo_edge.device.system import System

INTERVAL = 0.2  # seconds between samples


@dataclass
class Samples:
    """Extremes while something ran. Bytes, degrees Celsius, watts; None where the machine does not tell."""

    available: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)  # pages written to swap since the start of the machine
    celsius: list[float] = field(default_factory=list)  # of the hottest zone
    margin: list[float] = field(default_factory=list)  # degrees below where the first zone throttles
    watts: list[float] = field(default_factory=list)
    gpu_mhz: list[float] = field(default_factory=list)
    over_current: list[int] = field(default_factory=list)
    group: list[int] = field(default_factory=list)  # memory.current of this process's control group

    @property
    def taken(self) -> int:
        """Memory that went away: the first sample is from before."""
        return self.available[0] - min(self.available)

    def to_json(self) -> dict[str, Any]:
        return {name: {"first": v[0], "least": min(v), "most": max(v)} for name, v in vars(self).items() if v}


class Monitor:
    """Samples while its block runs; the first sample is taken before it begins."""

    def __init__(self, system: System):
        self._system, self.samples = system, Samples()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._end.wait(INTERVAL):
            sample(self._system, self.samples)

    def __enter__(self) -> Samples:
        sample(self._system, self.samples)
        self._thread.start()
        return self.samples

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
        sample(self._system, self.samples)


def sample(system: System, into: Samples) -> None:
    into.available.append(system.memory()["MemAvailable"])
    for line in (system.text("/proc/vmstat") or "").splitlines():
        if line.startswith("pswpout "):
            into.swapped.append(int(line.split()[1]))
    into.over_current.append(power.over_current(system))
    if zones := power.zones(system):
        into.celsius.append(zones[0].now / 1000)
        into.margin.append(min(z.throttles - z.now for z in zones) / 1000)
    if (watts := input_power(system)) is not None:
        into.watts.append(watts)
    if (clock := power.gpu_clock(system)) is not None:
        into.gpu_mhz.append(clock.now / 1e6)
    path = (system.text("/proc/self/cgroup") or "").rpartition("::")[2]
    if (used := system.number(f"/sys/fs/cgroup{path}/memory.current")) is not None:
        into.group.append(used)


def input_power(system: System) -> float | None:
    """Watts that the module takes in, by its INA3221; None where it has none."""
    for label in system.glob("/sys/class/hwmon/hwmon*/in*_label"):
        if system.text(label) == "VDD_IN":
            volts = system.number(label.replace("_label", "_input"))
            amperes = system.number(label.replace("/in", "/curr").replace("_label", "_input"))
            if volts is not None and amperes is not None:
                return volts * amperes / 1e6  # millivolts, milliamperes
    return None


def is_orin(system: System) -> bool:
    return "tegra234" in (system.text("/proc/device-tree/compatible") or "")


def facts(system: System) -> dict[str, Any]:
    """What the figures of a report depend on."""
    machine, mode = Machine(system), power.power_mode(system)
    release, clock = machine.release, power.gpu_clock(system)
    module = machine.module(mode.name if mode else None)
    return {
        "model": machine.model or "not a Jetson",
        "module": module.name if module else None,
        "L4T": ".".join(map(str, release)) if release else None,
        "JetPack": JETPACKS.get(release[0], ("unknown", 0))[0] if release else None,
        "kernel": system.text("/proc/sys/kernel/osrelease"),
        "power mode": mode.name if mode else None,
        "GPU clock": f"{clock.allowed / 1e6:.0f} MHz at most" if clock else None,
        "memory": f"{system.memory()['MemTotal'] / 1e6:,.0f} MB",
        **{name: machine.installed(name) for name in ("mimo-edge", "cuda-python", "onnxruntime")},
    }
