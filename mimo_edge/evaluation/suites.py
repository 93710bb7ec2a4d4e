"""What is evaluated: samples out of a suite of the package or a file of JSON lines."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimo_edge.errors import BadInputError

DATA = Path(__file__).parent / "data"
SUITES = {"commands": DATA / "commands.jsonl.xz", "perplexity": DATA / "texts.jsonl.xz"}
FORMS = '{"messages": [...], "action": "...", "reply": "..."} (either may be left out) or {"text": "..."}'


@dataclass(frozen=True)
class Command:
    """A conversation and the answer wanted: one line of action, then a reply; either may be absent."""

    messages: tuple[Mapping[str, str], ...]
    action: str | None = None
    reply: str | None = None
    group: str = ""


@dataclass(frozen=True)
class Suite:
    name: str
    commands: tuple[Command, ...] = ()
    texts: tuple[str, ...] = ()


def load_suite(name: str, limit: int | None = None) -> Suite:
    """Suite `name`, or the file of that name; of it the first `limit` commands and texts.

    Raises BadInputError naming the line that is not a sample, or saying that there are none.
    """
    if name in SUITES:
        data = lzma.decompress(SUITES[name].read_bytes())
    elif Path(name).is_file():
        data = Path(name).read_bytes()
    else:
        raise BadInputError(f"no such suite: {name!r} (allowed: {', '.join(SUITES)}, or a file of JSON lines)")
    if limit is not None and limit < 1:
        raise BadInputError(f"limit {limit} is out of range (allowed: 1 or more)")
    commands: list[Command] = []
    texts: list[str] = []
    for number, line in enumerate(_lines(data, name), start=1):
        if line.strip():
            sample = _sample(line, f"{name}, line {number}")
            (texts if isinstance(sample, str) else commands).append(sample)  # type: ignore[arg-type]
    if not commands and not texts:
        raise BadInputError(f"{name}: the file holds no samples: each line is {FORMS}")
    return Suite(name, tuple(commands[:limit]), tuple(texts[:limit]))


def _lines(data: bytes, name: str) -> list[str]:
    try:
        return data.decode().split("\n")  # JSON may hold other characters that splitlines() takes for line ends
    except UnicodeDecodeError as e:
        raise BadInputError(f"{name}: not UTF-8 at byte {e.start}: give JSON lines, each {FORMS}") from None


def _sample(line: str, where: str) -> Command | str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise BadInputError(f"{where}: not JSON ({e}): each line is {FORMS}") from None
    if isinstance(found, dict) and isinstance(found.get("text"), str) and found["text"]:
        return str(found["text"])
    if isinstance(found, dict) and _conversation(found.get("messages")):
        wanted = found.get("action"), found.get("reply")
        if wanted != (None, None) and all(w is None or (isinstance(w, str) and w) for w in wanted):
            return Command(tuple(found["messages"]), *wanted, group=str(found.get("intent", "")))
    raise BadInputError(f"{where}: not a sample: each line is {FORMS}")


def _conversation(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and len(messages) > 0
        and all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in messages)
    )
