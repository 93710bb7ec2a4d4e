"""What an evaluation found, as plain data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A value with its 95 % bootstrap interval over the samples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Commands:
    """Shares in percent; BLEU and ROUGE-L from 0 to 100. None where the suite wants no action, or no reply."""

    count: int
    action: Figure | None
    reply: Figure | None
    rouge_l: Figure | None
    bleu: float | None
    groups: dict[str, tuple[int, float]]  # of each intent: number of commands, percent of right actions


@dataclass(frozen=True)
class Texts:
    count: int
    tokens: int
    perplexity: Figure


@dataclass(frozen=True)
class Drafts:
    """Of `texts` replies or continuations: mean tokens a verification step yields, and the share of steps in which the
    draft of position i and all before it were accepted. `looping` texts were left out."""

    texts: int
    looping: int
    tokens: int
    length: Figure
    by_position: tuple[float, ...]


@dataclass(frozen=True)
class Results:
    """`drafts` by kind: commands, greedy, sampled. `skipped` by kind of rows (prompt, answer, text): percent of
    feed-forward blocks that each gated layer skips. `left_out` says why something is missing."""

    bundle: str
    backend: str
    suite: str
    commands: Commands | None
    texts: Texts | None
    drafts: dict[str, Drafts]
    skipped: dict[str, tuple[float, ...]]
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
