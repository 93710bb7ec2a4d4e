"""Calibration text: JSON lines, a sample of which is drawn so that no intent is left out.

A line is {"text": ...} or {"messages": [...]}, the latter rendered with the checkpoint's chat template. "action" and
"reply" (either or both) are the answer that follows; "intent" names the stratum. Other keys are ignored.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from mimo_edge.errors import BadInputError
from mimo_edge.text import Text

log = logging.getLogger(__name__)

DEFAULT_TOKENS = 32_768
FEWEST_TOKENS = 512  # less tells nothing about a layer
FEW_SAMPLES = 8  # an intent with fewer lines is warned about
_LONGEST = 1024  # tokens of one sequence; longer text is cut into several
_FLOOR_SHARE = 0.5  # of the tokens, shared evenly by all intents; the rest goes by how often they occur


@dataclass(frozen=True)
class Sample:
    """One sequence of token ids; `intent` is None for general text."""

    ids: tuple[int, ...]
    intent: str | None


def read_calibration(
    path: Path, text: Text, end: Sequence[int], tokens: int | None, *, stratified: bool, seed: int = 0
) -> tuple[Tensor, ...]:
    """Sequences int64 [T] from the file, `tokens` in all (None: DEFAULT_TOKENS, or all there are). `end` ends answers.

    Raises BadInputError when the file is empty, has a line that is not one of the above, or holds fewer tokens than
    asked. Warns, by name, of intents with fewer than FEW_SAMPLES lines.
    """
    samples = _read(path, text, end)
    held = sum(len(s.ids) for s in samples)
    wanted = min(held, DEFAULT_TOKENS) if tokens is None else tokens
    if wanted < FEWEST_TOKENS:
        raise BadInputError(
            f"{path}: {wanted} tokens are too few to calibrate on: give at least {FEWEST_TOKENS} (--calib-tokens)"
        )
    if held < wanted:
        raise BadInputError(f"{path} holds {held} tokens, fewer than --calib-tokens {wanted}: add text or ask for less")
    _warn(path, samples)
    drawn = draw(samples, wanted, stratified=stratified, seed=seed)
    log.info(f"calibration: {len(drawn)} sequences, {sum(len(s.ids) for s in drawn)} tokens of {held} in {path}")
    return tuple(torch.tensor(s.ids) for s in drawn)


def draw(samples: Sequence[Sample], tokens: int, *, stratified: bool, seed: int) -> list[Sample]:
    """At least `tokens` tokens in whole sequences, the same for the same seed.

    Stratified: intents take turns until they share _FLOOR_SHARE of the tokens (the part of lines with an intent),
    so that rare ones get as many samples as frequent ones; the rest is drawn by chance, as all of it is otherwise.
    """
    order = Random(seed).sample(range(len(samples)), len(samples))
    intents: dict[str, list[int]] = defaultdict(list)
    for i in order:
        if (intent := samples[i].intent) is not None:
            intents[intent].append(i)
    with_intent = sum(len(samples[i].ids) for group in intents.values() for i in group)
    held = sum(len(s.ids) for s in samples)
    floor = tokens * _FLOOR_SHARE * with_intent / held if stratified and held else 0
    chosen: dict[int, None] = {}  # in the order drawn
    taken = 0
    turns = (i for turn in range(len(samples)) for group in intents.values() for i in group[turn : turn + 1])
    for source, limit in ((turns, floor), (iter(order), tokens)):
        for i in source:
            if taken >= limit:
                break
            if i not in chosen:
                chosen[i] = None
                taken += len(samples[i].ids)
    return [samples[i] for i in chosen]


def _read(path: Path, text: Text, end: Sequence[int]) -> list[Sample]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON strings may hold other line ends
    except OSError as e:
        raise BadInputError(f"{path}: cannot be read ({e.strerror}): give a file of JSON lines") from None
    except UnicodeDecodeError as e:
        raise BadInputError(f"{path}: not UTF-8 text at byte {e.start}: give a file of JSON lines") from None
    samples = [
        s for n, line in enumerate(lines, 1) if line.strip() for s in _samples(f"{path}, line {n}", line, text, end)
    ]
    if not samples:
        raise BadInputError(f'{path} is empty: give JSON lines, each {{"text": ...}} or {{"messages": [...]}}')
    return samples


def _samples(where: str, line: str, text: Text, end: Sequence[int]) -> list[Sample]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise BadInputError(f'{where} is not JSON ({e}): a line is {{"text": ...}} or {{"messages": [...]}}') from None
    if not isinstance(data, dict) or ("text" in data) == ("messages" in data):
        raise BadInputError(f'{where}: expected an object with either "text" or "messages"')
    for key in ("text", "intent", "action", "reply"):
        if not isinstance(data.get(key, ""), str):
            raise BadInputError(f"{where}: {key!r} must be a string")
    try:
        ids = text.encode(data["text"]) if "text" in data else _conversation(data, text, end)
    except BadInputError as e:
        raise BadInputError(f"{where}: {e}") from None
    pieces = [ids[at : at + _LONGEST] for at in range(0, len(ids), _LONGEST)]
    return [Sample(tuple(piece), data.get("intent")) for piece in pieces]


def _conversation(data: dict[str, Any], text: Text, end: Sequence[int]) -> list[int]:
    messages = data["messages"]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise BadInputError('"messages" must be a list of {"role": ..., "content": ...}')
    ids = text.encode_chat(messages)
    answer = "\n".join(data[key] for key in ("action", "reply") if key in data)
    return ids + (text.encode(answer, special=False) + list(end) if answer else [])


def _is_message(m: Any) -> bool:
    return isinstance(m, dict) and all(isinstance(m.get(key), str) for key in ("role", "content"))


def _warn(path: Path, samples: Sequence[Sample]) -> None:
    counts: dict[str, int] = defaultdict(int)
    for s in samples:
        if s.intent is not None:
            counts[s.intent] += 1
    few = [f"{intent} ({n})" for intent, n in sorted(counts.items()) if n < FEW_SAMPLES]
    if few:
        log.warning(f"{path}: intents with fewer than {FEW_SAMPLES} samples: {', '.join(few)}: add some of each")
