"""A folder that several processes change: one lock, a count of changes, and a listing that is renewed when it grew old.

    lock          an exclusive flock while anything is written or removed; holds the number of changes so far
    usage.json    usage.py
    <model>/...   entries

A killed process loses its lock with its life. The count is raised before a change, so a change is never overlooked.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mimo_edge.disk import check_regular, open_file
from mimo_edge.kv.files import TEMPORARY, on_disk
from mimo_edge.kv.stored import PAGE, SNAPSHOT

LOCK, USAGE = "lock", "usage.json"
# Nothing else in the folder is ours: whoever names a home folder by mistake loses nothing.
_MODEL = re.compile("[0-9a-f]{32}")
_ENTRY = re.compile(rf"[0-9a-f]{{32}}({PAGE}|{SNAPSHOT})(\.[0-9]+{TEMPORARY})?")
PATIENCE_S = 10.0  # another process's longest write; a stopped one must not stop us


class Folder:
    """Paths are relative to the folder. Every method raises OSError."""

    def __init__(self, path: Path, model: str | None = None):
        """With a `model` the folder is made if it does not exist."""
        self.path = path
        if model is not None:
            (path / model).mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        self.sizes: dict[str, int] = {}  # of entries, in bytes that the disk gives up for them
        self.strange: list[str] = []  # pipes, devices, links and folders by the name of an entry; skipped
        self._listed = -1

    def models(self) -> list[str]:
        return [d.name for d in os.scandir(self.path) if _MODEL.fullmatch(d.name) and d.is_dir(follow_symlinks=False)]

    def clear(self) -> int:
        """Under the lock: removes every entry of every model; returns how many files."""
        names = sorted(self.sizes, key=lambda n: not n.endswith(SNAPSHOT))
        for name in names:
            self.remove(name)
        return len(names)

    @property
    def used(self) -> int:
        return sum(self.sizes.values())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes anything inside the block, the listing is right, and what dead writers left is gone."""
        fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            check_regular(fd)
            _wait_for(fd)
            if self.renew():
                self._remove_temporary()
            yield
        finally:
            os.close(fd)

    def renew(self) -> bool:
        """Lists again if something changed; whether it did."""
        changes = self._changes()
        if changes == self._listed:
            return False
        sizes, strange = {}, []
        for model in self.models():
            for entry in os.scandir(self.path / model):
                if not _ENTRY.fullmatch(entry.name):
                    continue
                if entry.is_file(follow_symlinks=False):
                    sizes[f"{model}/{entry.name}"] = _size(entry)
                else:
                    strange.append(f"{model}/{entry.name}")
        self.sizes, self.strange, self._listed = sizes, strange, changes
        return True

    def changing(self) -> None:
        """To be called under the lock, before a change."""
        self._listed = self._changes() + 1
        fd = os.open(self.path / LOCK, os.O_WRONLY)
        try:
            os.pwrite(fd, struct.pack("<Q", self._listed), 0)
        finally:
            os.close(fd)

    def has(self, name: str) -> bool:
        """Looks at the disk too: somebody without our manners may have removed it."""
        return name in self.sizes and (self.path / name).is_file()

    def added(self, name: str, size: int) -> None:
        self.sizes[name] = on_disk(size)

    def remove(self, name: str) -> None:
        """Under the lock. A file that is gone already is as good as removed."""
        self.changing()
        (self.path / name).unlink(missing_ok=True)
        self.sizes.pop(name, None)

    def _remove_temporary(self) -> None:
        for name in [n for n in self.sizes if n.endswith(TEMPORARY)]:
            self.remove(name)
        for path in self.path.glob(f"{USAGE}.*{TEMPORARY}"):
            path.unlink(missing_ok=True)

    def _changes(self) -> int:
        try:
            with open_file(self.path / LOCK) as file:
                data = file.read(8)
        except FileNotFoundError:
            return 0
        return struct.unpack("<Q", data)[0] if len(data) == 8 else 0


def _size(entry: os.DirEntry) -> int:
    try:
        return on_disk(entry.stat(follow_symlinks=False).st_size)
    except FileNotFoundError:  # removed meanwhile
        return 0


def _wait_for(fd: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise OSError(errno.EBUSY, "another process holds its lock") from None
            time.sleep(0.005)
