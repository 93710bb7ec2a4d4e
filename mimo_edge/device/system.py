"""Reading /proc, /sys and /etc below a root that tests may choose. Nothing here needs to be root, runs a program or
writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mimo_edge.errors import MimoEdgeError


@dataclass(frozen=True)
class Limit:
    """Memory that a control group allows: `free` is what it does not use yet, page cache counted as free."""

    total: int
    free: int
    where: str


@dataclass(frozen=True)
class System:
    root: Path = Path("/")

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """The file's text without the zero bytes and spaces around it; None where it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip("\0 \t\n")
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        text = self.text(name)
        return int(text) if text is not None and text.lstrip("-").isdigit() else None

    def exists(self, name: str) -> bool:
        return self.path(name).exists()

    def glob(self, pattern: str) -> list[str]:
        """Names of what matches, from the root, sorted."""
        return sorted(f"/{p.relative_to(self.root)}" for p in self.root.glob(pattern.lstrip("/")))

    def memory(self) -> dict[str, int]:
        """/proc/meminfo in bytes. Raises MimoEdgeError where it does not say MemTotal and MemAvailable."""
        found = {}
        for line in (self.text("/proc/meminfo") or "").splitlines():
            name, _, value = line.partition(":")
            if (words := value.split()) and words[0].isdigit():
                found[name] = int(words[0]) * 1024
        if not {"MemTotal", "MemAvailable"} <= found.keys():
            raise MimoEdgeError(
                "/proc/meminfo does not say how much memory is available: Linux 3.14 or newer is needed"
            )
        return found

    def cgroup_limit(self) -> Limit | None:
        """The tightest memory limit on this process, of control groups version 2 or 1."""
        limits = [self._limit(folder, *names) for folder, *names in self._cgroups()]
        return min((x for x in limits if x is not None), key=lambda x: x.total, default=None)

    def _cgroups(self) -> list[tuple[str, str, str, str]]:
        """(folder, files of limit and use, what of memory.stat is page cache) of this process's groups and theirs."""
        found = []
        for line in (self.text("/proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            base = "/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup"
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            cache = "total_inactive_file" if controllers else "inactive_file"
            parts = [p for p in path.split("/") if p not in ("", "..")]
            found += [("/".join([base, *parts[:n]]), *names, cache) for n in range(len(parts) + 1)]
        return found

    def _limit(self, folder: str, most: str, use: str, cache: str) -> Limit | None:
        total, used = self.number(f"{folder}/{most}"), self.number(f"{folder}/{use}") or 0
        if total is None or total >= 1 << 60:  # "max", or version 1's way to say so
            return None
        stat = dict(
            line.split(" ", 1) for line in (self.text(f"{folder}/memory.stat") or "").splitlines() if " " in line
        )
        reclaimable = min(int(stat.get(cache, 0)), used)
        return Limit(total, max(0, total - used + reclaimable), f"{folder}/{most}")
