"""Trees that look like /proc, /sys, /etc and /dev of a Jetson; a test then plants one fault."""

from __future__ import annotations

from pathlib import Path

from mimo_edge.device.probe import Machine
from mimo_edge.device.system import System

GB = 1_000_000  # kilobytes, as /proc/meminfo counts
MODELS = {
    "nano": "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
    "agx": "NVIDIA Jetson AGX Orin Developer Kit",
}
TOTAL = {"nano": 7_620_000, "agx": 64_300_000}  # kB
RELEASES = {
    "6.2": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic",
    "7.2": "# R39 (release), REVISION: 2.0",
}
KERNELS = {"6.2": "5.15.148-tegra", "7.2": "6.8.12-1020-tegra"}
MODES = {"nano": {0: "15W", 1: "25W", 2: "MAXN_SUPER"}, "agx": {0: "MAXN", 1: "MODE_15W", 2: "MODE_30W", 3: "MODE_50W"}}
FASTEST = {"nano": 2, "agx": 0}
LIBRARIES = {"numpy": "2.1", "tokenizers": "0.22", "jinja2": "3.1", "onnxruntime": "1.23", "cuda-bindings": "13.0"}


class FakeJetson:
    """A healthy machine under `root`; `machine` is what the checks are given."""

    def __init__(self, root: Path, board: str = "nano", jetpack: str = "6.2", container: bool = False):
        self.root, self.board, self.container = root, board, container
        self.libraries, self.denied, self.python = dict(LIBRARIES), set(), (3, 10 if jetpack == "6.2" else 12)
        self.free, self.writable = 400 << 30, True
        self.write("proc/device-tree/model", MODELS[board] + "\0")
        self.write("etc/nv_tegra_release", RELEASES[jetpack])
        self.write("proc/sys/kernel/osrelease", KERNELS[jetpack] + "\n")
        self.memory(TOTAL[board] - 600_000)
        self.write("etc/nvpmodel.conf", "".join(f"< POWER_MODEL ID={n} NAME={m} >\n" for n, m in MODES[board].items()))
        self.power_mode(FASTEST[board])
        self.clock(1_020_000_000)
        self.zone(0, "cpu-thermal", 51_500)
        self.zone(1, "gpu-thermal", 49_000)
        self.write("sys/class/hwmon/hwmon2/oc1_event_cnt", "0\n")
        self.write("proc/swaps", "Filename Type Size Used Priority\n")
        self.write("proc/self/mounts", f"{'overlay' if container else '/dev/nvme0n1p1'} / ext4 rw 0 0\n")
        self.write("proc/self/cgroup", "0::/\n")
        for name in ("nvmap", "nvgpu/igpu0/ctrl", "dri/renderD128"):
            self.write(f"dev/{name}", "")
        if container:
            self.write(".dockerenv", "")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def remove(self, name: str) -> None:
        (self.root / name).unlink()

    def memory(self, available: int, total: int | None = None, free: int = 300_000) -> None:
        """Kilobytes."""
        lines = {
            "MemTotal": total or TOTAL[self.board],
            "MemFree": free,
            "MemAvailable": available,
            "Cached": 5_500_000,
        }
        self.write("proc/meminfo", "".join(f"{name}: {n:>12} kB\n" for name, n in lines.items()))

    def limit(self, most: int, used: int = 0, cache: int = 0) -> None:
        """Bytes of this process's control group."""
        self.write("proc/self/cgroup", "0::/system.slice/robot.service\n")
        group = "sys/fs/cgroup/system.slice/robot.service"
        self.write(f"{group}/memory.max", f"{most}\n")
        self.write(f"{group}/memory.current", f"{used}\n")
        self.write(f"{group}/memory.stat", f"anon 1\ninactive_file {cache}\n")
        self.write("sys/fs/cgroup/system.slice/memory.max", "max\n")

    def power_mode(self, number: int) -> None:
        self.write("var/lib/nvpmodel/status", f"pmode:{number:04} fmode:fanNULL\n")

    def clock(self, allowed: int) -> None:
        for name, text in {
            "cur_freq": "306000000",
            "max_freq": str(allowed),
            "available_frequencies": "306000000 612000000 1020000000",
        }.items():
            self.write(f"sys/class/devfreq/17000000.gpu/{name}", text + "\n")

    def zone(self, number: int, name: str, now: int, throttles: int = 99_000) -> None:
        folder = f"sys/class/thermal/thermal_zone{number}"
        for file, text in {
            "type": name,
            "temp": now,
            "trip_point_0_type": "passive",
            "trip_point_0_temp": throttles,
        }.items():
            self.write(f"{folder}/{file}", f"{text}\n")

    @property
    def machine(self) -> Machine:
        return Machine(
            System(self.root),
            python=self.python,
            installed=self.libraries.get,
            free=lambda path: self.free,
            writable=lambda path: self.writable,
            usable=lambda path: f"/{path.relative_to(self.root)}" not in self.denied,
        )
