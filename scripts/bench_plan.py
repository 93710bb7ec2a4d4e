"""The memory plan against the peak of a process that does what was planned.

    python scripts/bench_plan.py [BUNDLE ...] [--context N ...]
    python scripts/bench_plan.py [BUNDLE ...] --backend cuda [--random SPEC.json ...] [--context N ...]

A child opens the bundle (the built-in model's, where none is named) with the plan's total as its budget, fills the
whole context with random tokens (so that the embedding's table is touched as the plan assumes), generates, with drafts
where the model has heads, and does so again. Files are in the page cache. Linux only.

CPU: the peak is the child's VmHWM. "model" compares both without what interpreter and libraries take at the start.

A GPU that has memory of its own, and nothing else to do: the peak is what its driver had less of, watched from here,
without the child's empty context. Another child loads the weights alone, and one gets a budget that is a page too
small. Bundles get the kernels that they lack; `--random` makes bundles of a shape. Exit code 1 when something is amiss.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from _bench import load_average, refuse, report
from _memory import Watcher, run_child, status

from mimo_edge.backends import registry
from mimo_edge.backends.cuda_driver import Driver
from mimo_edge.backends.cuda_kernels import targets
from mimo_edge.backends.cuda_memory import UNIT
from mimo_edge.bundle import BUILT_IN, Bundle
from mimo_edge.device import capacity
from mimo_edge.device.footprint import Load, layout_of
from mimo_edge.device.memory import SPREAD, SPREAD_BYTES, Plan, plan
from mimo_edge.device.subject import of_bundle
from mimo_edge.engine import Engine
from mimo_edge.errors import BadInputError
from mimo_edge.spec import read_spec

SCRIPT = str(Path(__file__).resolve())
NEW_TOKENS = 16
CONTEXTS = {"onnxruntime": [256, 1024, 4096], "cuda": [1024, 4096, 16384]}
WITHIN, LOADING = 0.03, 1.10  # of the peak; of the weights
FIXED = 24_000_000  # or so much beyond the weights: kernels, programs, the driver's units, whatever the model
# What asking the GPU for its memory takes on top of a context: a stream, whose unit the driver keeps when it is gone.
SLACK = UNIT
WIDTH = 28


def work(engine: Engine) -> None:
    """Fills the context with random tokens and generates the last of them, twice."""
    import numpy as np

    size, context, drafts = engine.spec.vocab_size, engine.layout.context, engine.layout.heads
    tokens = np.random.default_rng(0).integers(0, size, context - NEW_TOKENS).tolist()
    for _ in range(2):
        for _ in engine.generate(tokens, max_tokens=NEW_TOKENS, drafts=drafts):
            pass


def cpu_child(path: Path, context: int, budget: int) -> dict[str, Any]:
    import numpy  # noqa: F401
    import onnxruntime  # noqa: F401  (both belong to the start)

    start = status("VmRSS")
    with Engine.open(path, "onnxruntime", max_context=context, threads=1, memory_budget=budget) as engine:
        loaded = status("VmHWM")
        work(engine)
        weights = engine.memory().weights_bytes
    return {"start": start, "loaded": loaded, "peak": status("VmHWM"), "weights": weights}


def cuda_child(path: Path, context: int, budget: int) -> dict[str, Any]:
    """Bytes that the GPU has free at each phase; the driver is held, so that its context is there throughout."""
    driver = Driver()
    said: dict[str, Any] = {"empty": driver.memory()[0], "start": status("VmRSS")}
    try:
        with Engine.open(path, "cuda", max_context=context, memory_budget=budget) as engine:
            said["opened"] = driver.memory()[0]
            work(engine)
            backend: Any = engine.backend
            said |= {"end": driver.memory()[0], "arenas": backend.memory(), "heads": engine.layout.heads}
    except BadInputError as e:
        said["refused"] = str(e)
    return said | {"host": status("VmHWM"), "left": driver.memory()[0]}


def loading_child(path: Path, context: int, budget: int) -> dict[str, Any]:
    """As cuda_child, of weights and kernels alone."""
    driver = Driver()
    said = {"empty": driver.memory()[0], "start": status("VmRSS")}
    backend: Any = registry.load("cuda", Bundle.open(path, verify=False))
    said |= {"opened": driver.memory()[0], "host": status("VmHWM"), "arenas": backend.memory()}
    backend.close()
    return said


CHILDREN = {"cpu": cpu_child, "cuda": cuda_child, "loading": loading_child}


def command(kind: str, path: Path, context: int = 1, budget: int = 0) -> list[str]:
    return [sys.executable, SCRIPT, str(path), "--context", str(context), "--child", kind, str(budget)]


def measure_cpu(path: Path, context: int) -> dict[str, float | str]:
    subject = of_bundle(Bundle.open(path, verify=False), 0)
    load = Load(context, heads=subject.usable_heads("onnxruntime"))
    made = plan(subject, "onnxruntime", capacity.of_machine(), load)
    found = run_child(command("cpu", path, context, int(made.total * (1 + SPREAD)) + SPREAD_BYTES))
    planned, peak = made.total - found["start"], found["peak"] - found["start"]
    print(
        f"{subject.name[:WIDTH]:<{WIDTH}} {context:>7} {made.total / 1e6:>9.1f} {found['peak'] / 1e6:>9.1f} "
        f"{made.total / found['peak'] - 1:>+7.1%} {planned / peak - 1:>+7.1%} {found['loaded'] / 1e6:>9.1f}",
        flush=True,
    )
    items = {i.name: i.bytes for i in made.items}
    return {"model": subject.name, "context": context, "planned": made.total, **found, **items}


def planned_cuda(watcher: Watcher, path: Path, context: int) -> tuple[Plan, int]:
    """The plan, and the bytes of one page of keys and values."""
    gpu = capacity.GpuMemory(watcher.driver.capability, False, *watcher.driver.memory())
    subject = of_bundle(Bundle.open(path, verify=False), gpu.capability)
    load = Load(context, heads=subject.usable_heads("cuda"))
    layout = layout_of(subject, "cuda", load)
    made = plan(subject, "cuda", capacity.of_machine(gpu=gpu), load)
    return made, layout.page_size * layout.full_token_bytes


def measure_loading(watcher: Watcher, path: Path) -> dict[str, Any]:
    """What weights and kernels take while they are loaded: on the GPU, and with what the host takes meanwhile."""
    found, taken = watcher.run(command("loading", path))
    context, host, weights = watcher.free - found["empty"], found["host"] - found["start"], found["arenas"]["weights"]
    device = taken - context
    row = {"device": device / weights, "both": (device + host) / weights, "beyond": device + host - weights}
    name = Bundle.open(path, verify=False).manifest.name
    print(
        f"{name[:WIDTH]:<{WIDTH}} {weights / 1e6:,.1f} MB of weights: loading takes {row['device']:.3f} times that, "
        f"{row['both']:.3f} ({row['beyond'] / 1e6:,.1f} MB more) with what the host takes meanwhile; an empty context "
        f"takes {context / 1e6:,.1f} MB",
        flush=True,
    )
    return {"model": name, "taken": taken, **found, **row}


def measure_cuda(watcher: Watcher, path: Path, context: int) -> dict[str, Any]:
    made, _ = planned_cuda(watcher, path, context)
    found, taken = watcher.run(command("cuda", path, context, made.total))
    if "refused" in found:
        refuse(found["refused"])
    peak = taken - watcher.free + found["empty"]
    print(
        f"{made.model[:WIDTH]:<{WIDTH}} {context:>7} {made.total / 1e6:>9.1f} {peak / 1e6:>9.1f} "
        f"{made.total / peak - 1:>+7.1%} {sum(found['arenas'].values()) / 1e6:>9.1f} {found['host'] / 1e6:>9.1f}",
        flush=True,
    )
    row = {"model": made.model, "context": context, "planned": made.total, "peak": peak, "taken": taken, **found}
    return row | {"items": {i.name: i.bytes for i in made.items}}


def measure_refusal(watcher: Watcher, path: Path, context: int) -> dict[str, Any]:
    """A budget that lacks one page: refused in one line, and none of the plan's arrays was allocated meanwhile."""
    made, page = planned_cuda(watcher, path, context)
    found, taken = watcher.run(command("cuda", path, context, made.total - page))
    extra, why = taken - watcher.free + found["empty"], found.get("refused", "")
    held = bool(why) and "\n" not in why and extra <= SLACK
    print(f"{made.model[:WIDTH]:<{WIDTH}} {context:>7} less a page: {why or 'NOT REFUSED'} ({extra:,} bytes taken)")
    return {"model": made.model, "context": context, "why": why, "took": extra, "held": held}


