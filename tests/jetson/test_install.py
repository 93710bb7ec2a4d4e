import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
INSTALL = REPO / "jetson" / "install.sh"
Tree = Callable[..., Path]

# Stands for the system's Python: it makes a "virtual environment" of scripts that write down how they were called.
PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
    echo "venv $*" >> {log}
    mkdir -p "$4/bin"
    for name in pip mimo-edge; do
        printf '#!/bin/sh\\necho %s "$@" >> {log}\\n[ "$1" != "{fails}" ]\\n' $name > "$4/bin/$name"
        chmod +x "$4/bin/$name"
    done
    ln -sf {real} "$4/bin/python"
    exit 0
fi
exec {real} "$@"
"""


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the script with a stand-in for python3, whose scripts fail at the sub-command `fails`."""

    def run(*arguments: object, fails: str = "-", path: str | None = None) -> subprocess.CompletedProcess[str]:
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        (tools / "python3").write_text(PYTHON.format(log=tmp_path / "log", fails=fails, real=sys.executable))
        (tools / "python3").chmod(0o755)
        command = ["bash", str(INSTALL), "--prefix", str(tmp_path / "venv"), "--user", "ada", *map(str, arguments)]
        env = {**os.environ, "PATH": path or f"{tools}:{os.environ['PATH']}"}
        return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)

    return run


def log(tmp_path: Path) -> list[str]:
    return (tmp_path / "log").read_text().splitlines() if (tmp_path / "log").exists() else []


def one_error(done: subprocess.CompletedProcess[str]) -> str:
    [line] = done.stderr.splitlines()
    assert line.startswith("install.sh: error: ")
    return line


PIN_6 = ">=12.6.1,<12.7 numpy>=1.26,<2"


@pytest.mark.parametrize(
    ("release", "words", "pin"),
    [
        ("36 (release), REVISION: 4.3", "JetPack 6.2 (L4T 36.4.3, CUDA 12.6), NVIDIA Jetson", PIN_6),
        ("36 (release), REVISION: 5.0", "JetPack 6.2 (L4T 36.5.0", PIN_6),
        ("39 (release), REVISION: 2.0", "JetPack 7.2 (L4T 39.2.0, CUDA 13.2)", ">=13.2,<13.3"),
    ],
    ids=["6.2", "6.2.2", "7.2"],
)
def test_a_dry_run_says_what_it_would_do_and_does_nothing(install, jetson: Tree, tmp_path, release, words, pin):
    done = install("--root", jetson(release), "--dry-run", "--service")
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    steps = [line[2:] for line in done.stdout.splitlines() if line.startswith("+ ")]
    assert steps[0] == f"python3 -m venv --clear {tmp_path}/venv"
    assert steps[1].endswith(f"--only-binary :all: {REPO}[cuda] cuda-python{pin}")
    # the service starts behind the tests, not before
    order = [next(i for i, s in enumerate(steps) if part in s) for part in ("doctor", "selftest", "enable --now")]
    assert order == sorted(order)
    assert "dry run: nothing was done" in done.stdout and not (tmp_path / "venv").exists()
    assert not log(tmp_path)


def test_installs_tests_and_does_nothing_twice(install, jetson: Tree, tmp_path):
    root = jetson()
    for _ in range(2):
        done = install("--root", root)
        assert done.returncode == 0, done.stderr
        assert "install.sh: ready: " in done.stdout and "the GPU was not tested" in done.stdout
    lines = log(tmp_path)
    assert sum(line.startswith("venv") for line in lines) == 1
    assert sum("doctor" in line for line in lines) == sum("selftest" in line for line in lines) == 2


def test_another_jetpack_gets_an_environment_of_its_own(install, jetson: Tree, tmp_path):
    assert install("--root", jetson()).returncode == 0
    assert install("--root", jetson("39 (release), REVISION: 2.0")).returncode == 0
    assert sum(line.startswith("venv") for line in log(tmp_path)) == 2


