"""mimo-edge plan: whether a model fits a module or this machine, and the most that would."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mimo_edge.cli.caching import Size
from mimo_edge.cli.common import debug_option, drafts_option, progress
from mimo_edge.errors import BadInputError

if TYPE_CHECKING:
    from mimo_edge.device.capacity import GpuMemory
    from mimo_edge.device.footprint import Subject
    from mimo_edge.device.memory import Plan
    from mimo_edge.request import Drafts

EXAMPLES = """
\b
Examples:
  mimo-edge plan gemma --module orin-nano-8gb
  mimo-edge plan ~/models/Qwen3-1.7B --module orin-nx-16gb --context 8192 --sessions 2
  mimo-edge plan gemma --budget 3G --json | jq .largest_context
  mimo-edge plan

Exit code: 0 when it fits, 1 when it does not. Speeds and times are predictions; nothing is measured or allocated.
"""
ORIN = 87


@click.command(epilog=EXAMPLES)
@click.argument("path", metavar="[BUNDLE|SRC]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--module", metavar="NAME", help="Plan for a Jetson module, such as orin-nano-8gb  [default: this machine]"
)
@click.option("--context", type=int, help="Tokens a session  [default: the model's context]")
@click.option("--sessions", type=int, default=1, show_default=True, help="Conversations that are open at once.")
@click.option("--budget", type=Size(), metavar="SIZE", help="Most memory to use, such as 3G.")
@click.option("--cache-bytes", type=Size(), default=None, metavar="SIZE", help="Memory of a prefix cache.")
@click.option(
    "--backend",
    type=click.Choice(["cuda", "onnxruntime"]),
    help="Plan for the GPU or the CPU  [default: the GPU if there is one]",
)
@click.option("--bits", type=click.Choice(["4", "8"]), help="Bits a weight, for a checkpoint that is not exported yet.")
@click.option("--group-size", type=click.Choice(["32", "64", "128"]), help="Weights that share a scale, likewise.")
@drafts_option("Tokens that MTP heads draft: their state takes memory too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@debug_option
def plan(
    path: Path | None,
    module: str | None,
    context: int | None,
    sessions: int,
    budget: int | None,
    cache_bytes: int | None,
    backend: str | None,
    bits: str | None,
    group_size: str | None,
    drafts: Drafts,
    as_json: bool,
) -> None:
    """Say what a model needs, item by item, and whether it fits.

    Of the built-in model, when nothing is named. Of a checkpoint only headers are read: it need not be exported. Also
    takes a spec.json, as in a bundle.
    """
    from mimo_edge.bundle import BUILT_IN
    from mimo_edge.device import capacity, memory, modules
    from mimo_edge.device.footprint import Load

    target = modules.module(module) if module is not None else None
    gpu = None if target is not None or backend == "onnxruntime" else capacity.gpu_memory()
    with progress() as report:
        report(None, None, f"reading {path or 'the built-in model'}")
        subject = _open(BUILT_IN if path is None else path, gpu, bits, group_size)
    backend = backend or (
        "cuda" if target is not None or (gpu is not None and subject.programs is not None) else "onnxruntime"
    )
    if backend == "cuda" and gpu is None and target is None:
        raise BadInputError("no GPU here to plan for: name a module with --module, or use --backend onnxruntime")
    module = module or this_module()
    room = capacity.of_module(target) if target else capacity.of_machine(gpu=gpu if backend == "cuda" else None)
    load = Load(subject.spec.max_context if context is None else context, sessions, cache_bytes or 0)
    load = replace(load, heads=subject.usable_heads(backend, drafts))
    made = memory.plan(subject, backend, room, load, budget, module)
    if as_json:
        click.echo(json.dumps(made.to_json(), ensure_ascii=False))
    else:
        _print(made)
    if not made.fits:
        click.get_current_context().exit(1)


def this_module() -> str | None:
    """The module that this machine is, as its files say; None where it is no Orin."""
    from mimo_edge.device.power import power_mode
    from mimo_edge.device.probe import Machine

    machine = Machine()
    mode = power_mode(machine.system) if machine.jetson else None
    found = machine.module(mode.name if mode else None) if machine.jetson else None
    return found.name if found else None


def _open(path: Path, gpu: GpuMemory | None, bits: str | None, group_size: str | None) -> Subject:
    from mimo_edge.device.subject import open_subject

    number = None if bits is None else int(bits)
    return open_subject(path, gpu.capability if gpu else ORIN, number, None if group_size is None else int(group_size))


def _print(made: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    from mimo_edge.device.memory import megabytes

    console = Console()
    c = made.capacity
    console.print(f"[bold]{made.model}[/] on {c.name}, backend {made.backend}", highlight=False)
    if made.assumed:
        console.print(f"not quantised yet; assumed: {made.assumed}", highlight=False)
    table = Table("item", "bytes", "what it is")
    table.columns[1].justify = "right"
    for item in made.items:
        table.add_row(item.name, megabytes(item.bytes), item.note)
    table.add_section()
    table.add_row("needed", megabytes(made.total), "on the GPU" if c.device_only else "all of it")
    reserve = f"{c.source}, less a reserve of {megabytes(c.reserve)}"
    table.add_row(
        "allowed",
        megabytes(made.limit),
        "the budget, on a CPU less what plans were off by" if made.limit < c.usable else reserve,
    )
    console.print(table)
    console.print(_verdict(made), highlight=False)
    if made.prediction:
        console.print(_prediction(made), highlight=False)


def _verdict(made: Plan) -> str:
    word = "[green]fits[/]" if made.fits else "[red]does not fit[/]"
    what = f"{made.sessions} x {made.context:,} tokens: {word}."
    most = f"{made.largest_context:,} tokens" if made.largest_context else "none"
    return f"{what} Largest context: {most}; most sessions of {made.context:,} tokens: {made.most_sessions:,}."


def _prediction(made: Plan) -> str:
    assert made.prediction is not None
    p = made.prediction
    low, high = p["decode_tok_s"]
    quick, slow = p["load_s"]
    return (
        f"PREDICTIONS, not measurements: {low:,.0f} to {high:,.0f} tokens/s behind {p['context']:,} tokens "
        f"({p['decode_from']}); {quick:,.1f} to {slow:,.1f} s to load ({p['load_from']})."
    )
