"""Importers: a Hugging Face folder, a native folder or a GGUF file becomes a `Checkpoint`."""

from __future__ import annotations

from pathlib import Path

from mimo_edge.errors import BadInputError
from mimo_edge.export.families.checkpoint import Checkpoint, Source

__all__ = ["Checkpoint", "Source", "open_checkpoint"]

_SUFFIXES = (".json", ".safetensors", ".bin", ".jinja", ".gguf")


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint by its headers; weights are read later, by rows, through `Checkpoint.source`.

    Raises BadInputError (missing, truncated, wrong dtype or shape, vocabulary mismatch) and UnsupportedError (unknown
    family or architecture, a field or dtype that cannot be represented).
    """
    if not path.exists():
        raise BadInputError(
            f"{path} does not exist (expected a Hugging Face folder, a native folder with spec.json, or a .gguf file)"
        )
    _check_regular(path)
    try:
        if (path / "spec.json").exists() and not (path / "config.json").exists():
            from mimo_edge.export.families.native import open_native

            return open_native(path)
        if path.is_dir():
            from mimo_edge.export.families.hf import open_hf

            return open_hf(path)
        from mimo_edge.export.families.gguf import open_gguf

        return open_gguf(path)
    except OSError as e:
        raise BadInputError(f"{e.filename or path}: cannot be read ({e.strerror})") from None
    except (ArithmeticError, RecursionError, MemoryError) as e:  # zeros, infinities and nesting that no model has
        raise BadInputError(f"{path}: its configuration or a header holds impossible values ({e})") from None


def _check_regular(path: Path) -> None:
    """Raises BadInputError where a checkpoint's file is none: opening a pipe would wait forever."""
    files = [path] if not path.is_dir() else [p for p in sorted(path.iterdir()) if p.suffix in _SUFFIXES]
    for file in files:
        if file.exists() and not file.is_file():
            raise BadInputError(f"{file} is not a regular file: put the file itself or a link to it there")
