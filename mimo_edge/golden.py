"""Golden tokens: what a bundle's model says behind every token of a few texts, as the exporter's reference found it.

selftest.json in a bundle:

    {"format": 1, "cases": [{"text": "...", "chat": false, "tokens": [2, 651, ...], "best": [...], "margin": [...]}]}

best[i] is the most likely token behind tokens[0..i], margin[i] by how much its logit exceeds the next one's. A backend
that rounds otherwise may prefer another token only where the margin is small: a tie.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from mimo_edge.errors import BadInputError
from mimo_edge.spec import from_json

SELFTEST, FORMAT = "selftest.json", 1


@dataclass(frozen=True)
class Case:
    """`chat`: the text is a user's message, and the tokens those of the chat template around it."""

    text: str
    chat: bool
    tokens: tuple[int, ...]
    best: tuple[int, ...]
    margin: tuple[float, ...]


@dataclass(frozen=True)
class Golden:
    cases: tuple[Case, ...]
    format: int = FORMAT

    def dumps(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @staticmethod
    def read(path: Path) -> Golden:
        """Raises BadInputError on anything that would test less than it seems to."""
        try:
            data = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as e:
            raise BadInputError(f"{path} cannot be read ({e}): export the model again") from None
        if isinstance(data, dict) and data.get("format") != FORMAT:
            raise BadInputError(f"{path}: format {data.get('format')!r}, this version reads {FORMAT}: export again")
        golden = from_json(Golden, data, str(path))
        for case in golden.cases:
            sizes = {len(case.tokens), len(case.best), len(case.margin)}
            if len(sizes) != 1 or not case.tokens or not all(math.isfinite(m) and m >= 0 for m in case.margin):
                raise BadInputError(f"{path}: a case is not whole ({case.text!r}): export the model again")
        if not golden.cases:
            raise BadInputError(f"{path} has no cases: export the model again")
        return golden
