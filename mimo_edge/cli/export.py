"""mimo-edge export: a checkpoint becomes a bundle."""

from __future__ import annotations

from typing import Any

import click

from mimo_edge.cli.common import debug_option, progress
from mimo_edge.extras import needs_extra

EXAMPLES = """
\b
Examples:
  mimo-edge export gemma-3-270m.gguf --target cpu -o gemma
  mimo-edge export ~/models/Qwen3-1.7B --target cpu -o qwen --max-context 8192
  mimo-edge export ~/models/Qwen3-1.7B --target cpu -o qwen --bits 4 --group-size 64

Without --bits and --group-size, each kind of tensor gets the fewest bits that keep the loss of quality, measured on
two texts, within the budget.
"""


@click.command(epilog=EXAMPLES)
@click.argument("src", type=click.Path())
@click.option("--target", default="cpu", show_default=True, help="What the bundle is for.")
@click.option("-o", "--out", required=True, type=click.Path(), help="Folder to create; it must not exist.")
@click.option("--bits", type=click.Choice(["4", "8"]), help="Bits a weight, the same for all tensors.")
@click.option("--group-size", type=click.Choice(["32", "64", "128"]), help="Weights that share a scale.")
@click.option("--quality-budget", type=float, help="Perplexity that may be lost: 0.05 is 5 %  [default: 0.09]")
@click.option("--allow-coarse-groups", is_flag=True, help="Allow 4-bit groups above 32 below 1B parameters.")
@click.option("--max-context", type=int, help="Context of the bundle, in tokens  [default: the checkpoint's]")
@debug_option
def export(src: str, out: str, target: str, bits: str | None, group_size: str | None, **options: Any) -> None:
    """Turn a checkpoint into a bundle.

    SRC is a Hugging Face folder or a .gguf file. On any error, and on Ctrl-C, nothing is left behind.
    """
    budget = options.pop("quality_budget")
    if budget is not None and (bits or group_size):
        raise click.UsageError("--quality-budget chooses bits and groups by itself: leave --bits and --group-size out")
    with needs_extra("export", "export"):
        from mimo_edge.export import pipeline
    if bits or group_size:
        options["quant"] = pipeline.uniform(int(bits or 4), int(group_size or 32))
    elif budget is not None:
        options["budget"] = budget
    with progress() as report:
        bundle = pipeline.export_bundle(src, out, target=target, progress=report, **options)
    size = sum(f.bytes for f in bundle.manifest.files.values())
    click.echo(f"mimo-edge: wrote {out}: {bundle.manifest.name}, {size / 1e6:,.0f} MB", err=True)
    click.echo(f"mimo-edge: next: mimo-edge run {out} -p 'Once upon a time'", err=True)
