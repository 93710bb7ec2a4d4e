"""Memory that a process takes: this one by what the kernel says, a child's of a GPU by what its driver has less of."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _bench import refuse

from mimo_edge.backends.cuda_driver import Driver

PAUSE_S = 0.001  # between two looks at the driver


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), 0)


def run_child(command: Sequence[str]) -> dict[str, Any]:
    """What a child says on its last line."""
    out = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


class Watcher:
    """Watches what children take of a GPU with memory of its own, which nothing else uses. The figures are the whole
    GPU's; `free` is what there was when nothing ran but this process."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.free = self.driver.memory()[0]

    def run(self, command: Sequence[str]) -> tuple[dict[str, Any], int]:
        """What the child says, and the most bytes that were missing while it lived."""
        self._settle()
        with self._watch() as least:
            said = run_child(command)
        return said, self.free - least[0]

    def _settle(self) -> None:
        """Waits until the last child's memory is back."""
        for _ in range(100):
            if self.driver.memory()[0] >= self.free:
                return
            time.sleep(0.05)
        refuse(f"{(self.free - self.driver.memory()[0]) / 1e6:,.1f} MB of the GPU are in use: stop what uses them")

    @contextmanager
    def _watch(self) -> Iterator[list[int]]:
        least, stop, failed = [self.free], threading.Event(), list[Exception]()

        def look() -> None:
            try:
                self.driver.enter()
                while not stop.wait(PAUSE_S):
                    least[0] = min(least[0], self.driver.memory()[0])
            except Exception as e:  # a peak that was not watched is no measurement
                failed.append(e)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield least
        finally:
            stop.set()
            thread.join()
        if failed:
            raise failed[0]
