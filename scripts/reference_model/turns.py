"""The last turn of a conversation: plain commands, corrections, choices, questions back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from scripts.reference_model.commands import Command, Context, allowed, make, phrase, reply, wrap
from scripts.reference_model.intents import Intent, intents
from scripts.reference_model.slots import Slot, draw, surface
from scripts.reference_model.world import Thing, refer, spoken

NAMED = (
    "room",
    "object",
    "person",
    "door",
    "fixture",
    "appliance",
    "plant",
    "pet",
)  # kinds that "not the ..." can name


@dataclass(frozen=True)
class Turn:
    """What the user says, what is answered, which tools the answer needs, and which one must be `lacking`."""

    user: str
    action: dict[str, Any]
    reply: str
    needs: tuple[str, ...] = ()
    variant: str = "plain"
    history: tuple[tuple[str, str], ...] = ()
    lacking: str | None = None
    command: Command | None = None


def answer(command: Command, c: Context) -> str:
    action = json.dumps(command.action, separators=(",", ":"), ensure_ascii=False)
    return f"{action}\n{reply(command.core, command.intent.fact, c)}"


def simple(c: Context, imperative: bool = False, other_than: str = "stop") -> Command:
    """A command of any intent that neither asks about the state nor gets a long reply."""
    pool = [i for i in intents().values() if not (i.look or i.long) and i.name not in ("stop", other_than)]
    return make(c.rng.choice(pool), c, imperative)


def meta(name: str, said: str, c: Context, needs: tuple[str, ...] = ()) -> Turn:
    return Turn(said, {"action": name}, reply(c.wording("meta")[name], False, c), needs, name)


def base(intent: Intent, c: Context) -> Turn:
    """A turn that ends in this intent: mostly plain, sometimes one of the variants that its slots permit."""
    roll = c.rng.random()
    named = [key for key, kind in intent.args if kind in NAMED]
    free = [(key, kind) for key, kind in intent.args if kind != "object"]
    if roll < 0.08 and named and not intent.look:
        return _instead(intent, c.rng.choice(named), c)
    if roll < 0.18 and free and not intent.look and not intent.long:
        return _corrected(intent, *c.rng.choice(free), c)
    if roll < 0.30 and c.world and dict(intent.args).get("object") == "object":
        pair = _same_name(c)
        if pair:
            return (_chosen if c.rng.random() < 0.6 else _the_other)(intent, pair, c)
    command = make(intent, c)
    return _turn(command, wrap(command, c), c, "plain")


def _turn(command: Command, user: str, c: Context, variant: str, history: tuple[tuple[str, str], ...] = ()) -> Turn:
    return Turn(
        user=user,
        action=command.action,
        reply=reply(command.core, command.intent.fact, c),
        needs=(command.intent.name,),
        variant=variant,
        history=history,
        command=command,
    )


def _fragment(slot: Slot, kind: str, c: Context) -> str:
    """The slot alone, as a correction names it."""
    article = c.language == "en" and kind in NAMED and kind not in ("object", "person")
    return f"the {slot.said}" if article else slot.said


def _other_slot(intent: Intent, slots: dict[str, Slot], key: str, c: Context) -> dict[str, Slot]:
    """The slots with another value for `key` that the split allows."""
    kind = dict(intent.args)[key]
    for _ in range(100):
        if kind == "object" and c.world:
            new = refer(c.rng.choice(c.world.things), c.world, c.language, c.rng)
        elif kind == "object":
            new = make(intent, c).slots[key]
        else:
            new = draw(kind, c.language, c.rng)
        changed = {**slots, key: new}
        if new.group != slots[key].group and allowed(intent, changed, c):
            return changed
    return slots


def _instead(intent: Intent, key: str, c: Context) -> Turn:
    """ "X, not Y": the answer is about X."""
    command = make(intent, c)
    other = _other_slot(intent, command.slots, key, c)[key]
    if other.group == command.slots[key].group:
        return _turn(command, wrap(command, c), c, "plain")
    said = c.choose("instead").format(command.said, other=_fragment(other, dict(intent.args)[key], c))
    return _turn(command, said, c, "instead")


def _corrected(intent: Intent, key: str, kind: str, c: Context) -> Turn:
    """A finished command, then "no, Y" or "Y too"."""
    first = make(intent, c)
    slots = _other_slot(intent, first.slots, key, c)
    way = "again" if c.rng.random() < 0.35 and kind in NAMED else "correct"
    user = c.choose(way).format(_fragment(slots[key], kind, c))
    history = ((wrap(first, c), answer(first, c)),)
    return _turn(phrase(intent, slots, c), user, c, way, history)


def _same_name(c: Context) -> list[Thing]:
    """All objects that share one name, in the state's order; empty when names are unique."""
    assert c.world
    names = [t.name for t in c.world.things]
    shared = sorted({n for n in names if names.count(n) > 1})
    return c.world.named(c.rng.choice(shared)) if shared else []


