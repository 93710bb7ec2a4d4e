"""mimo-edge build: a TensorRT engine for this machine."""

from __future__ import annotations

import click

from mimo_edge.cli.common import debug_option

EXAMPLES = """
\b
Examples:
  mimo-edge build qwen
  mimo-edge build qwen --sessions 2 --memory-limit 3000
  mimo-edge build qwen --check --target sm_87

Weights are not needed, and are not read: they are bound when the engine runs. The engine is kept under
~/.cache/mimo-edge/engines (MIMO_EDGE_CACHE), named by TensorRT's version, the GPU and the bundle; one of another
version, GPU or bundle is never used.
"""


@click.command(epilog=EXAMPLES)
@click.argument("bundle", type=click.Path())
@click.option(
    "--sessions",
    type=click.IntRange(1, 1024),
    default=8,
    show_default=True,
    help="The most sessions of the longest context that the engine's pools may hold.",
)
@click.option("--memory-limit", type=click.IntRange(64), metavar="MB", help="The most memory that the build may take.")
@click.option("--check", is_flag=True, help="Build with the TensorRT that is here, keep nothing; needs no GPU.")
@click.option("--target", help="With --check: whose TensorRT form to build, as sm_87  [default: the bundle's first]")
@debug_option
def build(bundle: str, sessions: int, memory_limit: int | None, check: bool, target: str | None) -> None:
    """Build the TensorRT engine of a bundle.

    BUNDLE must have been exported for this machine's GPU. The build runs in a process of its own, within the memory
    that is free; on any error, and when it is killed, nothing is left behind.
    """
    from mimo_edge.backends import tensorrt_build
    from mimo_edge.backends.cuda_kernels import targets
    from mimo_edge.bundle import Bundle
    from mimo_edge.errors import UnsupportedError
    from mimo_edge.trt_plugins import compat

    if target and not check:
        raise click.UsageError("--target goes with --check: an engine is built for the GPU of this machine")
    opened = Bundle.open(bundle, verify=False)
    trt = compat.load()
    have = [f"sm_{c}" for c in targets(opened)]
    if check:
        chosen = target or next(iter(have), None)
    else:
        from mimo_edge.backends.cuda_driver import Driver

        try:
            driver = Driver()
        except UnsupportedError as e:
            raise UnsupportedError(f"an engine is built where it runs ({e}); --check needs no GPU") from None
        chosen = f"sm_{driver.capability}"
        driver.close()
    if chosen not in have:
        raise UnsupportedError(
            f"{bundle} has kernels for {', '.join(have) or 'no GPU'}, not {chosen or 'any'}: "
            f"run `mimo-edge export SRC --target {chosen or 'orin'} -o DIR`"
        )
    _say(f"{trt.name}, {chosen}: needs about {tensorrt_build.needed(opened, chosen)}")
    limit = memory_limit * 1_000_000 if memory_limit else None
    if check:
        model = tensorrt_build.engines.model_file(opened, chosen)
        form, programs = tensorrt_build.form_of(opened, chosen), tensorrt_build.programs_of(opened, chosen)
        answer, size = tensorrt_build.check_engine(model, form, programs, sessions=sessions, limit=limit)
        place = "nothing was kept"
    else:
        folder, info, answer = tensorrt_build.build_engine(opened, trt, chosen, sessions=sessions, limit=limit)
        size, place = info.bytes, str(folder)
    click.echo(", ".join(f"{n} {name}" for name, n in answer["layers"].items()))
    took = f"{answer['seconds']} s and {answer['peak'] / 1e6:,.0f} MB"
    _say(f"built in {took}, an engine of {size / 1e6:,.1f} MB: {place}")
    if not check:
        _say(f"next: mimo-edge run {bundle} --backend tensorrt --chat")


def _say(text: str) -> None:
    click.echo(f"mimo-edge: {text}", err=True)
