"""The memory plan against the peak of a process that does what was planned, on the CPU.

    python scripts/bench_plan.py BUNDLE [BUNDLE ...] [--context N ...]

A child opens the bundle with the plan's total as its budget, fills the whole context with random tokens (so that the
embedding's table is touched as the plan assumes), generates, and does so again; its VmHWM is the peak. Files are in the
page cache. "model" compares both without what interpreter and libraries take before the bundle is opened. Linux only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from _bench import load_average, report

from mimo_edge.bundle import Bundle
from mimo_edge.device import capacity
from mimo_edge.device.footprint import Load
from mimo_edge.device.memory import SPREAD, SPREAD_BYTES, plan
from mimo_edge.device.subject import of_bundle
from mimo_edge.engine import Engine

NEW_TOKENS = 16


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def child(path: Path, context: int, budget: int) -> None:
    import numpy as np
    import onnxruntime  # noqa: F401  (belongs to the start)

    start = status("VmRSS")
    with Engine.open(path, "onnxruntime", max_context=context, threads=1, memory_budget=budget) as engine:
        loaded = status("VmHWM")
        size = engine.spec.vocab_size
        tokens = np.random.default_rng(0).integers(0, size, context - NEW_TOKENS).tolist()
        for _ in range(2):
            for _ in engine.generate(tokens, max_tokens=NEW_TOKENS):
                pass
        weights = engine.memory().weights_bytes
    print(json.dumps({"start": start, "loaded": loaded, "peak": status("VmHWM"), "weights": weights}))


def measure(path: Path, context: int) -> dict[str, float | str]:
    subject = of_bundle(Bundle.open(path, verify=False), 0)
    load = Load(context, heads=subject.usable_heads("onnxruntime"))
    made = plan(subject, "onnxruntime", capacity.of_machine(), load)
    command = [
        sys.executable,
        __file__,
        str(path),
        "--context",
        str(context),
        "--child",
        str(int(made.total * (1 + SPREAD)) + SPREAD_BYTES),
    ]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()[-1])
    planned, peak = made.total - found["start"], found["peak"] - found["start"]
    print(
        f"{subject.name[:24]:<24} {context:>7} {made.total / 1e6:>9.1f} {found['peak'] / 1e6:>9.1f} "
        f"{made.total / found['peak'] - 1:>+7.1%} {planned / peak - 1:>+7.1%} {found['loaded'] / 1e6:>9.1f}",
        flush=True,
    )
    items = {i.name: i.bytes for i in made.items}
    return {"model": subject.name, "context": context, "planned": made.total, **found, **items}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="+")
    parser.add_argument("--context", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.bundle[0], args.context[0], args.child)
    noise = load_average()
    print(f"{'model':<24} {'context':>7} {'plan, MB':>9} {'peak, MB':>9} {'error':>7} {'model':>7} {'loading':>9}")
    rows = [measure(path, context) for path in args.bundle for context in args.context]
    report({"rows": rows, "load_average": noise})


if __name__ == "__main__":
    main()
