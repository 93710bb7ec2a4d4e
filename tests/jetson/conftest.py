"""Folders that look like the root of a Jetson to install.sh and verify.sh."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_machine import FakeJetson

MORE = {
    "etc/group": "root:x:0:\nvideo:x:44:ada\nrender:x:104:ada,ben\n",
    "etc/passwd": "root:x:0:0:::\nada:x:1000:1000:::\nben:x:1001:44:::\n",
    "proc/device-tree/compatible": "nvidia,p3768-0000+p3767-0005\0nvidia,p3767-0005\0nvidia,tegra234\0",
    "proc/vmstat": "pswpin 5\npswpout 7\n",
    "proc/self/cgroup": "0::/robot\n",
    "sys/fs/cgroup/robot/memory.current": "1000000\n",
    "sys/class/hwmon/hwmon1/in1_label": "VDD_IN\n",
    "sys/class/hwmon/hwmon1/in1_input": "5000\n",
    "sys/class/hwmon/hwmon1/curr1_input": "2200\n",
    "usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1": "-",
}


@pytest.fixture
def jetson(tmp_path: Path) -> Callable[..., Path]:
    """Makes one of an L4T release; `changed` files have __ for /, and an empty text removes one."""

    def make(release: str = "36 (release), REVISION: 4.3", **changed: str) -> Path:
        fake = FakeJetson(tmp_path / "root")
        wanted = {"etc/nv_tegra_release": f"# R{release}, GCID: 38968081, BOARD: generic\n"} | MORE
        for name, text in (wanted | {k.replace("__", "/"): v for k, v in changed.items()}).items():
            fake.write(name, text)
            if not text:
                fake.remove(name)
        return fake.root

    return make
