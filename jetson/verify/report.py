"""What was claimed, whether it held, and the report of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["confirmed", "refuted", "not checked", "observed"]


@dataclass(frozen=True)
class Finding:
    """`observed` is for figures that nobody claimed before; `detail` is one line, `data` what it was read from."""

    claim: str
    status: Status
    detail: str
    data: dict[str, Any] = field(default_factory=dict)


def write(folder: Path, facts: dict[str, Any], findings: list[Finding]) -> tuple[Path, Path]:
    """report.json and report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "report.json", folder / "report.md"
    data.write_text(json.dumps({"facts": facts, "findings": [asdict(f) for f in findings]}, indent=1) + "\n")
    rows = [f"| {f.status} | {f.claim} | {_cell(f.detail)} |" for f in findings]
    about = [f"- {name}: {value}" for name, value in facts.items()]
    title, table = "# mimo-edge on this machine", ["| | claim | |", "| --- | --- | --- |"]
    text.write_text("\n".join([title, "", summary(findings), "", *about, "", *table, *rows]) + "\n")
    return data, text


def summary(findings: list[Finding]) -> str:
    order: tuple[Status, ...] = ("confirmed", "refuted", "observed", "not checked")
    return ", ".join(f"{sum(f.status == s for f in findings)} {s}" for s in order)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
