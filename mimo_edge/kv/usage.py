"""What a cache folder remembers beside its entries: the logical clock, uses of entries, and how much may be written.

Losing it costs order, never an entry. Writes are limited by a bucket that fills with the time the system runs, which
no wrong clock can move: `boot` names the boot that `at` (seconds since then) belongs to.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mimo_edge.disk import open_file
from mimo_edge.kv.files import TEMPORARY

DAY = 86_400


@dataclass
class Usage:
    """`entries` maps a snapshot's key to (count, clock of the last use); `allowance` are bytes that may be written;
    `totals` are counters over all processes so far."""

    clock: int = 0
    allowance: float = 0.0
    boot: str = ""
    at: float = 0.0
    entries: dict[str, tuple[float, int]] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def read(path: Path, daily: int) -> Usage:
        """What the file says; of a missing or damaged one, the state of a new folder."""
        try:
            with open_file(path) as file:
                raw = json.load(file)
            entries = {str(k): (float(count), int(used)) for k, (count, used) in raw["entries"].items()}
            totals = {str(k): int(n) for k, n in raw["totals"].items()}
            rest = int(raw["clock"]), float(raw["allowance"]), str(raw["boot"]), float(raw["at"])
            usage = Usage(*rest, entries, totals)
            if not all(map(math.isfinite, [usage.allowance, usage.at, *(count for count, _ in entries.values())])):
                raise ValueError
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            usage = Usage(allowance=float(daily))
        usage.refill(daily)
        return usage

    def refill(self, daily: int) -> None:
        """A day's worth at most, and what the time since the last refill brings, if that was in this boot."""
        boot, now = _boot(), time.clock_gettime(time.CLOCK_MONOTONIC)
        passed = max(0.0, now - self.at) if boot == self.boot else 0.0
        self.allowance = min(float(daily), max(0.0, self.allowance) + daily * passed / DAY)
        self.boot, self.at = boot, now

    def merge(self, clock: int, entries: Mapping[str, tuple[float, int]], known: set[str]) -> None:
        """Takes over newer uses, and forgets entries that are not `known` any more."""
        self.clock = max(self.clock, clock)
        for key, (count, used) in entries.items():
            if key not in self.entries or used >= self.entries[key][1]:
                self.entries[key] = count, used
        self.entries = {k: v for k, v in self.entries.items() if k in known}

    def write(self, path: Path) -> None:
        """Raises OSError."""
        temp = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
        temp.write_text(json.dumps(asdict(self)))
        os.replace(temp, path)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