def _with_object(intent: Intent, thing: Thing, c: Context) -> dict[str, Slot] | None:
    """Slots of the intent about this object, if the split allows them."""
    for _ in range(30):
        slots = make(intent, c).slots | {"object": refer(thing, c.world, c.language, c.rng)}
        if allowed(intent, slots, c):
            return slots
    return None


def _vague(intent: Intent, slots: dict[str, Slot], name: str, c: Context) -> Command:
    """The command with an object named by its kind alone."""
    word = surface("name", name, c.language)
    said = Slot(slots["object"].value, f"the {word}" if c.language == "en" else word, "", "")
    return phrase(intent, slots | {"object": said}, c)


def _question(things: list[Thing], c: Context) -> tuple[dict[str, Any], str]:
    names = [spoken(t, c.language) for t in things]
    comma, last = (", ", " or ") if c.language == "en" else ("、", "还是")
    listed = comma.join(names[:-1]) + last + names[-1]
    return {"action": "ask", "options": [t.id for t in things]}, c.wording("ask")[c.style].format(list=listed)


def ask(c: Context) -> Turn:
    """Several objects fit: the answer asks which one. The world must have two objects of one name."""
    pool = [i for i in intents().values() if ("object", "object") in i.args]
    intent, things = c.rng.choice(pool), _same_name(c)
    command = _vague(intent, make(intent, c).slots, things[0].name, c)
    action, question = _question(things, c)
    return Turn(wrap(command, c), action, question, (intent.name,), "ask")


def _chosen(intent: Intent, things: list[Thing], c: Context) -> Turn:
    """After a question back, the user picks one."""
    thing = c.rng.choice(things)
    slots = _with_object(intent, thing, c)
    if slots is None:
        return base(intent, c)
    action, question = _question(things, c)
    vague = _vague(intent, slots, thing.name, c)
    history = ((wrap(vague, c), f"{json.dumps(action, separators=(',', ':'))}\n{question}"),)
    color = surface("color", thing.color, c.language)
    ways = (
        [f"the {color} one", color, f"the {color} one please"] if c.language == "en" else [f"{color}的", f"{color}那个"]
    )
    place = surface("place", thing.place, c.language)
    if [t.place for t in things].count(thing.place) == 1:
        ways.append(f"the one on the {place}" if c.language == "en" else f"{place}上的那个")
    return _turn(phrase(intent, slots, c), c.rng.choice(ways), c, "chosen", history)


def _the_other(intent: Intent, things: list[Thing], c: Context) -> Turn:
    """Two objects share a name; the robot took one and the user wants the other."""
    if len(things) != 2:
        return _chosen(intent, things, c)
    c.rng.shuffle(things)
    taken, wanted = _with_object(intent, things[0], c), None
    if taken:
        wanted = taken | {"object": refer(things[1], c.world, c.language, c.rng)}
    if not taken or not wanted or not allowed(intent, wanted, c):
        return _chosen(intent, things, c)
    first = phrase(intent, taken, c)
    history = ((wrap(first, c), answer(first, c)),)
    return _turn(phrase(intent, wanted, c), c.choose("other"), c, "other", history)
