"""mimo-edge cache: what a cache folder holds and how much it helped."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mimo_edge.cli.caching import FolderName
from mimo_edge.cli.common import debug_option
from mimo_edge.errors import BadInputError, MimoEdgeError

if TYPE_CHECKING:
    from mimo_edge.kv.folder import Folder

EXAMPLES = """
\b
Examples:
  mimo-edge run gemma -p "..." --cache-dir ~/.cache/mimo-edge
  mimo-edge cache stats ~/.cache/mimo-edge
  mimo-edge cache stats ~/.cache/mimo-edge --json | jq .hit_rate
  mimo-edge cache verify ~/.cache/mimo-edge
"""


@click.group(epilog=EXAMPLES)
def cache() -> None:
    """Look after a folder of cached prompts (run --cache-dir)."""


def folder_argument(command: Any) -> Any:
    return click.argument("folder", type=FolderName())(command)


@cache.command()
@folder_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
def stats(folder: Path, as_json: bool) -> None:
    """Show entries and bytes, the share of prompt tokens that were reused, and why entries were evicted."""
    facts = describe(_open(folder))
    if as_json:
        click.echo(json.dumps(facts))
        return
    for model, held in facts["models"].items():
        counts = f"{held['snapshots']} snapshots, {held['pages']} pages, {held['bytes']:,} bytes"
        click.echo(f"model {model}: {counts}")
    click.echo(f"in all: {facts['bytes']:,} bytes")
    rate = "no requests yet" if facts["hit_rate"] is None else f"{facts['hit_rate']:.1%} of prompt tokens reused"
    click.echo(f"since the folder was made: {rate}")
    for name, n in sorted(facts["totals"].items()):
        click.echo(f"  {name}: {n:,}")


def describe(folder: Folder) -> dict[str, Any]:
    """Everything that `stats` shows, as JSON."""
    from mimo_edge.kv.folder import USAGE
    from mimo_edge.kv.usage import Usage

    folder.renew()
    models: dict[str, Counter[str]] = {m: Counter(snapshots=0, pages=0, bytes=0) for m in sorted(folder.models())}
    for name, size in folder.sizes.items():
        held = models[name.split("/")[0]]
        held["snapshots" if name.endswith(".snapshot") else "pages"] += 1
        held["bytes"] += size
    usage = Usage.read(folder.path / USAGE, daily=0)
    asked, reused = usage.totals.get("prompt_tokens", 0), usage.totals.get("reused_tokens", 0)
    return {
        "models": models,
        "bytes": folder.used,
        "requests": usage.totals.get("requests", 0),
        "hit_rate": reused / asked if asked else None,
        "totals": {name: n for name, n in usage.totals.items() if n},
    }


@cache.command()
@folder_argument
@debug_option
def verify(folder: Path) -> None:
    """Read every entry and compare its checksum. What is damaged is removed; the exit code is 1 then."""
    from mimo_edge.kv.tiers import DiskTier

    whole = damaged = strange = 0
    for model in sorted(_open(folder).models()):
        tier = DiskTier(folder, model, budget=1 << 62, daily=0)
        tier.scan()
        damaged += sum(n for name, n in tier.counters.items() if name.startswith("dropped"))
        strange = len(tier.folder.strange) if tier.folder else 0  # of all models
        good, bad = tier.verify()
        whole, damaged = whole + good, damaged + bad
    skipped = f"; {strange} that are no regular files were skipped" if strange else ""
    click.echo(f"{whole} snapshots are whole, {damaged} files or snapshots were not and were removed{skipped}")
    if damaged:
        raise click.exceptions.Exit(1)


@cache.command()
@folder_argument
@debug_option
def clear(folder: Path) -> None:
    """Remove all entries. Processes that use the folder go on, and miss."""
    opened = _open(folder)
    try:
        with opened.locked():
            n = opened.clear()
    except OSError as e:
        raise MimoEdgeError(f"cannot clear {folder}: {e.strerror}") from None
    (folder / "trace.jsonl").unlink(missing_ok=True)
    click.echo(f"removed {n} files")


@cache.command("export-trace")
@folder_argument
@debug_option
def export_trace(folder: Path) -> None:
    """Print recorded requests (run --cache-record) as JSON lines for scripts/replay_trace.py.

    Tokens are renumbered in order of appearance, so that the trace says which requests are alike and not what they say
    in words.
    """
    from mimo_edge.kv.trace import TRACE, renumbered

    _open(folder)
    if not (folder / TRACE).is_file():
        raise BadInputError(f"{folder} has no recorded requests: record some with `mimo-edge run --cache-record`")
    for line in renumbered(folder / TRACE):
        click.echo(line)


def _open(path: Path) -> Folder:
    from mimo_edge.kv.folder import Folder

    if not path.is_dir():
        raise BadInputError(f"{path} is not a folder: name the one given to `mimo-edge run --cache-dir`")
    try:
        return Folder(path)
    except OSError as e:
        raise BadInputError(f"cannot use {path}: {e.strerror}") from None
