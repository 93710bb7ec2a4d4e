"""Whole training and test samples: conversations that end in one command, with everything that the prompt holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from scripts.reference_model import long_replies, turns
from scripts.reference_model.commands import Command, Context, make, reply, wrap
from scripts.reference_model.intents import META, frequencies, intents
from scripts.reference_model.noise import noisy
from scripts.reference_model.slots import table
from scripts.reference_model.world import make_world

CHINESE = 0.15
NO_STATE = 0.08
NO_TOOLS = 0.15
EARLIER = 0.12  # share of conversations with unrelated exchanges before


@dataclass(frozen=True)
class Sample:
    """`history` holds earlier (user, assistant) turns; `user` is the last command; `state` and `tools` may be empty."""

    intent: str
    language: str
    variant: str
    system: str
    tools: tuple[str, ...]
    history: tuple[tuple[str, str], ...]
    user: str
    state: str
    action: str
    reply: str

    @property
    def answer(self) -> str:
        return f"{self.action}\n{self.reply}"


def dumps(action: dict[str, Any]) -> str:
    return json.dumps(action, separators=(",", ":"), ensure_ascii=False)


def make_sample(rng: Random, split: str, name: str | None = None) -> Sample:
    """A sample of the split; `name` fixes the intent, otherwise it is drawn by its frequency."""
    names, shares = frequencies()
    name = name or rng.choices(names, cum_weights=shares)[0]
    intent = intents().get(name)
    system, style, language = _system(rng)
    needs_state = name == "ask" or (intent is not None and bool(intent.look or intent.long))
    world = make_world(rng, large=bool(intent and intent.long))
    while name == "ask" and not world.twins:
        world = make_world(rng)
    c = Context(language, split, style, world if needs_state or rng.random() > NO_STATE else None, rng)
    turn = META_TURNS[name](c) if name in META else turns.base(intents()[name], c)
    earlier = _earlier(c) if rng.random() < EARLIER else ()
    return Sample(
        intent=name,
        language=language,
        variant=turn.variant,
        system=system,
        tools=_tools(turn, rng),
        history=(*earlier, *turn.history),
        user=noisy(turn.user, language, rng),
        state=c.world.text() if c.world else "",
        action=dumps(turn.action),
        reply=_reply(turn, c),
    )


def _system(rng: Random) -> tuple[str, str, str]:
    """(system text, style, language)."""
    language = "zh" if rng.random() < CHINESE else "en"
    words = table("wording")["system"]
    style = rng.choice(list(table("wording")["style_en"]))
    text = rng.choice(words["zh" if language == "zh" and rng.random() < 0.5 else "en"])
    return text.format(name=rng.choice(words["names"]), style=style), style, language


def _reply(turn: turns.Turn, c: Context) -> str:
    text = turn.reply
    return f"{text}\n{long_replies.text(turn.command, c)}" if turn.command and turn.command.intent.long else text


def _tools(turn: turns.Turn, rng: Random) -> tuple[str, ...]:
    """Signatures of the tools on offer: those needed and some others, in alphabetical order."""
    if turn.lacking is None and rng.random() < NO_TOOLS:
        return ()
    others = [i for i in rng.sample(list(intents()), rng.randint(5, 16)) if i != turn.lacking]
    return tuple(intents()[name].signature for name in sorted({*others, *turn.needs}))


def _earlier(c: Context) -> tuple[tuple[str, str], ...]:
    """One or two finished exchanges on other matters."""
    out = []
    for _ in range(c.rng.randint(1, 2)):
        command = turns.simple(c)
        out.append((wrap(command, c), f"{dumps(command.action)}\n{reply(command.core, command.intent.fact, c)}"))
    return tuple(out)


def _none(c: Context) -> turns.Turn:
    command = turns.simple(c, imperative=True)
    return turns.meta("none", c.choose("deny").format(command.said), c, needs=(command.intent.name,))


def _cancel(c: Context) -> turns.Turn:
    command = turns.simple(c)
    history = ((wrap(command, c), turns.answer(command, c)),)
    return replace(turns.meta("cancel", c.choose("cancel"), c, needs=(command.intent.name,)), history=history)


def _unsupported(c: Context) -> turns.Turn:
    command = turns.simple(c)
    return replace(turns.meta("unsupported", wrap(command, c), c), lacking=command.intent.name)


def _sequence(c: Context) -> turns.Turn:
    first: Command = turns.simple(c, imperative=True)
    second: Command = turns.simple(c, imperative=True, other_than=first.intent.name)
    said = c.choose("then").format(first.said, second.said)
    link = ", then " if c.language == "en" else "，然后"
    return turns.Turn(
        user=said,
        action={"action": "sequence", "steps": [first.action, second.action]},
        reply=reply(first.core + link + second.core, False, c),
        needs=(first.intent.name, second.intent.name),
        variant="sequence",
    )


META_TURNS: dict[str, Callable[[Context], turns.Turn]] = {
    "none": _none,
    "ask": turns.ask,
    "sequence": _sequence,
    "unsupported": _unsupported,
    "cancel": _cancel,
}

__all__ = ["Sample", "dumps", "make", "make_sample"]
