"""Recorded requests, to replay them against other policies and budgets (scripts/replay_trace.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from mimo_edge.disk import check_regular, open_file

TRACE = "trace.jsonl"
LONGEST = 64 << 20  # bytes; nothing is recorded beyond


class Recorder:
    """Appends one line a request. Raises OSError."""

    def __init__(self, folder: Path):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = os.open(folder / TRACE, flags, 0o600)
        try:
            check_regular(self._fd)
        except OSError:
            self.close()
            raise

    def add(self, prompt: Sequence[int], marks: Sequence[int], reply: Sequence[int]) -> None:
        """The tokens of a request and of its reply; `marks` as Engine.generate takes them."""
        line = json.dumps({"prompt": list(prompt), "marks": list(marks), "reply": list(reply)}) + "\n"
        if os.fstat(self._fd).st_size + len(line) <= LONGEST:
            os.write(self._fd, line.encode())

    def close(self) -> None:
        os.close(self._fd)


def renumbered(path: Path) -> Iterator[str]:
    """The lines with tokens numbered in order of appearance; lines that were cut off are left out. Raises OSError."""
    numbers: dict[int, int] = {}
    with open_file(path) as file:
        for line in file:
            try:
                entry = json.loads(line)
                for part in ("prompt", "reply"):
                    entry[part] = [numbers.setdefault(int(t), len(numbers)) for t in entry[part]]
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
            yield json.dumps(entry)