def test_a_folder_of_somebody_else_is_left_alone(install, jetson: Tree, tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.txt").write_text("years of work")
    done = install("--root", jetson())
    assert done.returncode == 1 and "was not made by this script" in done.stderr
    assert [p.name for p in (tmp_path / "venv").iterdir()] == ["thesis.txt"] and not log(tmp_path)


def test_a_bundle_for_orin_has_to_pass_on_the_gpu(install, jetson: Tree, tmp_path):
    bundle = tmp_path / "bundle"
    (bundle / "kernels" / "sm_87").mkdir(parents=True)
    (bundle / "manifest.json").touch()
    done = install("--root", jetson(), "--bundle", bundle)
    assert done.returncode == 0 and "was not tested" not in done.stdout
    assert f"mimo-edge selftest {bundle} --backend cuda" in log(tmp_path)
    assert f"mimo-edge doctor {bundle}" in log(tmp_path)


@pytest.mark.parametrize("command", ["doctor", "selftest"])
def test_fails_closed_when_a_test_fails(install, jetson: Tree, command):
    done = install("--root", jetson(), fails=command)
    assert done.returncode == 1
    assert f"{command} f" in done.stderr and "not ready" in done.stderr and "install.sh: ready" not in done.stdout


def test_fails_closed_when_pip_fails(install, jetson: Tree, tmp_path):
    done = install("--root", jetson(), fails="install")
    assert done.returncode == 1 and "pip could not install" in one_error(done)
    assert not any("doctor" in line for line in log(tmp_path))


def test_tensorrt_alone_is_let_in_from_the_system(install, jetson: Tree, tmp_path):
    root = jetson()
    module = root / "usr/lib/python3.10/dist-packages/tensorrt"
    module.mkdir(parents=True)
    done = install("--root", root, "--dry-run")
    assert f"+ ln -sfn {module} {tmp_path}/venv/lib/python3/site-packages/tensorrt" in done.stdout
    assert "no TensorRT for Python" not in done.stdout
    shutil.rmtree(module)
    assert "sudo apt-get install python3-libnvinfer" in install("--root", root, "--dry-run").stdout


@pytest.mark.parametrize(
    ("release", "changed", "words"),
    [
        ("35 (release), REVISION: 4.1", {}, "L4T '35.4.1' is not supported: JetPack 6.2"),
        ("36 (release), REVISION: 3.0", {}, "L4T '36.3.0' is not supported"),
        ("36 (release), REVISION: 4.0", {}, "JetPack 6.1 or older"),
        ("38 (release), REVISION: 2.0", {}, "L4T '38.2.0' is not supported"),
        ("what", {}, "L4T 'unreadable' is not supported"),
        ("36 (release), REVISION: 4.3", {"etc__nv_tegra_release": ""}, "this is no Jetson (or a container)"),
        ("36 (release), REVISION: 4.3", {"proc__device-tree__compatible": "nvidia,tegra194\0"}, "supported is Orin"),
        ("36 (release), REVISION: 4.3", {"proc__device-tree__compatible": ""}, "supported is Orin"),
    ],
    ids=["jetpack5", "6.0", "6.1", "7.0", "unreadable", "no_release", "xavier", "no_device_tree"],
)
def test_other_machines_are_unsupported(install, jetson: Tree, tmp_path, release, changed, words):
    done = install("--root", jetson(release, **changed))
    assert done.returncode == 3 and words in one_error(done)
    assert not log(tmp_path)


@pytest.mark.parametrize(
    ("changed", "arguments", "fix"),
    [
        ({"dev__nvmap": ""}, [], "reboot, then see dmesg"),
        ({"usr__lib__aarch64-linux-gnu__nvidia__libcuda.so.1": ""}, [], "--reinstall nvidia-l4t-cuda"),
        ({"etc__group": "video:x:44:\nrender:x:104:ada\n"}, [], "sudo usermod -aG video ada"),
        ({"etc__group": "video:x:44:adam\nrender:x:104:ada\n"}, [], "sudo usermod -aG video ada"),
        ({"etc__group": "video:x:44:ada\n"}, [], "sudo usermod -aG render ada"),
    ],
    ids=["nvmap", "libcuda", "video", "alike", "render"],
)
def test_what_is_wrong_comes_with_its_fix_before_anything_is_installed(
    install, jetson: Tree, tmp_path, changed, arguments, fix
):
    done = install("--root", jetson(**changed), *arguments)
    assert done.returncode == 1 and fix in done.stderr and "nothing was installed" in done.stderr
    assert len(done.stderr.splitlines()) == 2 and not log(tmp_path)


def test_a_primary_group_counts(install, jetson: Tree):
    assert install("--root", jetson(), "--user", "ben", "--dry-run").returncode == 0


def test_several_faults_are_told_at_once(install, jetson: Tree):
    done = install("--root", jetson(dev__nvmap="", etc__group="audio:x:29:ada\n"))
    assert done.stderr.count("install.sh: error: ") == 4 and "3 thing(s) to put right" in done.stderr


def test_an_unsupported_python_is_named(install, jetson: Tree, tmp_path):
    tools = tmp_path / "old"
    tools.mkdir()
    (tools / "python3").write_text("#!/bin/sh\necho 3.8\n")
    (tools / "python3").chmod(0o755)
    done = install("--root", jetson(), path=f"{tools}:{os.environ['PATH']}")
    assert done.returncode == 1 and "python3 is 3.8, supported are 3.10 to 3.12" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fast"], "unknown option --fast"),
        (["--bundle"], "--bundle needs a value"),
        (["--bundle", "nowhere"], "nowhere is not a bundle"),
    ],
)
def test_wrong_options(install, arguments, words):
    done = install(*arguments)
    assert done.returncode == 2 and words in one_error(done)


def test_only_a_jetson_is_looked_for_where_no_root_is_given(install, monkeypatch, tmp_path):
    tools = tmp_path / "x86"
    tools.mkdir()
    (tools / "uname").write_text("#!/bin/sh\necho x86_64\n")
    (tools / "uname").chmod(0o755)
    done = install(path=f"{tools}:{os.environ['PATH']}")
    assert done.returncode == 3 and "this machine is x86_64, a Jetson is aarch64" in one_error(done)
