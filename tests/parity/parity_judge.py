"""What counts as equal, and the table of all that was compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from _parity import TIE, TOLERANCE
from parity_models import Model
from parity_scenarios import Outcome

SKIPPED = "skipped"


@dataclass(frozen=True)
class Cell:
    """`error` is that of all logits, ‖out - oracle‖ / ‖oracle‖. `equal` of `tokens` are the oracle's best behind the
    same text; the others' logits are up to `gap` below it. `same` says whether all bits are the cuda backend's."""

    error: float
    equal: int
    tokens: int
    gap: float
    same: bool | None = None

    @property
    def good(self) -> bool:
        return self.error <= TOLERANCE and self.gap < TIE and self.same is not False

    def __str__(self) -> str:
        words = [f"{self.error:.1e}"]
        if self.tokens:
            words.append(f"{self.equal}/{self.tokens}")
        if self.equal < self.tokens:
            words.append(f"(tie, {self.gap:.3f})" if self.gap < TIE else f"(by {self.gap:.3f})")
        if self.same is not None:
            words.append("= cuda" if self.same else "not cuda's bits")
        return " ".join(words) if self.good else "WRONG " + " ".join(words)


def judge(model: Model, outcome: Outcome, bits: Outcome | None = None) -> Cell:
    """`bits` is what must have come out, bit for bit."""
    pairs = [(p.logits, model.logits(p.text, p.rows, p.head, p.held)) for p in outcome.parts]
    assert pairs and all(got.shape == want.shape and np.isfinite(want).all() for got, want in pairs)
    off = sum(float(np.square(got - want, dtype=np.float64).sum()) for got, want in pairs)
    size = sum(float(np.square(want, dtype=np.float64).sum()) for _, want in pairs)
    equal, tokens, gap = 0, 0, 0.0
    for reply in outcome.replies:
        assert reply.tokens
        text = np.append(reply.prompt, reply.tokens).astype(np.int64)
        rows = np.arange(len(reply.prompt) - 1, len(text) - 1)
        want = model.logits(text, rows)
        below = want.max(1) - want[np.arange(len(rows)), reply.tokens]
        equal, tokens = equal + int((below == 0).sum()), tokens + len(rows)
        gap = max(gap, float(below.max()))
    same = None if bits is None else equal_bits(outcome, bits)
    return Cell((off / size) ** 0.5, equal, tokens, gap, same)


def equal_bits(a: Outcome, b: Outcome) -> bool:
    parts = zip(a.parts, b.parts, strict=True)
    return all(np.array_equal(x.logits, y.logits) for x, y in parts) and all(
        x.tokens == y.tokens for x, y in zip(a.replies, b.replies, strict=True)
    )


class Table:
    """Cells, or why there is none, by (model, scenario) and backend."""

    def __init__(self) -> None:
        self.cells: dict[tuple[str, str], dict[str, str]] = {}
        self.reasons: dict[str, None] = {}

    def put(self, model: str, scenario: str, backend: str, cell: object) -> None:
        self.cells.setdefault((model, scenario), {})[backend] = str(cell)

    def skip(self, model: str, scenario: str, backend: str, what: str, why: str) -> None:
        """`what` is the model, scenario or backend that is not there."""
        self.put(model, scenario, backend, SKIPPED)
        self.reasons[f"skipped: {what}: {why}"] = None

    def lines(self, backends: Iterable[str]) -> list[str]:
        names = list(backends)
        rows = [["model", "scenario", *names], ["---"] * (2 + len(names))]
        rows += [[*key, *(cells.get(name, "-") for name in names)] for key, cells in self.cells.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
        return [*table, *self.reasons] if self.cells else list(self.reasons)
