"""The prefix cache of an engine: rows of earlier requests, copied out of the pools and back into them.

kv/prefix.py decides and kv/tiers.py keeps files; here are the copies, the lock, the thread that writes files, and what
happens when a promise cannot be kept.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence as Tokens
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_edge.backends.base import Backend, RowCopies
from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.kv.budget import DEFAULT_BYTES as DEFAULT_BYTES  # the default of `bytes`
from mimo_edge.kv.budget import checked
from mimo_edge.kv.buffers import Buffers
from mimo_edge.kv.keys import as_tokens, root_key
from mimo_edge.kv.layout import HEAD_ROWS, HIDDEN_ROWS, KvLayout
from mimo_edge.kv.lineage import Lineage
from mimo_edge.kv.prefix import Match, PrefixCache
from mimo_edge.kv.sequence import Sequence
from mimo_edge.kv.snapshots import Geometry, Piece, Snapshot
from mimo_edge.kv.stored import SNAPSHOT, Stored, key_in
from mimo_edge.kv.tiers import DiskTier
from mimo_edge.kv.trace import Recorder
from mimo_edge.kv.writer import Writer
from mimo_edge.request import Request

log = logging.getLogger("mimo_edge")

Rows = NDArray[np.uint8]


@dataclass(frozen=True)
class CacheOptions:
    """`bytes` of memory for rows and bookkeeping; None takes DEFAULT_BYTES, or what one whole context needs.

    `reserve` of them are allocated at the start; rows that find no gap there, once it is in pieces, go beside it.

    With a `folder`, `disk_bytes` of files there outlive the process; no more than `disk_writes` bytes a day are written
    (flash wears out). `record` keeps what was asked there (kv/trace.py).
    """

    bytes: int | None = None
    reserve: int = 0
    folder: str | Path | None = None
    disk_bytes: int = 4 << 30
    disk_writes: int = 64 << 30
    record: bool = False


class EngineCache:
    """`lock` is the engine's: the books and the pools are used by one thread at a time."""

    def __init__(
        self, backend: Backend, layout: KvLayout, fingerprint: str, options: CacheOptions, lock: AbstractContextManager
    ):
        """Raises BadInputError if the budget cannot hold one request, UnsupportedError if `backend` lacks RowCopies."""
        if not isinstance(backend, RowCopies):
            raise UnsupportedError(
                f"backend {backend.name} cannot use a prefix cache yet: leave --cache-bytes and --cache-dir out"
            )
        self._backend: RowCopies = backend
        self._layout, self._fingerprint, self._lock = layout, fingerprint, lock
        self._row_format = f"{backend.row_format}, pages {layout.page_size}, rings {sorted(layout.rings.items())}"
        if layout.heads:  # hidden states are among the rows, and rows of heads that see everything
            added = {k.name: k.token_bytes for k in layout.row_kinds if k.name in (HEAD_ROWS, HIDDEN_ROWS)}
            self._row_format += f", MTP {sorted(added.items())}"
        self._geometry = Geometry.of(layout)
        need = self._geometry.most_bytes(layout.context)
        budget = checked(options.bytes, options.reserve, need, layout.context)
        self._buffers = Buffers(options.reserve)
        self.prefix = PrefixCache(self._geometry, budget, freed=self._buffers.give, adopt=self._buffers.adopt)
        self.disk = self._open_disk(options, options.folder) if options.folder is not None else None
        self._writer = Writer(self.disk, self._written) if self.disk is not None else None
        self._recorder = self._open_recorder(options)
        self._seen = -1
        self._noted: dict[str, int] = {}
        self._take_note()

    def _open_disk(self, options: CacheOptions, folder: str | Path) -> DiskTier:
        name = os.fspath(folder)
        if not name or "\0" in name:  # pathlib takes the empty name for the current folder
            raise BadInputError(f"cache folder {name!r} is not a name: give --cache-dir a folder, `.` for this one")
        model = root_key(self._fingerprint, self._row_format)
        disk = DiskTier(Path(name), model.hex(), options.disk_bytes, options.disk_writes)
        disk.fit()
        disk.scan()
        self.prefix.clock = disk.usage.clock
        return disk

    def _open_recorder(self, options: CacheOptions) -> Recorder | None:
        if not options.record:
            return None
        if options.folder is None:
            raise BadInputError("--cache-record needs a folder: give --cache-dir as well")
        try:
            return Recorder(Path(options.folder))
        except OSError as e:
            log.warning("requests are not recorded in %s: %s", options.folder, e.strerror)
            return None

    def begin(self, sequence: Sequence, request: Request) -> Lineage:
        """Brings into `sequence` the longest prefix of the prompt that it, memory or a file holds."""
        tokens = as_tokens(request.prompt)
        root = root_key(self._fingerprint, self._row_format, request.tenant.encode())
        if self.disk is not None:
            self.disk.refresh()
        while True:
            with self._lock:
                self._take_note()
                match = self.prefix.match(root, tokens)
                own = sequence.reusable(request.prompt)
                in_file = match.snapshot if match.tokens > own and match.in_file else None
                if in_file is not None:  # what is under way counts too
                    self.prefix.make_room(self.prefix.load_cost(in_file))
            try:
                rows = None if in_file is None else self._fetch(in_file)  # without the lock
                with self._lock:
                    reused = self._resume(sequence, request.prompt, match, own, rows)
                    self.prefix.record(match.snapshot, reused, len(tokens))
                    return Lineage(self.prefix, root, match, reused, len(tokens), request.marks)
            except _Lost as e:
                with self._lock:
                    self.prefix.unstore(e.snapshot)
            finally:
                if match.snapshot is not None:
                    with self._lock:
                        self.prefix.release(match.snapshot)

    def _fetch(self, snapshot: Snapshot) -> tuple[Rows, list[Rows]]:
        """Rows of a promise that only files hold. Raises _Lost when they do not."""
        assert self.disk is not None
        stored = self.disk.snapshots.get(snapshot.key.hex() + SNAPSHOT)
        rows = self.disk.load(stored) if stored is not None else None
        sizes = self._geometry.own_bytes(snapshot.end, snapshot.firsts), self._geometry.page_bytes
        if rows is None or rows[0].nbytes != sizes[0] or any(r.nbytes != sizes[1] for r in rows[1]):
            raise _Lost(snapshot)
        return rows

    def _resume(
        self, sequence: Sequence, prompt: tuple[int, ...], match: Match, own: int, rows: tuple[Rows, list[Rows]] | None
    ) -> int:
        snapshot = match.snapshot
        if snapshot is None or match.tokens <= own:
            return sequence.keep_prefix_of(prompt)
        if rows is None:
            rows = snapshot.data, [p.data for p in snapshot.pages]
        else:
            self.prefix.load(snapshot, rows[0], dict(enumerate(rows[1])))
        self._copy_in(sequence, snapshot, rows, prompt[: match.tokens])
        return match.tokens

    def _copy_in(
        self, sequence: Sequence, snapshot: Snapshot, rows: tuple[Rows, list[Rows]], prefix: tuple[int, ...]
    ) -> None:
        """The rows that [0, len(prefix)) needs; of a ring all, so that it is as if they had been written."""
        sequence.reset()  # whatever fails from here on, rows that are half replaced are not taken for whole
        own, pages = rows
        parts = [(self._geometry.page_pieces(i), page) for i, page in enumerate(pages)]
        parts.append((self._geometry.own_pieces(snapshot.end, snapshot.firsts), own))
        for pieces, data in parts:
            for p in pieces:
                if p.kind in self._layout.rings or p.first < len(prefix):
                    self._backend.write_rows(sequence.slots, p.kind, p.first, p.last, data[p.at : p.at + p.nbytes])
        # a ring of a sequence that had gone back lacks rows that one of its end would have: as if more had been written
        kinds = zip(self._geometry.kinds, snapshot.firsts, strict=True)
        lacking = [first + k.slots for k, first in kinds if k.slots is not None and first > 0]
        sequence.restore(prefix, max([snapshot.end, *lacking]))

    def save(self, lineage: Lineage, sequence: Sequence, lasting: bool) -> None:
        """Stores a snapshot behind the sequence's rows; in a file as well if it is `lasting`."""
        with self._lock:
            end = len(sequence.tokens)
            # after going back in a window of one token a ring may hold nothing in front of `end`, and need not
            firsts = tuple(min(end, sequence.first_held(k.slots)) for k in self._layout.row_kinds)
            tokens = as_tokens(sequence.tokens)
            try:
                snapshot = lineage.save(tokens, firsts, lambda pieces: self._copy_out(sequence, pieces))
            except MemoryError:  # a reply is worth more than its copy
                self.prefix.books.refused += 1
                return
            if lasting and snapshot is not None and self._writer is not None and not snapshot.on_disk:
                self._writer.add(snapshot, Stored.of(snapshot.root, tokens, snapshot.firsts, self._layout.page_size))

    def record(self, request: Request, reply: Tokens[int]) -> None:
        """Keeps a request for `mimo-edge cache export-trace`, if that was asked for."""
        if self._recorder is not None:
            try:
                self._recorder.add(request.prompt, request.marks, reply)
            except OSError as e:
                log.warning("requests are not recorded any more: %s", e.strerror)
                self._recorder = None

    def _written(self, snapshot: Snapshot) -> None:
        with self._lock:
            self._take_note()
            self.prefix.release(snapshot)
        self._save_usage()

    def _copy_out(self, sequence: Sequence, pieces: tuple[Piece, ...]) -> Rows:
        rows = self._buffers.take(sum(p.nbytes for p in pieces))
        for p in pieces:
            self._backend.read_rows(sequence.slots, p.kind, p.first, p.last, rows[p.at : p.at + p.nbytes])
        return rows

    def _take_note(self) -> None:
        """The books learn which files came and went."""
        if self.disk is None or self.disk.version == self._seen:
            return
        self._seen, files = self.disk.version, {_key(name): s for name, s in self.disk.snapshots.items()}
        known = self.prefix.have.snapshots
        for key, s in list(known.items()):
            on_disk = key in files and files[key].firsts == s.firsts
            if s.on_disk and not on_disk:
                self.prefix.unstore(s)
            s.on_disk = on_disk
        uses = self.disk.usage.entries
        fresh = [(*uses.get(key.hex(), (1.0, 0)), stored) for key, stored in files.items() if key not in known]
        for count, used, stored in sorted(fresh, key=lambda f: -f[1]):
            self.prefix.index(stored.root, stored.tokens, stored.firsts, count, used)

    def flush(self) -> None:
        """Waits until files are written, and remembers the uses of entries there."""
        if self._writer is not None:
            self._writer.flush()
            self._save_usage()

    def _save_usage(self) -> None:
        """Uses of what memory holds are uses of its files: what is hot here is kept there."""
        assert self.disk is not None
        with self._lock:
            known = self.prefix.have.snapshots.values()
            uses = {s.key.hex(): (s.count, s.used) for s in known if s.on_disk}
            totals = self._totals()
            fresh = {name: n - self._noted.get(name, 0) for name, n in totals.items()}
            self._noted = totals
        self.disk.save_usage(self.prefix.clock, uses, fresh)

    def _totals(self) -> dict[str, int]:
        """Counters since the start, by a name of their own."""
        books = asdict(self.prefix.books)
        evicted = {f"evicted from memory: {cause}": n for cause, n in books.pop("evicted").items()}
        disk = {f"disk, {name}": n for name, n in self.disk.counters.items()} if self.disk else {}
        return {**books, **evicted, **disk}

    def close(self) -> None:
        """Not to be called under the lock: the writer needs it to finish."""
        self.flush()
        if self._writer is not None:
            self._writer.close()
        if self._recorder is not None:
            self._recorder.close()

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and bytes by tier."""
        with self._lock:
            have = self.prefix.have
            parts = {"pages": have.page_bytes, "snapshots": have.own_bytes, "bookkeeping": have.index_bytes}
            tiers = {"memory": {"bytes": have.bytes_used, "budget": self.prefix.budget, **parts}}
            if self.disk is not None and self.disk.folder is not None:
                tiers["disk"] = {"bytes": self.disk.folder.used, "budget": self.disk.budget}
            return {"counters": self._totals(), "snapshots": len(have.snapshots), "tiers": tiers}


class _Lost(Exception):
    """A file that was promised cannot be read."""

    def __init__(self, snapshot: Snapshot):
        self.snapshot = snapshot


def _key(name: str) -> bytes:
    return bytes.fromhex(key_in(name))