def bundles_for(capability: int, bundles: Sequence[Path], specs: Sequence[Path], folder: Path) -> Iterator[Path]:
    """All with kernels for the GPU, made one by one while others are measured."""
    from mimo_edge.export.programs import retarget
    from mimo_edge.export.programs.random_bundle import random_bundle

    def fitting(path: Path, out: Path) -> Path:
        bundle = Bundle.open(path, verify=False)
        return path if capability in targets(bundle) else retarget(bundle, out, [capability], lambda *_: None).path

    def of_shape(path: Path, out: Path) -> Path:
        return random_bundle(read_spec(path), out, [capability], lambda *_: None).path

    jobs = [partial(fitting, p) for p in bundles] + [partial(of_shape, p) for p in specs]
    with ThreadPoolExecutor(1) as pool:
        yield from pool.map(lambda job: job[1](folder / str(job[0])), enumerate(jobs))


def compare_cuda(bundles: Sequence[Path], specs: Sequence[Path], contexts: Sequence[int]) -> None:
    noise, watcher = load_average(), Watcher()
    driver, loads, rows, refusals = watcher.driver, [], [], []
    if driver.integrated:
        refuse(f"{driver.name} shares the machine's memory, of which its driver knows too little")
    print(f"{driver.name}, driver for CUDA {driver.version / 1000:.1f}, {watcher.free / 1e6:,.1f} MB free")
    print(f"{'model':<{WIDTH}} {'context':>7} {'plan, MB':>9} {'peak, MB':>9} {'error':>7} {'arenas':>9} {'host':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for path in bundles_for(driver.capability, bundles, specs, Path(folder)):
            most = Bundle.open(path, verify=False).spec.max_context
            fitting = sorted({min(c, most) for c in contexts})
            loads.append(measure_loading(watcher, path))
            rows += [measure_cuda(watcher, path, c) for c in fitting]
            refusals.append(measure_refusal(watcher, path, fitting[-1]))
    amiss = [f"{r['model']}, {r['context']}" for r in rows if abs(r["planned"] / r["peak"] - 1) > WITHIN]
    amiss += [f"{r['model']}: loading" for r in loads if r["both"] > LOADING and r["beyond"] > FIXED]
    amiss += [f"{r['model']}: a page too little" for r in refusals if not r["held"]]
    limit = f"{LOADING:.2f} times the weights and also {FIXED / 1e6:.0f} MB beyond them while loading"
    print(f"more than {WITHIN:.0%} off, more than {limit}, or not refused: {'; '.join(amiss) or 'nothing'}")
    results = {"gpu": driver.name, "loads": loads, "rows": rows, "refusals": refusals, "amiss": amiss}
    report(results | {"load_average": noise})
    sys.exit(bool(amiss))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="*", default=[BUILT_IN])
    parser.add_argument("--backend", choices=CONTEXTS, default="onnxruntime")
    parser.add_argument(
        "--random", type=Path, nargs="+", default=[], metavar="SPEC", help="shapes, with --backend cuda"
    )
    parser.add_argument("--context", type=int, nargs="+", help="tokens, at most the model's own")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    contexts = args.context or CONTEXTS[args.backend]
    if args.child:
        kind, budget = args.child
        print(json.dumps(CHILDREN[kind](args.bundle[0], contexts[0], int(budget))))
        return
    if args.backend == "cuda":
        return compare_cuda(args.bundle, args.random, contexts)
    noise = load_average()
    print(f"{'model':<{WIDTH}} {'context':>7} {'plan, MB':>9} {'peak, MB':>9} {'error':>7} {'model':>7} {'loading':>9}")
    rows = [measure_cpu(path, context) for path in args.bundle for context in contexts]
    report({"rows": rows, "load_average": noise})


if __name__ == "__main__":
    main()
