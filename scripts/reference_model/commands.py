"""One command: an intent with its slots, the words a person uses, the action and the core of the reply."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from scripts.reference_model.intents import Intent, expand, held_out_sentences
from scripts.reference_model.slots import Slot, draw, entry, keys, table
from scripts.reference_model.world import Thing, World, look, refer

LOOKED_UP = {"light": "lights", "lock": "locks", "temperature": "temperatures"}


@dataclass(frozen=True)
class Context:
    """What a conversation keeps constant. `world` is None where the prompt holds no state; split is train or test."""

    language: str
    split: str
    style: str
    world: World | None
    rng: Random

    def wording(self, name: str) -> Any:
        return table("wording")[f"{name}_{self.language}"]

    def choose(self, name: str) -> str:
        """A wording template; the test split has its own where wording.toml gives them."""
        held = table("wording").get(f"{name}_test_{self.language}")
        return self.rng.choice(held if self.split == "test" and held else self.wording(name))


@dataclass(frozen=True)
class Command:
    """`said` carries no wrapping such as "could you"; `imperative` tells whether it may get one."""

    intent: Intent
    slots: dict[str, Slot]
    said: str
    imperative: bool
    core: str

    @property
    def action(self) -> dict[str, Any]:
        return {"action": self.intent.name, **{key: self.slots[key].value for key, _ in self.intent.args}}


def make(intent: Intent, c: Context, imperative: bool = False) -> Command:
    """A random command of the split: training never uses a held-out template or combination of slots; testing uses
    held-out templates only, and in half of the cases a held-out combination."""
    wanted = c.split == "test" and c.rng.random() < 0.5
    for _ in range(200):
        slots = {key: _draw(kind, intent, c) for key, kind in intent.args}
        if allowed(intent, slots, c, wanted):
            return phrase(intent, slots, c, imperative)
    return phrase(intent, slots, c, imperative)  # a world without a held-out combination: other words, other slots


def allowed(intent: Intent, slots: dict[str, Slot], c: Context, wanted: bool = False) -> bool:
    """Whether the split may use these slots; `wanted` asks for a held-out combination."""
    groups = [s.group for s in slots.values()]
    if len(set(groups)) < len(groups):
        return False
    held = intent.held_out(groups)
    return held or not (wanted and intent.combines) if c.split == "test" else not held


def phrase(intent: Intent, slots: dict[str, Slot], c: Context, imperative: bool = False) -> Command:
    """The command in words."""
    templates = (intent.test if c.split == "test" else intent.train)[c.language]
    plain = [t for t in templates if not t.startswith(("*", "don't", "no "))]
    template = c.rng.choice(plain if imperative and plain else templates)
    avoid = frozenset() if c.split == "test" else held_out_sentences()
    said = expand(template.lstrip("*"), c.rng, avoid).format(**{k: s.said for k, s in slots.items()})
    value = look(c.world, intent.look, slots, c.language) if intent.look and c.world else ""
    core = intent.core[c.language].format(value=value, **{k: s.reply for k, s in slots.items()})
    return Command(intent, slots, said, not template.startswith("*") and not intent.fact, core)


def _draw(kind: str, intent: Intent, c: Context) -> Slot:
    if kind == "object":
        return refer(_thing(c), c.world, c.language, c.rng)
    if intent.look and c.world:
        if kind == "name" and c.rng.random() < 0.8:
            return entry(kind, c.rng.choice(c.world.things).name, c.language, c.rng)
        if intent.look in LOOKED_UP:
            return entry(kind, c.rng.choice(list(getattr(c.world, LOOKED_UP[intent.look]))), c.language, c.rng)
    return draw(kind, c.language, c.rng)


def _thing(c: Context) -> Thing:
    if c.world:
        return c.rng.choice(c.world.things)
    pick = c.rng.choice
    return Thing("", pick(keys("name")), pick(keys("color")), pick(keys("place")), pick(keys("room")))


def wrap(command: Command, c: Context) -> str:
    """The command as a person addresses it to the robot."""
    if not command.imperative:
        return command.said
    return c.rng.choice(c.wording("wrap")).format(command.said)


def reply(core: str, fact: bool, c: Context) -> str:
    """The spoken reply in the style that the system prompt asks for."""
    template = c.wording("style")[c.style]["fact" if fact else "doing"]
    return template.format(core=core, Core=core[:1].upper() + core[1:])
