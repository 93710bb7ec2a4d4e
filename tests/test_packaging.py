"""The wheel and the editable install hold the same packages, under one name, and leak nothing beside it."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAPPED = ["export", "kernels", "trt_plugins"]
IMPORTS = "import mimo_edge, mimo_edge.export, mimo_edge.kernels, mimo_edge.trt_plugins"


def declared() -> set[str]:
    (block,) = re.findall(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    return set(re.findall(r'"(.+?)"', block))


def on_disk() -> set[str]:
    found = set()
    for top in ["mimo_edge", *MAPPED]:
        for init in (ROOT / top).rglob("__init__.py"):
            dotted = ".".join(init.parent.relative_to(ROOT).parts)
            found.add(dotted if top == "mimo_edge" else f"mimo_edge.{dotted}")
    return found


def folders_with_code() -> set[Path]:
    return {p.parent for top in ["mimo_edge", *MAPPED] for p in (ROOT / top).rglob("*.py")}


def run(code: str, cwd: Path, **env: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_declared_packages_are_the_ones_on_disk():
    assert declared() == on_disk()


def test_every_folder_with_code_is_a_package():
    assert all((folder / "__init__.py").exists() for folder in folders_with_code())


def test_the_editable_install_imports_from_another_folder(tmp_path):
    run(IMPORTS, tmp_path)


def test_the_wheel_imports_from_another_folder_and_leaks_nothing(tmp_path):
    source = tmp_path / "source"  # a copy: setuptools writes build/ beside what it builds
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "tests", "__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"mimo_edge"}
    code = f"{IMPORTS}; print(mimo_edge.kernels.__file__)"
    where = run(code, tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert where.startswith(str(tmp_path / "site"))


def test_kernels_refuses_its_bare_name(tmp_path):
    code = "import sys; sys.path.insert(0, sys.argv[1]); import kernels"
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "mimo_edge.kernels" in done.stderr
