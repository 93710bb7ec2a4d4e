"""Replies of 300 tokens and more: reports and plans read out of the state, recipes for a number of people."""

from __future__ import annotations

from scripts.reference_model.commands import Command, Context
from scripts.reference_model.slots import surface, table
from scripts.reference_model.world import Thing, World, spoken

WEEKDAYS = {
    "en": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
    "zh": ["周一", "周二", "周三", "周四", "周五", "周六", "周日"],
}
SHORT = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def text(command: Command, c: Context) -> str:
    """The long part of the reply; the same state and slots give the same text."""
    kind = command.intent.long
    if kind == "recipe":
        return _recipe(str(command.slots["dish"].value), int(command.slots["quantity"].value), c.language)
    assert c.world
    if kind == "plan":
        return _plan(str(command.slots["goal"].value), c.world, c.language)
    return " ".join(_report(c.world, c.language)) if c.language == "en" else "".join(_report(c.world, "zh"))


def _recipe(dish: str, people: int, language: str) -> str:
    r = table("long")["recipe"][dish]
    at = 0 if language == "en" else 1
    parts = [
        f"{part[2] * people} {part[at]}" if language == "en" else f"{part[2] * people}{part[at]}" for part in r["parts"]
    ]
    head = f"You need {', '.join(parts)}." if language == "en" else f"需要{'、'.join(parts)}。"
    return _numbered([head, *r[language]], language)


def _numbered(steps: list[str], language: str) -> str:
    word = "Step {}: " if language == "en" else "第{}步："
    return "\n".join(word.format(i + 1) + step for i, step in enumerate(steps))


def _plan(goal: str, world: World, language: str) -> str:
    """A step for every light, room, door and object of the state, then the occasion's own steps."""
    p = table("long")["plan"][goal]
    en = language == "en"
    steps = [_light_step(room, level, p["light"], en) for room, level in world.lights.items()]
    for room, degrees in world.temperatures.items():
        name = surface("room", room, language)
        steps.append(
            f"Set the {name} from {degrees} to {p['temp']} degrees."
            if en
            else f"把{name}从{degrees}度调到{p['temp']}度。"
        )
    for door, locked in world.locks.items():
        steps.append(_door_step(surface("door", door, language), locked, p["lock"], en))
    steps += [_object_step(t, p["target"], en) for t in world.things]
    return _numbered(steps + p[language], language)


def _light_step(room: str, level: int, wanted: int, en: bool) -> str:
    name = surface("room", room, "en" if en else "zh")
    if level == wanted:
        return f"Leave the {name} light as it is." if en else f"{name}的灯不用动。"
    if wanted == 0:
        return (
            f"Turn off the {name} light, it is at {level} percent." if en else f"关掉{name}的灯，现在是百分之{level}。"
        )
    now = (f"at {level} percent" if level else "off") if en else (f"百分之{level}" if level else "关着")
    return (
        f"Set the {name} light to {wanted} percent, it is {now}."
        if en
        else f"把{name}的灯调到百分之{wanted}，现在{now}。"
    )


def _door_step(name: str, locked: bool, wanted: bool, en: bool) -> str:
    if locked == wanted:
        now = ("locked" if locked else "unlocked") if en else ("锁着" if locked else "没有锁")
        return f"The {name} is {now}, leave it so." if en else f"{name}{now}，不用动。"
    if wanted:
        return f"Lock the {name}." if en else f"锁上{name}。"
    return f"Unlock the {name}." if en else f"打开{name}的锁。"


TARGETS = {
    "cupboard": ("into the cupboard", "橱柜里"),
    "shelf": ("onto the shelf", "架子上"),
    "wardrobe": ("into the wardrobe", "衣柜里"),
    "box": ("into the big box", "大盒子里"),
    "drawer": ("into the drawer", "抽屉里"),
    "bench": ("onto the bench", "长凳上"),
    "basement": ("down to the basement", "地下室里"),
}


def _object_step(t: Thing, target: str, en: bool) -> str:
    language = "en" if en else "zh"
    place, room = surface("place", t.place, language), surface("room", t.room, language)
    if en:
        return f"Take {spoken(t, language)} from the {place} in the {room} and put it {TARGETS[target][0]}."
    return f"把{room}{place}上的{spoken(t, language)}放到{TARGETS[target][1]}。"


def _report(world: World, language: str) -> list[str]:
    en = language == "en"
    day, room = WEEKDAYS[language][SHORT.index(world.day)], surface("room", world.room, language)
    held = spoken(world.held, language) if world.held else ("nothing" if en else "")
    if en:
        out = [
            f"It is {world.time} on {day}.",
            f"I am in the {room} and my battery is at {world.battery} percent.",
            f"I am holding {held}.",
        ]
    else:
        out = [
            f"现在是{day}{world.time}。",
            f"我在{room}，电量百分之{world.battery}。",
            f"我拿着{held}。" if held else "我手里没有东西。",
        ]
    for where, level in world.lights.items():
        name = surface("room", where, language)
        state = (
            (f"on at {level} percent" if level else "off") if en else (f"开着，亮度百分之{level}" if level else "关着")
        )
        out.append(f"The {name} light is {state}." if en else f"{name}的灯{state}。")
    for where, degrees in world.temperatures.items():
        name = surface("room", where, language)
        out.append(f"The {name} is at {degrees} degrees." if en else f"{name}是{degrees}度。")
    for door, locked in world.locks.items():
        name = surface("door", door, language)
        state = ("locked" if locked else "unlocked") if en else ("锁着" if locked else "没有锁")
        out.append(f"The {name} is {state}." if en else f"{name}{state}。")
    for t in world.things:
        place, name = surface("place", t.place, language), surface("room", t.room, language)
        object_ = spoken(t, language)
        out.append(
            f"{object_[0].upper()}{object_[1:]} is on the {place} in the {name}."
            if en
            else f"{object_}在{name}的{place}上。"
        )
    total = len(world.things)
    out.append(f"In total I know {total} objects. That is everything." if en else f"一共有{total}件物品。汇报完毕。")
    return out
