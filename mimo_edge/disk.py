"""What a file system needs before a rename counts as done."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flushes a file, or a folder's entries, to the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
