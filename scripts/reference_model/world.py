"""What the robot knows: objects, lights, temperatures, locks and itself; and how a command refers to an object."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from scripts.reference_model.slots import NUMBERS, Slot, keys, surface

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True)
class Thing:
    """A movable object; `id` is what actions name."""

    id: str
    name: str
    color: str
    place: str
    room: str


@dataclass(frozen=True)
class World:
    """`lights` room -> brightness (0 is off), `temperatures` room -> degrees, `locks` door -> locked."""

    time: str
    day: str
    room: str
    battery: int
    held: Thing | None
    things: tuple[Thing, ...]
    lights: dict[str, int]
    temperatures: dict[str, float]
    locks: dict[str, bool]

    def named(self, name: str) -> list[Thing]:
        return [t for t in self.things if t.name == name]

    @property
    def twins(self) -> bool:
        """Whether two objects share a name."""
        return len({t.name for t in self.things}) < len(self.things)

    def text(self) -> str:
        """The state as the prompt holds it: identifiers only, the same in every language."""
        lines = [f"time {self.time} {self.day}"]
        lines.append(f"robot {self.room} battery {self.battery} holding {self.held.id if self.held else 'nothing'}")
        lines += [f"{t.id} {t.color} {t.place} {t.room}" for t in self.things]
        lines += [f"light {room} {level or 'off'}" for room, level in self.lights.items()]
        lines += [f"temp {room} {degrees}" for room, degrees in self.temperatures.items()]
        lines += [f"lock {door} {'locked' if locked else 'open'}" for door, locked in self.locks.items()]
        return "\n".join(lines)


def make_world(rng: Random, large: bool = False) -> World:
    """A random world; `large` ones feed the long replies."""
    things = _things(rng, rng.randint(9, 14) if large else rng.randint(3, 7))
    many = (lambda low, high: rng.randint(low + 3, high + 3)) if large else rng.randint
    rooms, doors = keys("room"), keys("door")
    return World(
        time=f"{rng.randrange(24):02}:{rng.randrange(60):02}",
        day=rng.choice(DAYS),
        room=rng.choice(rooms),
        battery=rng.randint(5, 100),
        held=rng.choice(things) if rng.random() < 0.3 else None,
        things=things,
        lights={
            r: rng.choice([0, *NUMBERS["level"]]) if rng.random() < 0.6 else 0 for r in rng.sample(rooms, many(2, 4))
        },
        temperatures={r: float(rng.choice(NUMBERS["temp"])) for r in rng.sample(rooms, many(1, 3))},
        locks={d: rng.random() < 0.5 for d in rng.sample(doors, min(many(1, 2), len(doors)))},
    )


def _things(rng: Random, count: int) -> tuple[Thing, ...]:
    """Objects of which some share a name; no two share name and colour, and identifiers differ."""
    names = rng.sample(keys("name"), max(2, count - rng.randint(0, count // 2)))
    taken: set[tuple[str, str]] = set()
    out = []
    for i in range(count):
        name = names[i] if i < len(names) else rng.choice(names)
        color = rng.choice([c for c in keys("color") if (name, c) not in taken])
        digit = rng.choice([d for d in range(1, 10) if (name, str(d)) not in taken])
        taken |= {(name, color), (name, str(digit))}
        out.append(Thing(f"{name}_{digit}", name, color, rng.choice(keys("place")), rng.choice(keys("room"))))
    rng.shuffle(out)
    return tuple(out)


def spoken(thing: Thing, language: str) -> str:
    """How replies name an object."""
    color, name = surface("color", thing.color, language), surface("name", thing.name, language)
    return f"the {color} {name}" if language == "en" else f"{color}的{name}"


def refer(thing: Thing, world: World | None, language: str, rng: Random) -> Slot:
    """A slot for the object. Without a world its value is the phrase itself: there is no identifier to look up."""
    color, name = surface("color", thing.color, language, rng), surface("name", thing.name, language, rng)
    ways = (
        [f"the {color} {name}"] * 2 + [f"my {color} {name}"]
        if language == "en"
        else [f"{color}的{name}", f"{color}{name}"]
    )
    if world:
        same = world.named(thing.name)
        place = surface("place", thing.place, language, rng)
        if len(same) == 1:
            ways.append(f"the {name}" if language == "en" else name)
        if [t.place for t in same].count(thing.place) == 1:
            ways.append(f"the {name} on the {place}" if language == "en" else f"{place}上的{name}")
    value = thing.id if world else f"{thing.color} {thing.name}"
    return Slot(value, rng.choice(ways), spoken(thing, language), f"{thing.name}/{thing.color}")


def look(world: World, what: str, slots: dict[str, Slot], language: str) -> str:
    """The part of the state that a question asks for, in words."""
    en = language == "en"
    if what == "light":
        level = world.lights[str(slots["room"].value)]
        if level:
            return f"on at {level} percent" if en else f"开着，亮度百分之{level}"
        return "off" if en else "关着"
    if what == "lock":
        locked = world.locks[str(slots["door"].value)]
        return ("locked" if locked else "unlocked") if en else ("锁着" if locked else "没有锁")
    if what == "temperature":
        return str(world.temperatures[str(slots["room"].value)])
    if what == "count":
        return str(len(world.named(str(slots["name"].value))))
    if what == "where":
        thing = next(t for t in world.things if t.id == slots["object"].value)
        place, room = surface("place", thing.place, language), surface("room", thing.room, language)
        return f"{place} in the {room}" if en else f"{room}的{place}"
    if what == "holding":
        return spoken(world.held, language) if world.held else ("nothing" if en else "的是空气")
    return {
        "battery": str(world.battery),
        "robot_room": surface("room", world.room, language),
        "time": world.time,
    }[what]
