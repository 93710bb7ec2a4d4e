"""Whether a backend says on this machine what the exporter's reference said. Whatever cannot be compared is wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mimo_edge.backends import registry
from mimo_edge.backends.base import Backend, Step
from mimo_edge.bundle import TOKENIZER, Bundle
from mimo_edge.errors import BadInputError
from mimo_edge.golden import SELFTEST, Case, Golden
from mimo_edge.kv.layout import KvLayout, SequenceSlots, plan_layout
from mimo_edge.kv.pools import KvPools
from mimo_edge.text import Text

# Logits: what rounding may turn around. onnxruntime rounds activations to 8 bits, a GPU keeps them in float16.
TIE, TIE_8_BITS = 0.1, 0.75
MOST_TIES = 0.25  # of all tokens; a model of which more is undecided cannot be tested so


@dataclass(frozen=True)
class Outcome:
    """Of one case: `ties` tokens differ where the margin is small; at `wrong` rows they differ though it is not."""

    text: str
    compared: int
    ties: int
    wrong: tuple[int, ...]
    note: str = ""

    @property
    def passed(self) -> bool:
        return not self.wrong and not self.note


@dataclass(frozen=True)
class Result:
    backend: str
    tolerance: float
    cases: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        compared = sum(c.compared for c in self.cases)
        few = sum(c.ties for c in self.cases) <= MOST_TIES * compared
        return compared > 0 and few and all(c.passed for c in self.cases)

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def run(path: str | Path, backend: str = "auto") -> Result:
    """Evaluates every case: its first half as a prompt, the rest token by token.

    Raises BadInputError when the bundle has no usable selftest.json, and what loading raises.
    """
    bundle = Bundle.open(path)
    if not bundle.has(SELFTEST):
        raise BadInputError(
            f"{path} has no {SELFTEST}, so nothing can be compared: export the model again with this version"
        )
    golden = Golden.read(bundle.file(SELFTEST))
    text = Text.open(bundle.file(TOKENIZER), bundle.spec, bundle.chat_template)
    loaded = registry.load(backend, bundle)
    try:
        context = min(bundle.spec.max_context, max(len(c.tokens) for c in golden.cases))
        layout = plan_layout(bundle.spec, context, element_bytes=getattr(loaded, "element_bytes", 4))
        loaded.allocate(layout)
        tolerance = TIE_8_BITS if loaded.name == "onnxruntime" else TIE
        cases = tuple(_case(c, loaded, layout, text, tolerance) for c in golden.cases)
        return Result(loaded.name, tolerance, cases)
    finally:
        loaded.close()


def _case(case: Case, backend: Backend, layout: KvLayout, text: Text, tolerance: float) -> Outcome:
    if len(case.tokens) > layout.context:
        return Outcome(case.text, 0, 0, (), f"{len(case.tokens)} tokens are more than the context of {layout.context}")
    tokens = text.encode_chat([{"role": "user", "content": case.text}]) if case.chat else text.encode(case.text)
    if tuple(tokens) != case.tokens:
        return Outcome(case.text, 0, 0, (), "the tokenizer splits the text otherwise")
    slots = KvPools(layout).admit(layout.context)
    half = max(1, len(tokens) // 2)
    ids = np.array(tokens, np.int64)
    chunk = getattr(backend, "chunk", half)
    pieces = [(at, min(at + chunk, half)) for at in range(0, half, chunk)]
    best = [_rows(backend, slots, ids[a:b], a, [b - a - 1] if b == half else []) for a, b in pieces]
    best += [_rows(backend, slots, ids[i : i + 1], i, [0]) for i in range(half, len(ids))]
    return _compare(case, np.concatenate(best), half - 1, tolerance)


def _rows(backend: Backend, slots: SequenceSlots, ids: NDArray[np.int64], start: int, rows: list[int]) -> NDArray:
    """The best tokens behind rows of a step; -1, which is no token, where logits are not finite."""
    [output] = backend.run([Step(slots, start, ids, np.array(rows, np.int64))])
    best = np.where(np.isfinite(output.logits).all(1), output.logits.argmax(1), -1)
    backend.commit([len(ids)])
    return best


def _compare(case: Case, best: NDArray, first: int, tolerance: float) -> Outcome:
    """Rows from `first` on."""
    differ = [first + i for i in np.flatnonzero(best != np.array(case.best[first:]))]
    wrong = tuple(int(i) for i in differ if case.margin[i] >= tolerance or best[i - first] < 0)
    return Outcome(case.text, len(best), len(differ) - len(wrong), wrong)
