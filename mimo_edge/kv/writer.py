"""The thread that writes snapshots to files, so that nobody who generates waits for a disk."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from mimo_edge.kv.snapshots import Snapshot
from mimo_edge.kv.stored import Stored
from mimo_edge.kv.tiers import DiskTier

log = logging.getLogger("mimo_edge")
WAITING = 8  # snapshots to write; each is pinned in memory until it is


class Writer:
    """Writes one snapshot after the other. `done` is told of each, when it may be unpinned."""

    def __init__(self, disk: DiskTier, done: Callable[[Snapshot], None]):
        self._disk, self._done = disk, done
        self._queue: queue.Queue[tuple[Snapshot, Stored] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="mimo-edge cache writer", daemon=True)
        self._thread.start()

    def add(self, snapshot: Snapshot, stored: Stored) -> None:
        """Under the engine's lock. Dropped, and counted, when the disk does not keep up."""
        if self._queue.qsize() >= WAITING:
            self._disk.counters["refused: the disk does not keep up"] += 1
            return
        snapshot.pins += 1
        self._queue.put((snapshot, stored))

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            snapshot, stored = item
            try:
                pages = {name: page.data for name, page in zip(stored.pages, snapshot.pages, strict=True)}
                self._disk.store(stored, snapshot.data, pages)
            except Exception as e:  # of no concern to who generates
                log.warning("cache folder %s: internal error: %s", self._disk.path, e)
            finally:
                self._done(snapshot)
                self._queue.task_done()

    def flush(self) -> None:
        self._queue.join()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
