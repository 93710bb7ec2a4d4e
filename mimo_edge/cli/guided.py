"""Options of commands whose reply can be given a form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mimo_edge.errors import BadInputError
from mimo_edge.options import grammar_of


def guided_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Keywords `schema`, `regex` and `grammar`, at most one of which may be given."""
    options = (
        click.option("--schema", metavar="FILE", type=click.Path(), help="The reply is JSON that this schema allows."),
        click.option("--regex", metavar="REGEX", help="The whole reply matches this expression."),
        click.option("--grammar", metavar="FILE", type=click.Path(), help="The reply follows this Lark or GBNF one."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def form_of(schema: str | None, regex: str | None, grammar: str | None) -> dict[str, str]:
    """What was given, as Engine.generate takes it. Raises BadInputError, before a model is loaded."""
    given = {"schema": _read(schema), "regex": regex, "grammar": _read(grammar)}
    grammar_of(**given)
    return {kind: text for kind, text in given.items() if text is not None}


def _read(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise BadInputError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise BadInputError(f"{path}: not UTF-8 at byte {e.start}") from None
