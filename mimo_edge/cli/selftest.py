"""mimo-edge selftest: whether a bundle says on this machine what it said where it was exported."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mimo_edge.cli.common import debug_option, progress

EXAMPLES = """
\b
Examples:
  mimo-edge selftest
  mimo-edge selftest gemma --backend cuda
  mimo-edge selftest gemma --json | jq .passed

Exit code: 0 when every token is right, 1 when one is not, 2 when the bundle has no selftest.json.
"""


@click.command(epilog=EXAMPLES)
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option("--backend", default="auto", show_default=True, help="As in mimo-edge run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
def selftest(bundle: Path | None, backend: str, as_json: bool) -> None:
    """Compare greedy tokens with those that the exporter's reference gave.

    Without BUNDLE, of the built-in reference model. Whatever cannot be compared counts as wrong.
    """
    from mimo_edge.bundle import BUILT_IN
    from mimo_edge.selftest import run

    with progress() as report:
        report(None, None, f"testing {bundle or 'the built-in model'}")
        result = run(BUILT_IN if bundle is None else bundle, backend)
    if as_json:
        click.echo(json.dumps(result.to_json(), ensure_ascii=False))
    else:
        for case in result.cases:
            why = "" if case.passed else f" ({case.note or f'tokens behind rows {list(case.wrong)}'})"
            click.echo(f"{'right' if case.passed else 'WRONG'}: {' '.join(case.text.split())}{why}")
        words = "passed" if result.passed else "FAILED"
        click.secho(f"{words} on backend {result.backend}", fg="green" if result.passed else "red")
    if not result.passed:
        click.get_current_context().exit(1)
