"""Traces of requests: what a home robot's agent would send, and recorded ones (`mimo-edge cache export-trace`)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mimo_edge.kv.keys import Tokens, as_tokens

FORMS = ("appended", "before the user message", "after the system prompt")
SYSTEM, LONGEST = 1500, 8000  # tokens: system prompt and tools; where histories stop growing
SESSIONS, TURNS = 50, 30
WORLD, USER = 90, (10, 50)  # tokens of the world state (a fifth of it changes each turn) and of what a person says
BURST = 150  # requests of one kind in the middle, none of which comes back


@dataclass(frozen=True)
class Asked:
    """One request: `marks` as Engine.generate takes them; `kind` is -1 for the burst."""

    session: int
    prompt: Tokens
    reply: Tokens
    marks: tuple[int, ...]
    kind: int = 0


def generate(form: str, seed: int = 0) -> list[Asked]:
    """50 sessions of 30 turns, picked by a Zipf popularity of exponent 1, and a burst after half of them."""
    r = random.Random(seed)
    system = _words(r, SYSTEM)
    sessions = [_session(form, system, i, random.Random(f"{seed} {i}")) for i in range(SESSIONS)]
    left = dict.fromkeys(range(SESSIONS), TURNS)
    requests: list[Asked] = []
    while left:
        if len(requests) == SESSIONS * TURNS // 2:
            requests += [_one_off(system, r) for _ in range(BURST)]
        pick = r.choices(list(left), weights=[1 / (i + 1) for i in left])[0]
        requests.append(next(sessions[pick]))
        left[pick] -= 1
        if not left[pick]:
            del left[pick]
    return requests


def _session(form: str, system: list[int], number: int, r: random.Random) -> Iterator[Asked]:
    """Turns whose history grows from nothing to LONGEST tokens."""
    history: list[int] = []
    world = _words(r, WORLD)
    grown = (LONGEST - SYSTEM) // TURNS  # tokens that a turn adds
    while True:
        world = [t if r.random() > 0.2 else r.randrange(1, 50_000) for t in world]
        user = _words(r, r.randint(*USER))
        reply = _words(r, grown - len(user) - (WORLD if form == "appended" else 0))
        if form == "after the system prompt":
            prompt, mark = [*system, *world, *history, *user], SYSTEM + WORLD + len(history)
        else:
            prompt, mark = [*system, *history, *world, *user], SYSTEM + len(history)
        yield Asked(number, as_tokens(prompt), as_tokens(reply), (mark,), 0)
        history += [*world, *user, *reply] if form == "appended" else [*user, *reply]


def _one_off(system: list[int], r: random.Random) -> Asked:
    return Asked(-1, as_tokens([*system, *_words(r, r.randint(100, 400))]), as_tokens(_words(r, 60)), (SYSTEM,), -1)


def _words(r: random.Random, n: int) -> list[int]:
    return r.choices(range(1, 50_000), k=n)


def read(path: Path) -> list[Asked]:
    """A recorded trace."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [Asked(-1, as_tokens(e["prompt"]), as_tokens(e["reply"]), tuple(e["marks"])) for e in lines]


def whole(asked: Asked) -> Tokens:
    """The rows that are evaluated: the last token of a reply is sampled only."""
    return np.concatenate([asked.prompt, asked.reply[:-1]])
