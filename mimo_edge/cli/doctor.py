"""mimo-edge doctor: what is wrong with this machine for a bundle, each with the fix."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mimo_edge.cli.common import debug_option

EXAMPLES = """
\b
Examples:
  mimo-edge doctor
  mimo-edge doctor gemma --cache-dir /ssd/mimo-edge
  mimo-edge doctor gemma --json | jq -r '.findings[] | select(.level == "wrong") | .fix'

Exit code: 0 when nothing is wrong (there may be advice), 1 when something is. Nothing is changed, and nothing needs
root.
"""


@click.command(epilog=EXAMPLES)
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option(
    "--cache-dir", type=click.Path(path_type=Path), metavar="DIR",
    help="Folder that the cache will be in; its disk is looked at.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
def doctor(bundle: Path | None, cache_dir: Path | None, as_json: bool) -> None:
    """Say what is wrong with this machine, each thing with its fix.

    With BUNDLE, for that model; without, for the built-in one.
    """
    from mimo_edge.bundle import BUILT_IN
    from mimo_edge.device.checks import examine

    report = examine(bundle=BUILT_IN if bundle is None else bundle, cache_dir=cache_dir)
    if as_json:
        click.echo(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        for name, value in report.facts.items():
            click.echo(f"{name:<12} {value}")
        for finding in report.findings:
            click.secho(f"{finding.level}: {finding.what} ({finding.value})", fg="red" if finding.wrong else "yellow")
            click.echo(f"  fix: {finding.fix}")
        if not report.findings:
            click.secho("nothing is wrong", fg="green")
    if report.wrong:
        click.get_current_context().exit(1)
