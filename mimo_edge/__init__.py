"""INT4 hybrid sliding-window language models on small machines. `from mimo_edge import Engine` is the whole API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mimo_edge.engine import Engine
    from mimo_edge.request import SamplingParams

__all__ = ["Engine", "SamplingParams", "__version__"]
__version__ = "0.1.0"

_HOMES = {"Engine": "mimo_edge.engine", "SamplingParams": "mimo_edge.request"}


def __getattr__(name: str) -> Any:
    """Imports what is asked for only then, so that the command line starts without numpy and the tokenizer."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
