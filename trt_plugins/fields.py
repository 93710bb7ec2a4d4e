"""An op's fields as a node's attributes and as a plugin's serialised fields, and back, checked.

Whole numbers are integers, lists of them arrays. Real numbers travel as text: float32, which TensorRT has for them,
would change constants of kernels and so which compiled kernel is meant.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from mimo_edge.errors import BadInputError
from mimo_edge.trt_plugins.op import Op

Value = int | str | tuple[int, ...]


def kinds(op: type[Op]) -> dict[str, type]:
    """Field -> int, float, str or tuple (of int)."""
    if op not in _kinds:
        _kinds[op] = _read_kinds(op)
    return _kinds[op]


_kinds: dict[type[Op], dict[str, type]] = {}  # reading annotations is slow


def _read_kinds(op: type[Op]) -> dict[str, type]:
    hints = typing.get_type_hints(op)
    return {f.name: tuple if isinstance(hints[f.name], types.GenericAlias) else hints[f.name] for f in fields(op)}


def encode(op: Op) -> dict[str, Value]:
    """Attributes of the op's node."""
    values = {f.name: getattr(op, f.name) for f in fields(op)}
    return {name: repr(float(v)) if kinds(type(op))[name] is float else v for name, v in values.items()}


def decode(op: type[Op], name: str, data: Mapping[str, Any]) -> Op:
    """The op of the node `name`, from what TensorRT hands over: arrays, or bytes for text.

    Raises BadInputError, one line naming node and field, when a field is missing or cannot be right.
    """
    values = {}
    for field, kind in kinds(op).items():
        if field not in data or data[field] is None:
            raise BadInputError(f"{_at(op, name)}: field {field} is missing: export the model again")
        try:
            values[field] = _value(kind, data[field])
        except (ValueError, TypeError) as e:
            raise BadInputError(
                f"{_at(op, name)}: field {field} is no {_WORDS[kind]} ({e}): export the model again"
            ) from None
    try:
        return op(**values)
    except ValueError as e:
        raise BadInputError(f"{_at(op, name)}: field {e}: export the model again") from None


_WORDS = {int: "whole number", float: "number in text", str: "text", tuple: "list of whole numbers"}


def _at(op: type[Op], name: str) -> str:
    return f"plugin {op.kind}, node {name}"


def _value(kind: type, raw: Any) -> Any:
    if kind in (float, str):
        text = raw if isinstance(raw, str) else bytes(np.asarray(raw, np.int8).tobytes()).decode()
        text = text.rstrip("\0")
        return float(text) if kind is float else text
    array = np.atleast_1d(np.asarray(raw))
    if array.dtype.kind != "i":
        raise ValueError(f"type {array.dtype}")
    if kind is int:
        if array.size != 1:
            raise ValueError(f"{array.size} numbers")
        return int(array[0])
    return tuple(int(x) for x in array)
