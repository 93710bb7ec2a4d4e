"""Files as they should be: what a rename needs before it counts as done, and nothing but regular files is read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def sync(path: Path) -> None:
    """Flushes a file, or a folder's entries, to the disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file to read. Raises OSError, also for a pipe (opening one would wait for ever) or a device."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(fd)
        return open(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def check_regular(fd: int) -> None:
    """Raises OSError unless `fd` is a regular file."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
