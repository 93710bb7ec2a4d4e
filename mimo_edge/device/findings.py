"""What `mimo-edge doctor` reports: one finding is one thing that is not as it should be, with its value and its fix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Finding:
    """`level` "wrong" makes the exit code 1; "advice" costs speed or memory but not the answer. `code` is for scripts
    and does not change; `fix` is a command, or the least that a person has to do."""

    code: str
    level: Literal["wrong", "advice"]
    what: str
    value: str
    fix: str

    @property
    def wrong(self) -> bool:
        return self.level == "wrong"


@dataclass(frozen=True)
class Report:
    """`facts` are what was looked at, for people; findings come with what is wrong first."""

    facts: dict[str, str]
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> bool:
        return any(f.wrong for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"ok": not self.wrong, "facts": self.facts, "findings": [asdict(f) for f in self.findings]}


def report(facts: dict[str, str], findings: Iterable[Finding]) -> Report:
    return Report(facts, tuple(sorted(findings, key=lambda f: not f.wrong)))


def wrong(code: str, what: str, value: object, fix: str) -> Finding:
    return Finding(code, "wrong", what, str(value), fix)


def advice(code: str, what: str, value: object, fix: str) -> Finding:
    return Finding(code, "advice", what, str(value), fix)
