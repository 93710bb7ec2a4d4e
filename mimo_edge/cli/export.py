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
  mimo-edge export ~/models/Qwen3-1.7B --target orin -o qwen --max-context 8192
  mimo-edge export ~/models/Qwen3-1.7B --target cpu -o qwen --bits 4 --group-size 64
  mimo-edge export qwen --target orin --target sm_90 -o qwen-gpu
  mimo-edge export gemma-3-270m.gguf -o gemma --calib text.jsonl
  mimo-edge export gemma-3-270m.gguf -o gemma --calib text.jsonl --gates 32 --skip 0.2

Calibration text is JSON lines, each {"text": ...} or {"messages": [{"role": ..., "content": ...}, ...]}; the answer may
follow in "action" and "reply", and "intent" names what kind of request it is. Use text like that which the model will
see, of at least some 10,000 tokens. None is shipped: the exporter's own two texts are what the loss is measured on.

Gates are trained on the calibration text; gates.json in the bundle holds the curve of quality against skipped work.

Without --bits and --group-size, each kind of tensor gets the fewest bits that keep the loss of quality, measured on
two texts, within the budget.
"""


@click.command(epilog=EXAMPLES)
@click.argument("src", type=click.Path())
@click.option(
    "--target",
    multiple=True,
    default=("cpu",),
    show_default=True,
    help="cpu, or a GPU to compile kernels for as well: orin, sm_87, sm_90, ...; may be given again.",
)
@click.option("-o", "--out", required=True, type=click.Path(), help="Folder to create; it must not exist.")
@click.option("--bits", type=click.Choice(["4", "8"]), help="Bits a weight, the same for all tensors.")
@click.option("--group-size", type=click.Choice(["32", "64", "128"]), help="Weights that share a scale.")
@click.option("--quality-budget", type=float, help="Perplexity that may be lost: 0.05 is 5 %  [default: 0.09]")
@click.option("--allow-coarse-groups", is_flag=True, help="Allow 4-bit groups above 32 below 1B parameters.")
@click.option("--calib", type=click.Path(), metavar="FILE.jsonl", help="Calibrate on this text: less loss at 4 bits.")
@click.option("--calib-tokens", type=int, help="Tokens of it to use  [default: 32768, or all there are]")
@click.option(
    "--gates", type=click.Choice(["16", "32", "64"]), help="Skip feed-forward work in blocks of so many channels."
)
@click.option("--skip", type=float, help="With --gates: share of feed-forward work to skip, 0.2 is 20 %.")
@click.option("--gate-loss", type=float, help="With --gates: skip as much as loses at most this share of perplexity.")
@click.option("--max-context", type=int, help="Context of the bundle, in tokens  [default: the checkpoint's]")
@debug_option
def export(
    src: str, out: str, target: tuple[str, ...], bits: str | None, group_size: str | None, **options: Any
) -> None:
    """Turn a checkpoint into a bundle.

    SRC is a Hugging Face folder or a .gguf file; or a bundle, to copy it with kernels for a GPU. On any error, and on
    Ctrl-C, nothing is left behind.
    """
    budget = options.pop("quality_budget")
    if budget is not None and (bits or group_size):
        raise click.UsageError("--quality-budget chooses bits and groups by itself: leave --bits and --group-size out")
    if options["calib_tokens"] is not None and not options["calib"]:
        raise click.UsageError("--calib-tokens says how much of --calib to use: give --calib too")
    block, skip, loss = (options.pop(name) for name in ("gates", "skip", "gate_loss"))
    if block is None and (skip is not None or loss is not None):
        raise click.UsageError("--skip and --gate-loss say how much gates skip: give --gates 32 too")
    with needs_extra("export", "export"):
        from mimo_edge.export import pipeline
    if block is not None:
        options["gates"] = pipeline.GateRequest(int(block), skip, loss)
    if bits or group_size:
        options["quant"] = pipeline.uniform(int(bits or 4), int(group_size or 32))
    elif budget is not None:
        options["budget"] = budget
    with progress() as report:
        bundle = pipeline.export_bundle(src, out, target=target, progress=report, **options)
    size = sum(f.bytes for f in bundle.manifest.files.values())
    click.echo(f"mimo-edge: wrote {out}: {bundle.manifest.name}, {size / 1e6:,.0f} MB", err=True)
    how = "--chat" if bundle.chat_template else "-p 'Once upon a time'"
    click.echo(f"mimo-edge: next: mimo-edge run {out} {how}", err=True)
