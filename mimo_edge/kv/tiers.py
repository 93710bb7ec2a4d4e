"""The tier below memory: snapshots in files that outlive the process, in a folder that several processes share.

    FOLDER/<model>/<key>.page        rows of one page in all full layers
    FOLDER/<model>/<key>.snapshot    a snapshot's other rows, and its tokens

A snapshot is written after its pages and removed before them, so what is visible is complete. Readers take no lock: a
file that vanished or is damaged is a miss. Whatever goes wrong is counted, said once, and survived.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mimo_edge.disk import sync
from mimo_edge.kv import files
from mimo_edge.kv.eviction import aged
from mimo_edge.kv.files import Damaged, Header
from mimo_edge.kv.folder import USAGE, Folder
from mimo_edge.kv.stored import PAGE, SNAPSHOT, Stored, key_in
from mimo_edge.kv.usage import Usage

log = logging.getLogger("mimo_edge")
Rows = NDArray[np.uint8]


class DiskTier:
    """Snapshots of one `model` (32 hexadecimal digits).

    `budget` bounds the bytes of the whole folder, `daily` those written in a day. Threads may share it. A folder that
    cannot be used (someone else's, not a folder) leaves `folder` None: everything is a miss then. `version` rises when
    `snapshots` changes.
    """

    def __init__(self, path: Path, model: str, budget: int, daily: int):
        self.path, self.budget = path, budget
        self.counters: Counter[str] = Counter()
        self.snapshots: dict[str, Stored] = {}  # by the name of their file
        self.version = 0
        self.folder: Folder | None = None
        self._mutex = threading.RLock()
        self._model, self._daily = model, daily
        self._headers: dict[str, Stored | None] = {}  # of files seen so far; they never change
        self._said: set[str] = set()
        self.usage = Usage()
        try:
            self.folder = Folder(path, self._model)
            self.usage = Usage.read(path / USAGE, daily)
        except OSError as e:
            self._trouble("is not used", e)

    def scan(self) -> None:
        """At the start: removes what crashes left, what is damaged, orphaned or too much, and says how much."""
        if self.folder is None:
            return
        try:
            with self._locked() as folder:
                self._index()
                for name in [n for n in self._own_files() if n not in self.snapshots and n.endswith(SNAPSHOT)]:
                    self.counters["dropped: damaged or incomplete snapshot"] += 1
                    folder.remove(self._place(name))
                self.counters["dropped: page without a snapshot"] += self._remove_orphans(frozenset())
                self._make_room(0, frozenset())
        except OSError as e:
            self._trouble("cannot be tidied", e)
            self.refresh()
        self.counters["skipped: not a regular file"] += len(self.folder.strange)
        if noted := {k: n for k, n in self.counters.items() if k.startswith(("dropped", "skipped")) and n}:
            log.info("cache folder %s: %s", self.path, ", ".join(f"{n} {k}" for k, n in noted.items()))

    def fit(self) -> None:
        """Lowers the budget to what the disk has room for, a tenth of that left to others, and says so."""
        if self.folder is None:
            return
        try:
            self.folder.renew()
            disk = os.statvfs(self.path)
        except OSError as e:
            self._trouble("cannot be listed", e)
            return
        free = disk.f_bavail * disk.f_frsize
        most = (free + self.folder.used) * 9 // 10
        if most < self.budget:
            note = "cache folder %s: of %s bytes only %s are used, as the disk has %s free"
            log.warning(note, self.path, *(f"{n:,}" for n in (self.budget, most, free)))
            self.budget = most

    def refresh(self) -> bool:
        """Takes note of what other processes did, unless a store is under way; whether there was anything."""
        if self.folder is None or not self._mutex.acquire(blocking=False):
            return False
        try:
            if not self.folder.renew():
                return False
            self._index()
        except OSError as e:
            self._trouble("cannot be listed", e)
        finally:
            self._mutex.release()
        return True

    def load(self, stored: Stored) -> tuple[Rows, list[Rows]] | None:
        """(own rows, rows of its pages), verified; None when a file is gone or damaged, which then is removed."""
        try:
            own, *pages = [self._read(stored, name) for name in (stored.name, *stored.pages)]
        except (OSError, Damaged) as e:
            self._lose(stored, "gone" if isinstance(e, FileNotFoundError) else str(e))
            return None
        self.counters["loaded"] += 1
        return own, pages

    def _read(self, stored: Stored, name: str) -> Rows:
        header, tokens, rows = files.read(self.path / self._place(name))
        if header != stored.header(name, rows) or not np.array_equal(tokens, stored.tokens_in(name)):
            raise Damaged("another entry's content")
        return rows

    def store(self, stored: Stored, own: Rows, pages: Mapping[str, Rows]) -> bool:
        """Writes a snapshot, and those of its pages that the folder lacks: all of it or nothing."""
        if self.folder is None:
            return False
        try:
            with self._locked() as folder:
                self._index()
                rows = {**pages, stored.name: own}
                headers = {n: stored.header(n, r) for n, r in rows.items() if not folder.has(self._place(n))}
                cost = sum(files.on_disk(files.size_of(h)) for h in headers.values())
                self._merge_usage(0, {})
                if stored.name in headers and self._may_write(cost, stored):
                    self._write(stored, headers, rows)
                    self.usage.allowance -= cost
                    self.counters["written bytes"] += cost
                    self.usage.write(self.path / USAGE)
        except OSError as e:
            self._trouble("cannot be written", e)
        return stored.name in self.snapshots

    def save_usage(
        self, clock: int, entries: Mapping[str, tuple[float, int]], totals: Mapping[str, int] | None = None
    ) -> None:
        """Remembers uses of entries, takes over what other processes noted later, and adds to the folder's totals."""
        if self.folder is None:
            return
        try:
            with self._locked():
                self._index()
                self._merge_usage(clock, entries)
                for name, n in (totals or {}).items():
                    self.usage.totals[name] = self.usage.totals.get(name, 0) + n
                self.usage.write(self.path / USAGE)
        except OSError as e:
            self._trouble("cannot be written", e)

    def _merge_usage(self, clock: int, entries: Mapping[str, tuple[float, int]]) -> None:
        theirs, known = Usage.read(self.path / USAGE, self._daily), {key_in(n) for n in self.snapshots}
        theirs.merge(self.usage.clock, self.usage.entries, known)
        theirs.merge(clock, entries, known)
        self.usage = theirs

    def verify(self) -> tuple[int, int]:
        """Reads every snapshot; what is damaged is removed. Returns how many were whole, and how many not."""
        self.refresh()
        loaded = [self.load(stored) is not None for stored in list(self.snapshots.values())]
        return sum(loaded), len(loaded) - sum(loaded)

    def _may_write(self, cost: int, stored: Stored) -> bool:
        if cost > self.usage.allowance:
            self.counters["refused: the day's writes are used up"] += 1
        elif not self._make_room(cost, frozenset(stored.pages)):
            self.counters["refused: no room"] += 1
        else:
            return True
        return False

    def _write(self, stored: Stored, headers: Mapping[str, Header], rows: Mapping[str, Rows]) -> None:
        """Pages first, the snapshot last; all names appear after all files are on disk."""
        assert self.folder is not None
        self.folder.changing()
        temps: dict[str, Path] = {}
        try:
            for name, header in headers.items():
                temps[name] = files.write(self.path / self._place(name), header, stored.tokens_in(name), rows[name])
            for name in headers:
                os.replace(temps[name], self.path / self._place(name))
                self.folder.added(self._place(name), files.size_of(headers[name]))
            sync(self.path / self._model)
        except BaseException:
            for temp in temps.values():
                temp.unlink(missing_ok=True)
            if self._place(stored.name) not in self.folder.sizes:
                self._remove_orphans(frozenset())
            raise
        self._headers[stored.name] = stored
        self._index()
        self.counters["stored"] += 1

    def _make_room(self, cost: int, needed: frozenset[str]) -> bool:
        """Removes entries until `cost` more bytes fit: those of other models, then the least useful; `needed` stay."""
        folder = self.folder
        assert folder is not None
        if cost > self.budget:
            return False
        foreign = [n for n in folder.sizes if not n.startswith(self._model)]
        foreign.sort(key=lambda n: n.endswith(SNAPSHOT))  # popped from the end: snapshots before pages
        own = sorted(self.snapshots.values(), key=self._rank, reverse=True)
        while folder.used + cost > self.budget and (foreign or own):
            if foreign:
                folder.remove(foreign.pop())
                self.counters["evicted: another model's file"] += 1
                continue
            victim = own.pop()
            folder.remove(self._place(victim.name))
            self._index()
            self._remove_orphans(needed)
            self.counters["evicted: no room"] += 1
        return folder.used + cost <= self.budget

    def _rank(self, stored: Stored) -> tuple[float, int, str]:
        count, used = self.usage.entries.get(key_in(stored.name), (0.0, 0))
        return aged(count, self.usage.clock - used) * len(stored.tokens), used, stored.name

    def _remove_orphans(self, needed: frozenset[str]) -> int:
        assert self.folder is not None
        alive = needed.union(*(s.pages for s in self.snapshots.values()))
        orphans = [n for n in self._own_files() if n.endswith(PAGE) and n not in alive]
        for name in orphans:
            self.folder.remove(self._place(name))
        return len(orphans)

    def _index(self) -> None:
        """Which snapshots are complete, from names and headers."""
        names = self._own_files()
        self._headers = {n: s for n, s in self._headers.items() if n in names}
        for name in names:
            if name.endswith(SNAPSHOT) and name not in self._headers:
                self._headers[name] = self._read_header(name)
        whole = (s for s in self._headers.values() if s is not None and all(p in names for p in s.pages))
        snapshots = {s.name: s for s in whole}
        if snapshots.keys() != self.snapshots.keys():
            self.snapshots, self.version = snapshots, self.version + 1

    def _read_header(self, name: str) -> Stored | None:
        try:
            header, tokens = files.read_header(self.path / self._place(name))
            stored = Stored.of(bytes.fromhex(header.root), tokens, tuple(header.firsts), header.page_size)
            return stored if stored.name == name and header.kind == "snapshot" else None
        except (OSError, Damaged, ValueError):
            return None

    def _lose(self, stored: Stored, reason: str) -> None:
        """Removes a snapshot, and whatever of its pages is not whole."""
        self._trouble(f"lost an entry ({reason})", None)
        with self._mutex:
            self._headers[stored.name] = None  # also where it cannot be removed
            self._index()
        try:
            with self._locked() as folder:
                folder.remove(self._place(stored.name))
                for name in stored.pages:
                    try:
                        self._read(stored, name)
                    except (OSError, Damaged):
                        folder.remove(self._place(name))
                self._index()
        except OSError as e:
            self._trouble("cannot be written", e)

    @contextmanager
    def _locked(self) -> Iterator[Folder]:
        assert self.folder is not None
        with self._mutex, self.folder.locked():
            yield self.folder

    def _own_files(self) -> set[str]:
        assert self.folder is not None
        start = self._model + "/"
        return {n.removeprefix(start) for n in self.folder.sizes if n.startswith(start)}

    def _place(self, name: str) -> str:
        return f"{self._model}/{name}"

    def _trouble(self, what: str, error: OSError | None) -> None:
        """Counted always, said once."""
        self.counters[f"trouble: {what}"] += 1
        if what not in self._said:
            self._said.add(what)
            log.warning("cache folder %s %s%s", self.path, what, f": {error.strerror}" if error else "")
