"""mimo-edge doctor on trees of files: healthy machines, then one fault at a time, each found with its fix."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cuda_bundle import write_cuda_bundle
from fake_machine import GB, FakeJetson
from specs import mimo_spec

from mimo_edge.bundle import BUILT_IN, BundleWriter
from mimo_edge.cli.main import main
from mimo_edge.device import power
from mimo_edge.device.checks import examine
from mimo_edge.export.golden import add_golden
from mimo_edge.kernels.index import KernelIndex

CACHE = Path("/ssd/cache")
KINDS = [(b, j, c) for b in ("nano", "agx") for j in ("6.2", "7.2") for c in (False, True)]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """A bundle for Orin, one for another GPU only, one without golden tokens."""
    folder = tmp_path_factory.mktemp("bundles")
    plain = {c: write_cuda_bundle(folder / f"plain{c}", mimo_spec(), capability=c) for c in (87, 90)}
    return {
        "orin": add_golden(plain[87], folder / "orin").path,
        "hopper": add_golden(plain[90], folder / "hopper").path,
        "plain": plain[87].path,
        "newer": _of_newer_cuda(add_golden(plain[87], folder / "old"), folder / "newer"),
    }


def _of_newer_cuda(bundle, out):
    with BundleWriter(out) as writer:
        for name in bundle.manifest.files:
            writer.path(name).parent.mkdir(parents=True, exist_ok=True)
            data = bundle.file(name).read_bytes()
            if name.endswith("index.json"):
                data = replace(KernelIndex.loads(data, name), ptxas="13.2").dumps().encode()
            writer.path(name).write_bytes(data)
        return writer.finish(bundle.spec, "sm_87", "newer").path


@pytest.mark.parametrize(("board", "jetpack", "container"), KINDS)
def test_nothing_is_wrong_with_a_healthy_machine(board, jetpack, container, tmp_path, bundles):
    fake = FakeJetson(tmp_path, board, jetpack, container)
    report = examine(bundles["orin"], CACHE, fake.machine)
    assert report.findings == () and not report.wrong and report.to_json()["ok"]
    name = {"nano": "orin-nano-8gb-super", "agx": "agx-orin-64gb"}[board]
    assert name in report.facts["module"] and f"JetPack {'6' if jetpack == '6.2' else '7.2'}" in report.facts["release"]
    assert report.facts["container"] == ("yes" if container else "no")
    assert report.facts["power mode"] == {"nano": "MAXN_SUPER", "agx": "MAXN"}[board]
    assert report.facts["hottest"] == "cpu-thermal 52 C" and "306 MHz" in report.facts["GPU clock"]


def graphical(f):
    f.write("lib/systemd/system/graphical.target", "")
    (f.root / "etc/systemd/system").mkdir(parents=True)
    (f.root / "etc/systemd/system/default.target").symlink_to("/lib/systemd/system/graphical.target")


# what is planted, where, its code, whether it is wrong (or costs speed only), and what its fix says
FAULTS = {
    "another board": (lambda f: f.write("proc/device-tree/model", "Jetson Xavier NX"), "board", True, "use an Orin"),
    "release unreadable": (lambda f: f.remove("etc/nv_tegra_release"), "release-unknown", False, "nvidia-l4t-core"),
    "JetPack 5": (lambda f: f.write("etc/nv_tegra_release", "R35 (release), REVISION: 4.1"), "release", True, "flash"),
    "36.4.7": (lambda f: f.write("etc/nv_tegra_release", "R36 (release), REVISION: 4.7"), "nvmap-limit", True, "36.5"),
    "a kernel of somebody else": (
        lambda f: f.write("proc/sys/kernel/osrelease", "5.15.0-119-generic"), "kernel", True, "nvidia-l4t-kernel"),
    "15 W": (lambda f: f.power_mode(0), "power-mode", False, "sudo nvpmodel -m 2"),
    "a mode that does not exist": (lambda f: f.power_mode(7), "power-mode-unknown", True, "reboot"),
    "no power modes": (lambda f: f.remove("etc/nvpmodel.conf"), "nvpmodel-missing", False, "nvidia-l4t-nvpmodel"),
    "a capped clock": (lambda f: f.clock(612_000_000), "gpu-clock", False, "sudo jetson_clocks"),
    "cores off": (lambda f: f.write("sys/devices/system/cpu/offline", "4-5\n"), "cpus-offline", False, "nvpmodel -m 2"),
    "hot": (lambda f: f.zone(1, "gpu-thermal", 95_000), "hot", True, "fan"),
    "over-current": (lambda f: f.write("sys/class/hwmon/hwmon2/oc1_event_cnt", "3\n"), "over-current", False, "supply"),
    "no nvmap": (lambda f: f.remove("dev/nvmap"), "device-missing", True, "reboot"),
    "nvmap denied": (lambda f: f.denied.add("/dev/nvmap"), "device-denied", True, "usermod -aG video,render"),
    "render node denied": (lambda f: f.denied.add("/dev/dri/renderD128"), "device-denied", True, "group is render"),
    "a desktop": (graphical, "desktop", False, "multi-user.target"),
    "zram": (lambda f: f.write("sys/block/zram0/disksize", "3900000000\n"), "zram", False, "nvzramconfig"),
    "swap on eMMC": (
        lambda f: f.write("proc/swaps", "Filename\n/dev/mmcblk0p9 partition 1 0 -2\n"), "swap-slow", False, "swapoff"),
    "cache on an SD card": (
        lambda f: (f.write("proc/self/mounts", "/dev/mmcblk1p1 /ssd ext4 rw 0 0\n"),
                   f.write("sys/block/mmcblk1/device/type", "SD\n")), "disk-slow", False, "NVMe"),
    "cache folder denied": (lambda f: setattr(f, "writable", False), "cache-denied", True, "chown"),
    "disk full": (lambda f: setattr(f, "free", 100 << 20), "disk-full", True, "choose another --cache-dir"),
    "little memory": (lambda f: f.memory(GB), "memory", True, "close other programs"),
    "a limit of the service": (lambda f: f.limit(1 << 30, 900 << 20), "limit", True, "raise the limit by"),
    "an old Python": (lambda f: setattr(f, "python", (3, 8)), "python", True, "python3.10"),
    "no tokenizers": (lambda f: f.libraries.pop("tokenizers"), "library", True, "pip install tokenizers"),
    "NumPy 2 beside TensorRT 10.3": (
        lambda f: f.write("usr/lib/python3.10/dist-packages/tensorrt/__init__.py", ""),
        "numpy-tensorrt", False, "numpy<2"),
    "no cuda-python": (lambda f: f.libraries.pop("cuda-bindings"), "cuda-python", True, "mimo-edge[cuda]"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_with_its_fix(name, tmp_path, bundles):
    plant, code, is_wrong, fix = FAULTS[name]
    fake = FakeJetson(tmp_path)
    plant(fake)
    report = examine(bundles["orin"], CACHE, fake.machine)
    assert [f.code for f in report.findings] == [code], "that, and nothing that it does not cause"
    (finding,) = report.findings
    assert (
        finding.wrong == is_wrong == report.wrong and fix in finding.fix and finding.value and "\n" not in finding.fix
    )


@pytest.mark.parametrize(
    ("plant", "code", "fix"),
    [
        (lambda f: f.remove("dev/nvmap"), "device-missing", "docker run --runtime nvidia"),
        (lambda f: f.denied.add("/dev/nvmap"), "device-denied", "--group-add $(getent group video"),
        (lambda f: f.denied.add("/dev/dri/renderD128"), "device-denied", "--group-add $(getent group render"),
        (lambda f: f.remove("etc/nv_tegra_release"), "release-unknown", "docker run -v /etc/nv_tegra_release"),
        (lambda f: f.limit(1 << 30), "limit", "docker run --memory"),
    ],
)
def test_fixes_inside_a_container_are_those_of_its_command_line(plant, code, fix, tmp_path, bundles):
    fake = FakeJetson(tmp_path, container=True)
    plant(fake)
    (finding,) = examine(bundles["orin"], None, fake.machine).findings
    assert finding.code == code and fix in finding.fix


@pytest.mark.parametrize(
    ("bundle", "jetpack", "code", "is_wrong", "fix"),
    [
        ("hopper", "6.2", "kernels", True, "--target orin"),
        ("newer", "6.2", "kernels-newer", True, "TRITON_PTXAS_PATH"),
        ("newer", "7.2", None, False, ""),
        ("plain", "6.2", "selftest-missing", False, "export the model again"),
        ("none", "6.2", "bundle", True, "export the model again"),
    ],
)
def test_faults_of_the_bundle(bundle, jetpack, code, is_wrong, fix, tmp_path, bundles):
    report = examine(bundles.get(bundle, Path("none")), None, FakeJetson(tmp_path, jetpack=jetpack).machine)
    assert [f.code for f in report.findings] == ([code] if code else []) and report.wrong == is_wrong
    assert all(fix in f.fix for f in report.findings)


def test_cuda_python_of_cuda_12_6_is_one_distribution(tmp_path, bundles):
    fake = FakeJetson(tmp_path)
    del fake.libraries["cuda-bindings"]
    fake.libraries["cuda-python"] = "12.6.2"
    assert examine(bundles["orin"], None, fake.machine).findings == ()


@pytest.mark.parametrize(("jetpack", "numpy"), [("6.2", "1.26.4"), ("7.2", "2.4.6")])
def test_other_pairs_of_numpy_and_tensorrt_are_well(jetpack, numpy, tmp_path, bundles):
    fake = FakeJetson(tmp_path, jetpack=jetpack)
    fake.write("usr/lib/python3.10/dist-packages/tensorrt/__init__.py", "")
    fake.libraries["numpy"] = numpy
    assert examine(bundles["orin"], None, fake.machine).findings == ()


def test_the_built_in_model_may_answer_from_the_cpu(tmp_path):
    report = examine(BUILT_IN, None, FakeJetson(tmp_path).machine)
    assert "kernels" in {f.code for f in report.findings} and not report.wrong


def test_what_is_wrong_comes_before_advice(tmp_path, bundles):
    fake = FakeJetson(tmp_path)
    fake.power_mode(0)
    fake.remove("dev/nvmap")
    assert [f.level for f in examine(bundles["orin"], CACHE, fake.machine).findings] == ["wrong", "advice"]


def test_the_same_kind_of_disk_is_told_apart(tmp_path):
    fake = FakeJetson(tmp_path)
    fake.write(
        "proc/self/mounts", "/dev/root / ext4 rw 0 0\n/dev/mmcblk0p1 /data ext4 rw 0 0\n/dev/sda1 /datafile ext4\n"
    )
    fake.write("proc/cmdline", "quiet root=/dev/nvme0n1p1 rw\n")
    fake.write("sys/block/mmcblk0/device/type", "MMC\n")
    disks = {p: fake.machine.disk(Path(p)) for p in ("/home", "/data/x", "/datafile/x")}
    assert {p: (d.name, d.kind) for p, d in disks.items()} == {
        "/home": ("nvme0n1", "NVMe"), "/data/x": ("mmcblk0", "eMMC"), "/datafile/x": ("sda", "USB or SATA"),
    }  # fmt: skip


def test_zones_that_are_off_and_modes_without_super(tmp_path):
    fake = FakeJetson(tmp_path, "agx")
    fake.zone(2, "cv0-thermal", -256_000)
    assert [z.name for z in power.zones(fake.machine.system)] == ["cpu-thermal", "gpu-thermal"]
    mode = power.PowerMode({0: "10W", 3: "MODE_50W", 2: "30W"}, None)
    assert mode.fastest == 3 and mode.name is None


def test_the_command(tmp_path, bundles, monkeypatch, capsys):
    fake = FakeJetson(tmp_path)
    monkeypatch.setattr("mimo_edge.device.checks.Machine", lambda: fake.machine)

    def run(*args):
        with pytest.raises(SystemExit) as e:
            main(["doctor", *map(str, args)])
        return e.value.code or 0, capsys.readouterr().out

    code, out = run(bundles["orin"])
    assert code == 0 and "nothing is wrong" in out and "Orin Nano 8 GB, Super" in out
    fake.denied.add("/dev/nvmap")
    code, out = run(bundles["orin"])
    assert code == 1 and "wrong: this user may not open a device file of the GPU (/dev/nvmap)" in out
    assert "fix: sudo usermod" in out
    data = json.loads(run(bundles["orin"], "--json")[1])
    assert not data["ok"] and [f["code"] for f in data["findings"]] == ["device-denied"]
    fake.denied.clear()
    fake.power_mode(0)
    assert run(bundles["orin"])[0] == 0, "advice is no failure"
