"""What sub-commands share: the --debug option, and what is written on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from mimo_edge.errors import BadInputError
from mimo_edge.spec import MAX_DRAFTS


@dataclass
class Settings:
    """Choices that hold for the whole command line."""

    debug: bool = False


def _set_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        ctx.find_object(Settings).debug = True  # type: ignore[union-attr]


def debug_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """--debug, accepted before and after the name of a sub-command."""
    option = click.option(
        "--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Show tracebacks of errors."
    )
    return option(command)


def _drafts(_: click.Context, option: click.Parameter, value: str) -> str | int:
    if value == "auto":
        return value
    if value.isascii() and value.isdigit() and int(value) <= MAX_DRAFTS:
        return int(value)
    raise BadInputError(f"drafts {value!r} is out of range (allowed: auto, 0 to {MAX_DRAFTS})")


def drafts_option(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--drafts: "auto" or a number."""
    return click.option("--drafts", metavar="N", default="auto", show_default=True, callback=_drafts, help=help)


@contextmanager
def progress() -> Iterator[Callable[[int | None, int | None, str], None]]:
    """Bars on stderr while the block runs, one for each `what`: call it with (done, total, what), None for unknown.

    Nothing is drawn when stderr is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    tasks: dict[str, Any] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def report(done: int | None, total: int | None, what: str) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report


class LogLines(logging.Handler):
    """One line on stderr a record; above a progress bar, which takes sys.stderr over while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"mimo-edge: {self.format(record)}", file=sys.stderr, flush=True)


def note(text: str) -> None:
    """A line for the person at the terminal; scripts do not see it."""
    if sys.stderr.isatty():
        click.secho(text, dim=True, err=True)
