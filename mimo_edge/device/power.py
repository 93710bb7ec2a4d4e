"""Power mode, clocks and temperature, as any user may read them.

/etc/nvpmodel.conf            < POWER_MODEL ID=2 NAME=MAXN_SUPER >: the modes; ids differ from module to module
/var/lib/nvpmodel/status      pmode:0002: the mode in force
/sys/class/devfreq/*gpu*, *ga10b*                    cur_freq, max_freq, available_frequencies in Hz
/sys/class/thermal/thermal_zone*/type, temp          millidegrees; trip_point_N_type "passive": throttles there
/sys/class/hwmon/hwmon*/oc*_event_cnt                throttled because of over-current, since the start
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mimo_edge.device.system import System

THROTTLE = 95_000  # millidegrees, where a zone does not say


@dataclass(frozen=True)
class PowerMode:
    """`current` is None where it cannot be read; `modes` maps ids to names."""

    modes: dict[int, str]
    current: int | None

    @property
    def name(self) -> str | None:
        return None if self.current is None else self.modes.get(self.current)

    @property
    def fastest(self) -> int | None:
        """MAXN_SUPER, else MAXN, else the most watts."""
        by_name = {name: number for number, name in self.modes.items()}
        for name in ("MAXN_SUPER", "MAXN"):
            if name in by_name:
                return by_name[name]
        return max(self.modes, key=lambda n: _watts(self.modes[n]), default=None)


@dataclass(frozen=True)
class GpuClock:
    """Hz: now, the most that the mode allows, the most that the chip has."""

    now: int
    allowed: int
    highest: int


@dataclass(frozen=True)
class Zone:
    """Millidegrees now, and at which it throttles."""

    name: str
    now: int
    throttles: int


def power_mode(system: System) -> PowerMode | None:
    """None where the machine has no nvpmodel."""
    text = system.text("/etc/nvpmodel.conf")
    if text is None:
        return None
    modes = {int(n): name for n, name in re.findall(r"^<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)\s*>", text, re.M)}
    found = re.search(r"pmode:(\d+)", system.text("/var/lib/nvpmodel/status") or "")
    return PowerMode(modes, int(found[1]) if found else None)


def gpu_clock(system: System) -> GpuClock | None:
    """None where there is no integrated GPU with clocks to read."""
    for folder in (*system.glob("/sys/class/devfreq/*gpu*"), *system.glob("/sys/class/devfreq/*ga10b*")):
        now, allowed = system.number(f"{folder}/cur_freq"), system.number(f"{folder}/max_freq")
        known = [int(f) for f in (system.text(f"{folder}/available_frequencies") or "").split() if f.isdigit()]
        if now is not None and allowed is not None:
            return GpuClock(now, allowed, max(known, default=allowed))
    return None


def zones(system: System) -> list[Zone]:
    """Zones that are on, the hottest first."""
    found = []
    for folder in system.glob("/sys/class/thermal/thermal_zone*"):
        now = system.number(f"{folder}/temp")
        if now is not None and now > 0:  # zones of parts that are off say -256000 or nothing
            trips = [
                system.number(f"{folder}/trip_point_{n}_temp")
                for n in range(8)
                if system.text(f"{folder}/trip_point_{n}_type") == "passive"
            ]
            known = [t for t in trips if t is not None and t > 0]
            found.append(Zone(system.text(f"{folder}/type") or folder, now, min(known, default=THROTTLE)))
    return sorted(found, key=lambda z: -z.now)


def over_current(system: System) -> int:
    """Times that the machine throttled because of over-current since it started."""
    return sum(system.number(f) or 0 for f in system.glob("/sys/class/hwmon/hwmon*/oc*_event_cnt"))


def _watts(name: str) -> int:
    found = re.match(r"(?:MODE_)?(\d+)W", name)
    return int(found[1]) if found else 0
