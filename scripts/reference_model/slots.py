"""Slot values: what a command talks about, how a person says it, and how the action and the reply name it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from scripts.reference_model.toml import read_toml

DATA = Path(__file__).parent / "data"
LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Slot:
    """`value` goes into the action's JSON, `said` into the command, `reply` into the spoken reply; `group` decides
    with which other slots it forms a combination that is held out for testing."""

    value: str | int | float
    said: str
    reply: str
    group: str


@functools.cache
def table(name: str) -> dict[str, Any]:
    """data/NAME.toml."""
    return read_toml(DATA / f"{name}.toml")


NUMBERS: dict[str, list[int | float]] = {
    "level": list(range(5, 101, 5)),
    "temp": [t / 2 if t % 2 else t // 2 for t in range(32, 57)],
    "delta": [1, 2, 3, 4, 5],
    "minutes": [*range(1, 31), 35, 40, 45, 50, 55, 60, 70, 75, 80, 90],
    "degrees": list(range(15, 181, 15)),
    "cm": list(range(10, 301, 10)),
    "quantity": list(range(1, 9)),
    "channel": list(range(1, 41)),
    "heat": list(range(120, 251, 10)),
}
ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen""".split()
TENS = ["zero", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def spell(n: int) -> str:
    """English words of 0..99."""
    if n < 20:
        return ONES[n]
    return TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")


def surface(kind: str, key: str, language: str, rng: Random | None = None) -> str:
    """A way to say the vocabulary entry; the first one without `rng`."""
    ways = table("vocab")[kind][key][LANGUAGES.index(language)].split("|")
    return rng.choice(ways) if rng else ways[0]


def keys(kind: str) -> list[str]:
    return list(table("vocab")[kind])


def entry(kind: str, key: str, language: str, rng: Random) -> Slot:
    return Slot(key, surface(kind, key, language, rng), surface(kind, key, language), key)


def draw(kind: str, language: str, rng: Random) -> Slot:
    """A random slot of `kind`: a table of vocab.toml, a number kind, or `time`."""
    if kind == "time":
        return _time(language, rng)
    if kind not in NUMBERS:
        return entry(kind, rng.choice(keys(kind)), language, rng)
    n = rng.choice(NUMBERS[kind])
    words = language == "en" and isinstance(n, int) and n < 100 and rng.random() < 0.2
    return Slot(n, spell(int(n)) if words else str(n), str(n), str(n))


def _time(language: str, rng: Random) -> Slot:
    hour, minute = rng.randrange(24), rng.choice([0, 0, 0, 15, 30, 30, 45, 5 * rng.randrange(12)])
    value = f"{hour:02}:{minute:02}"
    said = rng.choice(_english(hour, minute) if language == "en" else _chinese(hour, minute))
    return Slot(value, said, value, value)


def _english(hour: int, minute: int) -> list[str]:
    half, twelve = ("am" if hour < 12 else "pm"), hour % 12 or 12
    part = "in the morning" if hour < 12 else "in the afternoon" if hour < 18 else "in the evening"
    ways = [f"{hour:02}:{minute:02}", f"{twelve}:{minute:02} {half}"]
    if minute == 0:
        ways += [f"{twelve} {half}", f"{twelve} {half}", f"{ONES[twelve]} {part}"]
    if minute == 30:
        ways.append(f"half past {ONES[twelve]} {part}")
    if minute == 15:
        ways.append(f"quarter past {ONES[twelve]} {part}")
    return ways


def _chinese(hour: int, minute: int) -> list[str]:
    twelve = hour % 12 or 12
    part = "早上" if hour < 12 else "下午" if hour < 18 else "晚上"
    tail = "" if minute == 0 else "半" if minute == 30 else f"{minute}分"
    return [f"{hour:02}:{minute:02}", f"{part}{twelve}点{tail}", f"{part}{twelve}点{tail}"]
