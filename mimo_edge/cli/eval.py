"""mimo-edge eval: how good a bundle is, measured through the engine that runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mimo_edge.cli.common import debug_option, progress
from mimo_edge.extras import needs_extra

if TYPE_CHECKING:
    from mimo_edge.evaluation.results import Commands, Figure, Results

EXAMPLES = """
\b
Examples:
  mimo-edge eval --limit 91
  mimo-edge eval gemma --suite perplexity --plot gemma.png
  mimo-edge eval gemma --suite mine.jsonl --json | jq .texts.perplexity.value

A file holds one JSON object a line: {"messages": [...], "action": "...", "reply": "..."} (action or reply may be left
out; "intent" groups) or {"text": "..."}. Accepted drafts and skipped work also need mimo-edge[export].
"""


@click.command("eval", epilog=EXAMPLES)
@click.argument("bundle", required=False, type=click.Path())
@click.option("--suite", default="commands", show_default=True, help="commands, perplexity, or a file of JSON lines.")
@click.option("--limit", type=int, help="Use the first N commands and texts  [default: all]")
@click.option("--backend", default="auto", show_default=True, help="As for run.")
@click.option("--threads", type=int, help="Processor threads  [default: the backend's choice]")
@click.option("--context", type=int, help="Tokens of KV cache to allocate  [default: the bundle's context]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path), help="Draw the figures, for example as .png.")
@debug_option
def eval_(
    bundle: str | None,
    suite: str,
    limit: int | None,
    backend: str,
    threads: int | None,
    context: int | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Measure a bundle: right actions, replies, perplexity, accepted drafts.

    Without BUNDLE, the built-in reference model. Intervals are 95 % bootstrap intervals over commands, or over pieces
    of text. The suite `commands` takes about ten minutes on two cores; --limit shortens it. Needs mimo-edge[eval]:
    pip install 'mimo-edge[eval]'.
    """
    with needs_extra("eval", "mimo-edge eval"):
        import rouge_score  # noqa: F401
        import sacrebleu  # noqa: F401
    from mimo_edge.bundle import BUILT_IN, Bundle
    from mimo_edge.engine import Engine
    from mimo_edge.evaluation.evaluate import evaluate
    from mimo_edge.evaluation.plot import check_plot, save_plot
    from mimo_edge.evaluation.suites import load_suite

    samples = load_suite(suite, limit)
    if plot is not None:
        check_plot(plot)  # before minutes of work
    path = BUILT_IN if bundle is None else bundle
    with progress() as report:
        report(None, None, f"loading {bundle or 'the built-in model'}")
        with Engine.open(path, backend, max_context=context, threads=threads) as engine:
            results = evaluate(engine, Bundle.open(path, verify=False), samples, report)
    if plot is not None:
        save_plot(results, plot)
    if as_json:
        click.echo(json.dumps(results.to_json(), ensure_ascii=False))
    else:
        show(results)


def show(results: Results) -> None:
    """A table, a line for each sort of rows with every layer's share, then what is missing and why."""
    from rich.console import Console
    from rich.table import Column, Table

    console = Console()
    columns = (Column("", no_wrap=True), "value", "95 % interval", "of")
    table = Table(*columns, title=f"{results.bundle}, {results.suite}, {results.backend}")
    for row in rows(results):
        table.add_row(*row)
    console.print(table, highlight=False)
    for sort, layers in results.skipped.items():
        shares = " ".join(f"{share:.0f}" for share in layers)
        console.print(f"skipped by layer, {sort} rows, %: {shares}", highlight=False, soft_wrap=True)
    for why in results.left_out:
        click.echo(f"mimo-edge: {why}", err=True)


def rows(results: Results) -> Iterator[tuple[str, str, str, str]]:
    """(what, value, interval, of how many) of every figure."""
    if commands := results.commands:
        yield from _command_rows(commands)
    if texts := results.texts:
        yield "perplexity", f"{texts.perplexity.value:.3f}", _interval(texts.perplexity), f"{texts.tokens:,} tokens"
    for kind, drafts in results.drafts.items():
        looping = f" ({drafts.looping} looping left out)" if drafts.looping else ""
        of = f"{drafts.texts} texts{looping}"
        yield f"MTP tokens a step, {kind}", f"{drafts.length.value:.2f}", _interval(drafts.length), of
        by_position = " ".join(f"{100 * share:.0f}" for share in drafts.by_position)
        yield "  accepted by position, %", by_position, "", ""
    for sort, layers in results.skipped.items():
        yield f"blocks skipped, {sort} rows, %", f"{sum(layers) / len(layers):.1f}", "", f"{len(layers)} layers"


def _command_rows(commands: Commands) -> Iterator[tuple[str, str, str, str]]:
    of = f"{commands.count:,} commands"
    figures = {
        "action exact, %": commands.action,
        "reply exact, %": commands.reply,
        "reply ROUGE-L": commands.rouge_l,
    }
    for name, figure in figures.items():
        if figure:
            yield name, f"{figure.value:.2f}", _interval(figure), of
    if commands.bleu is not None:
        yield "reply BLEU", f"{commands.bleu:.2f}", "", of
    if len(commands.groups) > 1:
        for name, (count, share) in sorted(commands.groups.items(), key=lambda item: item[1][1])[:3]:
            yield f"  weakest: {name}", f"{share:.1f}", "", f"{count} commands"


def _interval(figure: Figure) -> str:
    return f"{figure.low:.2f} to {figure.high:.2f}"
