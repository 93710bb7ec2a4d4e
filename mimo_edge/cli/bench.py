"""mimo-edge bench: how quick a bundle is here, beside what the machine's memory allows."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mimo_edge.cli.common import debug_option, drafts_option, progress
from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.extras import needs_extra

if TYPE_CHECKING:
    from mimo_edge.backends.base import Backend
    from mimo_edge.bundle import Bundle
    from mimo_edge.kv.layout import KvLayout
    from mimo_edge.request import Drafts

EXAMPLES = """
\b
Examples:
  mimo-edge bench
  mimo-edge bench gemma --backend cuda --plot roofline.svg
  mimo-edge bench --random-weights mimo-7b.json --backend cuda
  mimo-edge bench gemma --predict orin-nano-8gb

Nothing is reported unless the logits are right. The last line is one JSON object.
"""
_COMPARED = 1_000_000_000  # weights up to which another backend checks the logits; it runs on the CPU


@click.command(epilog=EXAMPLES)
@click.argument("bundle", required=False, type=click.Path())
@click.option("--random-weights", metavar="SPEC", type=click.Path(), help="Instead of a bundle: a spec.json's shape.")
@click.option("--backend", default="auto", show_default=True, help="As in mimo-edge run.")
@click.option("--context", type=int, help="Tokens of KV cache to allocate  [default: the bundle's, at most 8448]")
@click.option(
    "--depth", type=int, default=256, show_default=True, help="Committed rows behind which decoding is timed."
)
@click.option("--steps", type=int, default=32, show_default=True, help="Steps whose median is one repeat.")
@click.option("--repeats", type=int, default=5, show_default=True, help="Repeats that the median is taken of.")
@drafts_option("MTP heads whose drafts are timed, 0 to 3, or auto: all that there are.")
@click.option("--plot", type=click.Path(path_type=Path), help="Write the roofline to this .svg file.")
@click.option("--predict", metavar="MODULE", help="Measure nothing; state what a module's memory allows.")
@debug_option
def bench(
    bundle: str | None,
    random_weights: str | None,
    backend: str,
    context: int | None,
    depth: int,
    steps: int,
    repeats: int,
    drafts: Drafts,
    plot: Path | None,
    predict: str | None,
) -> None:
    """Time decoding, prompts and memory of a bundle.

    Without BUNDLE, of the built-in reference model.
    """
    for name, value in (("depth", depth), ("steps", steps), ("repeats", repeats)):
        if not 1 <= value <= 1_000_000:
            raise BadInputError(f"--{name} {value} is out of range (allowed: 1 to 1000000)")
    if bundle and random_weights:
        raise click.UsageError("give a BUNDLE or --random-weights, not both")
    if plot is not None and plot.suffix != ".svg":
        raise BadInputError(f"--plot {plot}: the roofline is written as .svg")
    if predict is not None:
        if plot is not None:
            raise click.UsageError("--predict measures nothing to plot: leave --plot out")
        _predict(bundle, random_weights, predict, depth)
        return
    with _opened(bundle, random_weights, backend) as opened:
        _measure(opened, backend, context, depth, steps, repeats, drafts, plot)


def _predict(bundle: str | None, spec_file: str | None, module: str, depth: int) -> None:
    from mimo_edge import roofline
    from mimo_edge.bundle import BUILT_IN, Bundle
    from mimo_edge.spec import read_spec

    spec = read_spec(Path(spec_file)) if spec_file else Bundle.open(bundle or BUILT_IN, verify=False).spec
    result = roofline.predict(spec, module, depth)
    low, high = result["decode_tok_s"]
    click.echo(f"PREDICTION for {module}, not a measurement: {low:,.0f} to {high:,.0f} tokens/s at {depth} tokens")
    click.echo(json.dumps(result))


def _measure(
    bundle: Bundle,
    name: str,
    context: int | None,
    depth: int,
    steps: int,
    repeats: int,
    drafts: Drafts,
    plot: Path | None,
) -> None:
    from mimo_edge import bench as measuring
    from mimo_edge import roofline
    from mimo_edge.backends import registry
    from mimo_edge.decoding.mtp import check_drafts, usable_heads
    from mimo_edge.kv.layout import plan_layout, resolve_context
    from mimo_edge.params import count

    spec = bundle.spec
    tokens = resolve_context(
        spec, context if context is not None else min(spec.max_context, max(measuring.PREFILL) + 256)
    )
    check_drafts(drafts)
    need = depth + steps + measuring.DRAFT_ROWS
    if need > tokens:
        raise BadInputError(f"--depth {depth} and --steps {steps} need {need} tokens, the context is {tokens}")
    with progress() as report:
        report(None, None, "loading")
        backend = registry.load(name, bundle)
        try:
            heads, _ = usable_heads(spec, backend, drafts)
            chunk = getattr(backend, "chunk", measuring.CHUNK)
            layout = plan_layout(spec, tokens, 1, getattr(backend, "element_bytes", 4), heads=heads, chunk=chunk)
            device = measuring.device_of(backend)
            backend.allocate(layout)
            meter = measuring.Bench(spec, backend, layout)
            report(None, None, "checking logits")
            other = _other(bundle, backend, layout) if count(spec) <= _COMPARED else None
            error = meter.check(other)
            report(None, None, "measuring")
            results, points = meter.measure(depth, steps, repeats)
            results |= {"memory": getattr(backend, "memory", dict)(), "host": _host(backend)}
        finally:
            backend.close()
    about = {"backend": backend.name, "device": device.name, "bandwidth_gb_s": device.bandwidth / 1e9}
    checked = {"logits_error": error, "compared_with": other.name if other else "itself in other steps"}
    for p in points:
        floor = p.step.floor_s(device)
        results.setdefault("points", []).append(
            {"name": p.name, "ms": 1e3 * p.seconds, "floor_ms": 1e3 * floor, "floor_share": floor / p.seconds}
        )
        click.echo(f"{p.name:<18} {1e3 * p.seconds:9.3f} ms   floor {1e3 * floor:9.3f} ms   {floor / p.seconds:6.1%}")
    if draft := results.get("draft"):
        what = f"{draft['heads']} drafts"
        click.echo(
            f"{what:<18} {draft['ms']['median']:9.3f} ms   pay from {draft['tokens_to_pay']:.2f} tokens a step on"
        )
    if plot:
        plot.write_text(roofline.plot(device, points))
    click.echo(json.dumps(about | checked | results))


def _other(bundle: Bundle, backend: Backend, layout: KvLayout) -> Backend | None:
    """A backend of this machine's CPU to compare with, ready to run; None where there is none or it is the same."""
    from mimo_edge.backends import registry

    name = "onnxruntime-float"
    if backend.name not in ("cuda", "tensorrt") or not bundle.has("model.cpu-float.onnx"):
        return None
    other = registry.load(name, bundle)
    other.allocate(layout)
    return other


def _host(backend: Backend) -> dict[str, Any]:
    """Microseconds of the last step on the host, where the backend tells them."""
    last = getattr(backend, "last_step", None)
    return {} if last is None else {"queue_us": 1e6 * last.queue_s, "step_us": 1e6 * last.step_s}


@contextmanager
def _opened(bundle: str | None, spec_file: str | None, backend: str) -> Iterator[Bundle]:
    from mimo_edge.bundle import BUILT_IN, Bundle

    if spec_file is None:
        yield Bundle.open(bundle or BUILT_IN)
        return
    from mimo_edge.backends.cuda_driver import Driver
    from mimo_edge.spec import read_spec

    spec = read_spec(Path(spec_file))
    if not backend.startswith("cuda"):
        raise UnsupportedError("--random-weights measures a GPU: add --backend cuda")
    driver = Driver()
    capability = driver.capability
    driver.close()
    with needs_extra("export", "--random-weights"):
        from mimo_edge.export.programs.random_bundle import random_bundle
    with tempfile.TemporaryDirectory() as folder, progress() as report:
        yield random_bundle(spec, Path(folder) / "bundle", [capability], report)
