"""The checks of `mimo-edge doctor`. Each reads a few files and yields what is not as it should be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mimo_edge.device import power
from mimo_edge.device.checks_model import check_bundle, check_python
from mimo_edge.device.findings import Finding, Report, advice, report, wrong
from mimo_edge.device.probe import JETPACKS, OLDEST, Machine

NEEDED_FREE = 1 << 30  # bytes on the disk of the cache folder
WARM = 5_000  # millidegrees below throttling
ZRAM_SHARE = 0.25  # of the memory: beyond it competes with the model
_DEVICES = (  # what CUDA opens, under the names of the releases; one of each line is needed
    ("/dev/nvmap",),
    ("/dev/nvgpu/igpu0/ctrl", "/dev/nvhost-ctrl-gpu"),
    ("/dev/dri/renderD128", "/dev/dri/renderD129"),
)


def examine(bundle: Path, cache_dir: Path | None = None, machine: Machine | None = None) -> Report:
    """Looks at everything; a check that finds no file that it needs on this kind of machine finds nothing."""
    m = machine or Machine()
    findings = [*check_python(m)]
    if m.jetson:
        for check in (check_release, check_power, check_heat, check_devices, check_desktop):
            findings += check(m)
    findings += [*check_swap(m), *check_folder(m, cache_dir or bundle, cache_dir is not None)]
    findings += check_bundle(m, bundle)
    return report(facts(m), findings)


def facts(m: Machine) -> dict[str, str]:
    """One line each, for the top of the report."""
    memory, limit = m.system.memory(), m.system.cgroup_limit()
    found = {
        "machine": m.model or "not a Jetson",
        "memory": f"{_mb(memory['MemAvailable'])} of {_mb(memory['MemTotal'])}",
    }
    if m.release:
        known = JETPACKS.get(m.release[0])
        found["release"] = f"L4T {_dotted(m.release)}" + (f", JetPack {known[0]}" if known else "")
    mode, clock = power.power_mode(m.system), power.gpu_clock(m.system)
    if m.jetson and (module := m.module(mode.name if mode else None)):
        found["module"] = f"{module.title} ({module.name})"
    if mode:
        found["power mode"] = mode.name or "unknown"
    if clock:
        found["GPU clock"] = f"{clock.now / 1e6:,.0f} MHz, at most {clock.allowed / 1e6:,.0f}"
    if hot := power.zones(m.system)[:1]:
        found["hottest"] = f"{hot[0].name} {hot[0].now / 1e3:.0f} C"
    if limit:
        found["limit"] = f"{_mb(limit.free)} of {_mb(limit.total)} ({limit.where})"
    found["container"] = "yes" if m.container else "no"
    return found


def check_release(m: Machine) -> Iterator[Finding]:
    if m.family is None:
        yield wrong("board", "this Jetson is not an Orin", m.model, "use an Orin: kernels are compiled for sm_87")
    if m.release is None:
        fix = "mount it: docker run -v /etc/nv_tegra_release:/etc/nv_tegra_release:ro ..."
        fix = fix if m.container else "sudo apt install --reinstall nvidia-l4t-core"
        yield advice("release-unknown", "/etc/nv_tegra_release does not say which JetPack this is", "unreadable", fix)
        return
    if m.release[0] < OLDEST or m.release[0] not in JETPACKS:
        known = "this version knows JetPack 6 (R36) and 7 (R38, R39)"
        yield wrong(
            "release", f"L4T is none that was made for; {known}", _dotted(m.release), "flash JetPack 6.2.2 or 7.2"
        )
    if m.release == (36, 4, 7):
        yield wrong(
            "nvmap-limit", "this release refuses GPU allocations of about 1 GiB, which engine builds need",
            _dotted(m.release), "sudo apt update && sudo apt full-upgrade, to L4T 36.5 (JetPack 6.2.2)",
        )  # fmt: skip
    kernel = m.system.text("/proc/sys/kernel/osrelease") or ""
    if "tegra" not in kernel:
        yield wrong(
            "kernel", "the running kernel is not NVIDIA's, so its drivers cannot load", kernel or "unknown",
            "sudo apt install --reinstall nvidia-l4t-kernel nvidia-l4t-bootloader && sudo reboot",
        )  # fmt: skip


def check_power(m: Machine) -> Iterator[Finding]:
    mode, clock = power.power_mode(m.system), power.gpu_clock(m.system)
    if mode is None and not m.container:
        yield advice(
            "nvpmodel-missing", "there are no power modes", "/etc/nvpmodel.conf", "sudo apt install nvidia-l4t-nvpmodel"
        )
    if mode is not None and mode.fastest is not None:
        best = f"sudo nvpmodel -m {mode.fastest}"
        if mode.name is None:
            yield wrong(
                "power-mode-unknown", "the mode in force is none of /etc/nvpmodel.conf", mode.current,
                f"{best} && sudo reboot (over SSH a change that needs a restart fails silently)",
            )  # fmt: skip
        elif mode.current != mode.fastest:
            yield advice(
                "power-mode", f"the power mode holds clocks down; {mode.modes[mode.fastest]} is the fastest", mode.name,
                f"{best} (25W is the most tokens a joule on Orin Nano)",
            )  # fmt: skip
        elif clock is not None and clock.allowed < clock.highest:
            yield advice(
                "gpu-clock", "the GPU's clock is held below what this power mode allows",
                f"{clock.allowed / 1e6:,.0f} of {clock.highest / 1e6:,.0f} MHz", "sudo jetson_clocks, or sudo reboot",
            )  # fmt: skip
    offline = m.system.text("/sys/devices/system/cpu/offline")
    if offline:
        yield advice(
            "cpus-offline", "processor cores are switched off", f"cores {offline}",
            f"sudo nvpmodel -m {mode.fastest}" if mode and mode.fastest is not None else "sudo nvpmodel -m 0",
        )  # fmt: skip


def check_heat(m: Machine) -> Iterator[Finding]:
    for zone in power.zones(m.system):
        if zone.now >= zone.throttles - WARM:
            value = f"{zone.name} {zone.now / 1e3:.0f} C, throttles at {zone.throttles / 1e3:.0f} C"
            yield wrong(
                "hot",
                "the machine is about to slow itself down",
                value,
                "free the fan and the heat sink, or sudo nvpmodel -m a lower mode",
            )
    if times := power.over_current(m.system):
        yield advice(
            "over-current", "the machine slowed down because of over-current", f"{times} times since it started",
            "use a supply of the module's full power, or sudo nvpmodel -m a lower mode",
        )  # fmt: skip


def check_devices(m: Machine) -> Iterator[Finding]:
    """CUDA says no more than error 999 when it may not open these."""
    there = [next((d for d in names if m.system.exists(d)), None) for names in _DEVICES]
    for names, device in zip(_DEVICES, there, strict=True):
        if device is None:
            fix = (
                "docker run --runtime nvidia ..."
                if m.container
                else "sudo reboot; if it stays away, flash JetPack again"
            )
            yield wrong("device-missing", "a device file of the GPU is missing", names[0], fix)
        elif not m.usable(m.system.path(device)):
            group = "render" if "dri" in device else "video"
            fix = f"sudo usermod -aG video,render $USER, then log in again (the group is {group})"
            if m.container:
                fix = f"docker run --group-add $(getent group {group} | cut -d: -f3) ..."
            yield wrong("device-denied", "this user may not open a device file of the GPU", device, fix)


def check_desktop(m: Machine) -> Iterator[Finding]:
    link = m.system.path("/etc/systemd/system/default.target")
    target = str(link.readlink()) if link.is_symlink() else ""
    if target.endswith("graphical.target"):
        yield advice(
            "desktop", "the desktop takes up to 865 MB", "graphical.target",
            "sudo systemctl set-default multi-user.target && sudo reboot",
        )  # fmt: skip


def check_swap(m: Machine) -> Iterator[Finding]:
    total = m.system.memory()["MemTotal"]
    zram = sum(m.system.number(f) or 0 for f in m.system.glob("/sys/block/zram*/disksize"))
    if m.jetson and zram > ZRAM_SHARE * total:
        yield advice(
            "zram", "compressed swap competes with the model, whose memory can never be swapped", _mb(zram),
            "sudo systemctl disable --now nvzramconfig",
        )  # fmt: skip
    for line in (m.system.text("/proc/swaps") or "").splitlines()[1:]:
        name = line.split()[0]
        disk = m.disk(Path(name))
        if name.startswith("/dev/mmcblk") or (not name.startswith("/dev/") and disk is not None and disk.slow):
            yield advice(
                "swap-slow", "swap lies on flash that is slow and wears out; it cannot hold GPU memory anyway", name,
                f"sudo swapoff {name}, and remove it from /etc/fstab",
            )  # fmt: skip


def check_folder(m: Machine, folder: Path, cache: bool) -> Iterator[Finding]:
    """The disk of the cache folder, or of the bundle where no cache folder is named."""
    where, what = folder.absolute(), "the cache folder" if cache else "the bundle"
    inside = m.system.path(str(where))
    disk = m.disk(where)
    if disk is not None and disk.slow:
        yield advice(
            "disk-slow", f"{what} lies on a disk that reads some 90 to 300 MB/s", f"{where} on {disk.kind} {disk.name}",
            f"move it to an NVMe drive{', as in --cache-dir /ssd/mimo-edge' if cache else ''}",
        )  # fmt: skip
    if not cache:
        return
    if not m.writable(inside):
        yield wrong(
            "cache-denied",
            "the cache folder cannot be written",
            where,
            f"sudo chown -R $USER {where}, or choose another --cache-dir",
        )
    if (free := m.free(inside)) < NEEDED_FREE:
        yield wrong(
            "disk-full",
            "the disk of the cache folder is nearly full",
            f"{_mb(free)} free",
            f"free {_mb(NEEDED_FREE - free)} there, or choose another --cache-dir",
        )


def _dotted(release: tuple[int, int, int]) -> str:
    return ".".join(map(str, release))


def _mb(n: int) -> str:
    return f"{n / 1e6:,.0f} MB"
