"""The `mimo-edge` command. Heavy libraries are imported inside sub-commands, so that --help is quick."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from mimo_edge import __version__
from mimo_edge.cli.bench import bench
from mimo_edge.cli.build import build
from mimo_edge.cli.cache import cache
from mimo_edge.cli.common import LogLines, Settings, debug_option
from mimo_edge.cli.completion import completion
from mimo_edge.cli.doctor import doctor
from mimo_edge.cli.eval import eval_
from mimo_edge.cli.export import export
from mimo_edge.cli.inspect import inspect
from mimo_edge.cli.plan import plan
from mimo_edge.cli.run import run
from mimo_edge.cli.selftest import selftest
from mimo_edge.errors import MimoEdgeError

EXAMPLES = """
\b
Examples:
  mimo-edge run -p "pick up the red cup"
  mimo-edge export gemma-3-270m.gguf --target cpu -o gemma
  mimo-edge run gemma -p "The old lighthouse"
  mimo-edge run --chat
  mimo-edge inspect gemma

Text and JSON go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 bad input, 3 not supported,
130 interrupted.
"""


@click.group(epilog=EXAMPLES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="mimo-edge", message="%(prog)s %(version)s")
@debug_option
def cli() -> None:
    """INT4 language models with sliding windows, exported once and run on small machines."""


for command in (export, build, run, inspect, plan, doctor, selftest, bench, eval_, cache, completion):
    cli.add_command(command)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits. Whatever fails is one line on stderr, with a traceback only under --debug."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (lives as long as the process)
    signal.signal(signal.SIGTERM, _interrupt)  # what systemd and docker send: end as cleanly as on Ctrl-C
    settings = Settings()
    log = logging.getLogger("mimo_edge")
    log.handlers, log.propagate = [LogLines()], False
    log.setLevel(logging.INFO)
    try:
        sys.exit(cli.main(args=args, prog_name="mimo-edge", standalone_mode=False, obj=settings))
    except click.exceptions.NoArgsIsHelpError as e:  # its message is the whole help
        click.echo(e.format_message(), err=True)
        sys.exit(e.exit_code)
    except click.Abort:  # Ctrl-C
        sys.exit(130)
    except Exception as e:
        if settings.debug:
            traceback.print_exc()
        message, code = describe(e)
        click.echo(f"mimo-edge: error: {' '.join(message.split())}", err=True)
        sys.exit(code)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def describe(error: Exception) -> tuple[str, int]:
    """The line that a user reads about an error, and the exit code."""
    if isinstance(error, MimoEdgeError):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "mimo-edge"
        return f"{error.format_message()} (see `{path} --help`)", error.exit_code
    if isinstance(error, MemoryError):
        return "out of memory: close other programs, or choose a smaller --context", 1
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"no space left on the disk of {error.filename or 'the output'}: free some space", 1
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror, 1
    return f"internal error: {type(error).__name__}: {error}: run again with --debug for the traceback", 1
