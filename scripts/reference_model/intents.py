"""Intents as data, and templates as parsed trees."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from scripts.reference_model.slots import DATA, table
from scripts.reference_model.toml import read_toml

META = ("none", "ask", "sequence", "unsupported", "cancel")  # built out of other intents, see dialogue.py
SMALL = frozenset(["a", "an", "the", "my", "your", "our", "please", "now", "me"])
HELD_OUT = 8  # one combination of slot values in so many is for testing only


@dataclass(frozen=True)
class Intent:
    """One table of data/intents/*.toml. args: (key, kind) pairs; train and test: language -> templates."""

    name: str
    args: tuple[tuple[str, str], ...]
    train: dict[str, tuple[str, ...]]
    test: dict[str, tuple[str, ...]]
    core: dict[str, str]
    fact: bool
    look: str | None
    long: str | None

    @property
    def signature(self) -> str:
        """The tool's line in the prompt."""
        return f"{self.name}({', '.join(key for key, _ in self.args)})"

    @property
    def combines(self) -> bool:
        """Whether combinations of its slot values are held out: two slots, or an object (colour and kind)."""
        return len(self.args) > 1 or any(kind == "object" for _, kind in self.args)

    def held_out(self, groups: list[str]) -> bool:
        """Whether this combination of slot values is for testing only."""
        digest = hashlib.blake2b("|".join([self.name, *groups]).encode(), digest_size=4).digest()
        return self.combines and int.from_bytes(digest, "big") % HELD_OUT == 0


def _intent(name: str, t: dict) -> Intent:
    pairs = [a.split(":") if ":" in a else (a, a) for a in t["args"].split()]
    kind = "fact" if "fact" in t else "doing"
    return Intent(
        name=name,
        args=tuple((key, kind) for key, kind in pairs),
        train={"en": tuple(t["en"]), "zh": tuple(t["zh"])},
        test={"en": tuple(t["test_en"]), "zh": tuple(t["test_zh"])},
        core={"en": t[kind], "zh": t[f"{kind}_zh"]},
        fact=kind == "fact",
        look=t.get("look"),
        long=t.get("long"),
    )


@functools.cache
def intents() -> dict[str, Intent]:
    """Every intent by name."""
    found = {}
    for path in sorted((DATA / "intents").glob("*.toml")):
        for name, t in read_toml(path).items():
            found[name] = _intent(name, t)
    return found


@functools.cache
def frequencies() -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Names of all intents, the meta ones too, and their cumulative shares: the n-th has weight 1/n (Zipf)."""
    order = tuple(table("frequency")["order"])
    total, shares = 0.0, []
    for rank in range(1, len(order) + 1):
        total += 1 / rank
        shares.append(total)
    return order, tuple(shares)


@functools.cache
def _parts(template: str) -> tuple[tuple[str, ...], ...]:
    """A template as a row of choices: plain text is a choice of one."""
    return tuple(
        tuple(piece[1:-1].split("|")) if piece.startswith("(") else (piece,)
        for piece in re.split(r"(\([^)]*\))", template)
    )


def expand(template: str, rng: Random, avoid: frozenset[str] = frozenset()) -> str:
    """One sentence of the template: every (a|b|c) chosen, spaces tidied; {slots} stay. Sentences whose plain form is in
    `avoid` are drawn again."""
    while True:
        text = _tidy("".join(rng.choice(choice) if len(choice) > 1 else choice[0] for choice in _parts(template)))
        if not avoid or plain(text) not in avoid:
            return text


def _tidy(text: str) -> str:
    return re.sub(r" +([,.?!])", r"\1", re.sub(r"  +", " ", text)).strip()


def sentences(template: str) -> Iterator[str]:
    """Every sentence of the template."""
    for choice in itertools.product(*_parts(template.lstrip("*"))):
        yield _tidy("".join(choice))


def plain(text: str) -> str:
    """The sentence without articles, possessives, courtesy and punctuation: what must not be shared by the splits."""
    return " ".join(w for w in re.sub(r"[,.?!，。]", " ", text.lower()).split() if w not in SMALL)


@functools.cache
def held_out_sentences() -> frozenset[str]:
    """Plain forms of all sentences that only the test split uses."""
    return frozenset(
        plain(s) for i in intents().values() for templates in i.test.values() for t in templates for s in sentences(t)
    )
