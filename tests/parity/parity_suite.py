"""Everything that was made for the suite, once: models, open backends, outcomes."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parity_judge import Cell, judge
from parity_models import Model
from parity_scenarios import SCENARIOS, Outcome

from mimo_edge.bundle import Bundle
from mimo_edge.errors import UnsupportedError

SAME = {"plugins": "cuda"}  # columns that must have another one's bits
HEADS = "MTP heads, 0 and 3 drafts"


class Missing(Exception):
    """Nothing to compare: `args` are what is not there, and why."""


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, called once for the same arguments; an exception is kept as well: another try would take as long."""

    @functools.cache
    def outcome(*args: Any) -> tuple[Any, Exception | None]:
        try:
            return make(*args), None
        except Exception as e:
            return None, e

    def known(*args: Any) -> Any:
        made, failed = outcome(*args)
        if failed:
            raise failed
        return made

    return known


class Suite:
    """`make` makes a model in a new folder; `backends` open a bundle, with a folder to work in."""

    def __init__(
        self,
        folder: Path,
        make: Callable[[str, Path], Model],
        backends: Mapping[str, Callable[[Bundle, Path], Any]],
    ):
        self._folder, self._make, self._backends = folder, make, backends
        self._opened: list[Any] = []
        self.model, self.backend, self.outcome = map(once, (self._model, self._backend, self._outcome))

    def cell(self, model: str, scenario: str, backend: str) -> Cell:
        """Raises Missing when there is no such model, backend or scenario here."""
        outcome = self.outcome(model, scenario, backend)
        bits = self.outcome(model, scenario, SAME[backend]) if backend in SAME else None
        return judge(self.model(model), outcome, bits)

    def close(self) -> None:
        for backend in self._opened:
            backend.close()

    def _model(self, name: str) -> Model:
        place = self._new_folder(name)
        try:
            return self._make(name, place)
        except LookupError as e:
            raise Missing(name, str(e)) from None

    def _backend(self, model: str, name: str) -> Any:
        try:
            backend = self._backends[name](self.model(model).bundle, self._new_folder(f"{model}, {name}"))
        except UnsupportedError as e:
            raise Missing(name, str(e)) from None
        self._opened.append(backend)
        return backend

    def _outcome(self, model: str, scenario: str, backend: str) -> Outcome:
        made = self.model(model)
        if scenario == HEADS and not made.spec.mtp:
            raise Missing(f"{scenario}, {model}", "the model has no MTP heads")
        opened = self.backend(model, backend)
        return SCENARIOS[scenario](opened, made, self._new_folder(f"{model}, {scenario}, {backend}"))

    def _new_folder(self, name: str) -> Path:
        return Path(tempfile.mkdtemp(prefix="".join(c if c.isalnum() else "-" for c in name), dir=self._folder))
