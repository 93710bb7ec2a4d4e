"""Strict reading of a config: a missing or wrongly typed field is an error that names file and field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mimo_edge.errors import BadInputError, UnsupportedError

_REQUIRED: Any = object()
_MOST, _MOST_LAYERS = 1 << 31, 10_000
_SPOKEN: dict[Any, str] = {
    int: "an integer",
    (int, float): "a number",
    bool: "true or false",
    str: "a text",
    dict: "an object",
    (list, tuple): "a list",
}


def load_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises BadInputError when it is missing or broken."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(f"{path.name} is missing in {path.parent}") from None
    except (OSError, ValueError) as e:
        raise BadInputError(f"{path}: not readable as JSON ({e})") from None
    if not isinstance(data, dict):
        raise BadInputError(f"{path}: expected an object, got {type(data).__name__}")
    return data


class Fields:
    """A config's fields by name; null counts as absent. Reading without a default makes a field required."""

    def __init__(self, data: Mapping[str, Any], where: str):
        self.data, self.where = data, where

    def has(self, name: str) -> bool:
        return self.data.get(name) is not None

    def integer(self, name: str, default: int = _REQUIRED) -> int:
        value = self._get(name, int, default)
        most = _MOST_LAYERS if name in ("num_hidden_layers", "block_count") else _MOST
        if value is not None and abs(value) > most:  # before something of that size is built
            raise BadInputError(f"{self.where}: {name} {value} is impossible (at most {most})")
        return value

    def number(self, name: str, default: float = _REQUIRED) -> float:
        return float(self._get(name, (int, float), default))

    def flag(self, name: str, default: bool = _REQUIRED) -> bool:
        return self._get(name, bool, default)

    def text(self, name: str, default: str = _REQUIRED) -> str:
        return self._get(name, str, default)

    def items(self, name: str, count: int) -> Sequence[Any]:
        """A list that must have `count` entries."""
        value = self._get(name, (list, tuple), _REQUIRED)
        if len(value) != count:
            raise BadInputError(f"{self.where}: {name} has {len(value)} entries, expected {count}")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids, given as one integer or as a list; absent means none."""
        value = self.data.get(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            raise BadInputError(f"{self.where}: {name} {value!r} must be a token id or a list of them")
        return tuple(values)

    def sub(self, name: str) -> Fields | None:
        value = self._get(name, dict, None)
        return None if value is None else Fields(value, f"{self.where}: {name}")

    def allow(self, name: str, *allowed: Any) -> None:
        """Raises UnsupportedError unless the field is absent or has one of the values that this version can run."""
        if self.has(name) and self.data[name] not in allowed:
            values = " or ".join(map(repr, allowed)) or "nothing"
            raise UnsupportedError(f"{self.where}: {name} {self.data[name]!r} is not supported (supported: {values})")

    def _get(self, name: str, kind: Any, default: Any) -> Any:
        value = self.data.get(name)
        if value is None:
            if default is _REQUIRED:
                raise BadInputError(f"{self.where}: no {name}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise BadInputError(f"{self.where}: {name} {value!r} is not {_SPOKEN[kind]}")
        return value
