"""Optional libraries: a missing one is an error that says what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mimo_edge.errors import UnsupportedError


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Imports inside the block belong to the optional dependencies `extra`. Raises UnsupportedError without them."""
    try:
        yield
    except ModuleNotFoundError as e:
        if (e.name or "mimo_edge").startswith("mimo_edge"):
            raise
        raise UnsupportedError(f"{what} needs {e.name}: run `pip install 'mimo-edge[{extra}]'`") from None
