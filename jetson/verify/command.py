"""Runs mimo-edge the way a user does, and reads what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

LONGEST = 1800  # seconds: engines build for minutes


@dataclass(frozen=True)
class Answer:
    """`data` is the JSON object in the last line of stdout, if there is one; `error` the last line of stderr."""

    code: int
    data: dict[str, Any]
    error: str


def mimo_edge(*arguments: object) -> Answer:
    command = [sys.executable, "-c", "from mimo_edge.cli.main import main; main()", *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired:
        return Answer(1, {}, f"no end after {LONGEST} s")
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        data = json.loads(last)
    except ValueError:
        data = {}
    error = done.stderr.strip().rpartition("\n")[2].removeprefix("mimo-edge: error: ")
    return Answer(done.returncode, data if isinstance(data, dict) else {}, error or f"exit code {done.returncode}")
