"""The cuda backend on a GPU against the PyTorch reference, and how quick it is. One JSON object on the last line.

    python scripts/parity_cuda.py --compile            on any machine: fills the cache (MIMO_EDGE_CACHE), needs no GPU
    python scripts/parity_cuda.py [--budget SECONDS] [--only PATTERN]   on the GPU

For sm_87 (Orin; a newer GPU runs its PTX) and for the GPU's own target:
  logits   built-in model and random weights of other shapes, prompts in odd steps, three seeds: relative error
  greedy   256 tokens of the built-in model behind three prompts: equal, or the first difference is a tie
  random   speed of a MiMo-7B shape: decode with 1 and 4 rows, prefill, beside the floor that memory sets
  depth    time of a step at 1k to 32k tokens of context, window layers only and full layers only
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _parity import ORIN, SPECS, TIE, TOLERANCE, open_for_orin, random_weights, shapes

from mimo_edge.backends import oracle
from mimo_edge.backends.base import Step
from mimo_edge.backends.cuda import CudaBackend
from mimo_edge.backends.reference import BundleWeights
from mimo_edge.bench import Bench, device_of
from mimo_edge.bundle import BUILT_IN, WEIGHTS, Bundle
from mimo_edge.export.programs import lower, retarget
from mimo_edge.export.programs.random_bundle import random_bundle
from mimo_edge.export.programs.tuning import tuning
from mimo_edge.kernels.aot import compile_variants
from mimo_edge.kernels.launch import Variant
from mimo_edge.kv.layout import SequenceSlots, plan_layout
from mimo_edge.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, QuantSpec, TensorQuant, read_spec
from mimo_edge.tensors import read_tensors

BEGAN = time.perf_counter()
CUTS = {  # of at most 220 tokens
    "1": [1] * 40,
    "4": [4] * 15,
    "16": [16, 15, 9, 13],
    "128": [128, 92],
    "512": [220],
    "mixed": [150, 16, 4, 1, 40, 3, 6],
}
DEPTHS = (1024, 4096, 16384, 32000)
Q = TensorQuant(4, 64)


def log(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", flush=True)


def quiet(done: int, total: int, what: str) -> None:
    """A progress callback that says when something begins and ends."""
    if done in (0, total):
        log(f"{what}: {done} of {total}")


def deep(window: int | None) -> ModelSpec:
    """Eight layers whose time is mostly attention."""
    a = AttentionSpec(32, 8, 128, 128, 128, 1e6, 128**-0.5, window=window)
    return ModelSpec(
        family="depth",
        vocab_size=1024,
        hidden_size=1024,
        max_context=32768,
        norm_eps=1e-5,
        attention={"a": a},
        ffn={"f": FeedForwardSpec(1024)},
        layers=(LayerSpec("a", "f"),) * 8,
        tied=True,
        quant=QuantSpec(Q, Q, Q, Q),
    )


def all_specs() -> list[ModelSpec]:
    built_in = read_spec(BUILT_IN / "spec.json")
    return [built_in, *shapes().values(), read_spec(SPECS / "mimo-7b.json"), deep(128), deep(None)]


class Opened:
    """A backend with one sequence that owns the context, and the reference's weights."""

    def __init__(self, bundle: Bundle, capability: int, context: int):
        self.backend = CudaBackend.open(bundle) if capability != ORIN else open_for_orin(bundle)
        layout = plan_layout(bundle.spec, context, element_bytes=2)
        self.backend.allocate(layout)
        self.spec = bundle.spec
        self.slots = SequenceSlots(tuple(range(layout.pages)), 0)

    def rows(self, tokens: np.ndarray, sizes: list[int]) -> np.ndarray:
        """Logits of all rows, in steps of the given sizes."""
        out, at = [], 0
        for size in sizes:
            part = tokens[at : at + size]
            out.append(self.backend.run([Step(self.slots, at, part, np.arange(len(part)))])[0].logits.copy())
            self.backend.commit([len(part)])
            at += size
        return np.concatenate(out)

    def greedy(self, prompt: np.ndarray, count: int) -> list[int]:
        tokens, at = [], 0
        for at in range(0, len(prompt) - 1, 128):
            part = prompt[at : min(at + 128, len(prompt) - 1)]
            self.backend.run([Step(self.slots, at, part, np.array([], np.int64))])
            self.backend.commit([len(part)])
        at, token = len(prompt) - 1, int(prompt[-1])
        for i in range(count):
            token = int(self.backend.best(Step(self.slots, at + i, np.array([token]), np.array([], np.int64)))[0])
            self.backend.commit([1])
            tokens.append(token)
        return tokens


def reference_logits(bundle: Bundle, tokens: np.ndarray) -> np.ndarray:
    weights = BundleWeights(bundle.spec, read_tensors(bundle.file(WEIGHTS)), keep=True)
    past: list[None] = [None] * len(bundle.spec.layers)
    with torch.inference_mode():
        positions = torch.arange(len(tokens))
        return oracle.forward(bundle.spec, weights, torch.from_numpy(tokens), positions, past).logits.numpy()


def logits(bundle: Bundle, capability: int) -> dict[str, float]:
    """The worst relative error over three prompts, by the way they are cut into steps."""
    opened, worst = Opened(bundle, capability, 512), dict.fromkeys(CUTS, 0.0)
    for seed in range(3):
        tokens = np.random.default_rng(seed).integers(0, bundle.spec.vocab_size, 220)
        want = reference_logits(bundle, tokens)
        for name, sizes in CUTS.items():
            rows = want[: sum(sizes)]
            error = float(np.linalg.norm(opened.rows(tokens, sizes) - rows) / np.linalg.norm(rows))
            worst[name] = error if error > worst[name] or error != error else worst[name]
    opened.backend.close()
    return worst


def greedy(bundle: Bundle, capability: int, count: int = 256) -> list[dict[str, Any]]:
    """For three prompts, where our tokens leave those that the reference finds best, and by how much."""
    opened, results = Opened(bundle, capability, 512), []
    for seed in range(3):
        prompt = np.random.default_rng(10 + seed).integers(3, bundle.spec.vocab_size, 30)
        ours = opened.greedy(prompt, count)
        rows = reference_logits(bundle, np.concatenate([prompt, ours]))[len(prompt) - 1 : -1]
        gaps = rows.max(1) - rows[np.arange(count), ours]
        different = np.flatnonzero(gaps > 0)
        first = int(different[0]) if len(different) else None
        results.append({"differs_at": first, "gap": 0.0 if first is None else float(gaps[first])})
    opened.backend.close()
    return results


def random_speed(bundle: Bundle, capability: int) -> dict[str, Any]:
    opened = Opened(bundle, capability, 2304)
    device = device_of(opened.backend)
    layout = plan_layout(bundle.spec, 2304, element_bytes=2)
    meter = Bench(bundle.spec, opened.backend, layout)
    error = meter.check(None)
    results, points = meter.measure(256, 32, 5)
    results["floor_share"] = {p.name: p.step.floor_s(device) / p.seconds for p in points}
    host = opened.backend.last_step
    results |= {"self_consistency": error, "queue_us": 1e6 * host.queue_s, "memory": opened.backend.memory()}
    opened.backend.close()
    return results | {"bandwidth_gb_s": device.bandwidth / 1e9}


def depth(bundle: Bundle, capability: int) -> dict[int, float]:
    """Milliseconds of a decode step by context; what was never written counts as zeros."""
    opened = Opened(bundle, capability, 32768)
    times = {}
    for context in DEPTHS:
        step = Step(opened.slots, context, np.array([7]), np.array([], np.int64))
        seconds = []
        for _ in range(40):
            began = time.perf_counter()
            opened.backend.best(step)
            seconds.append(time.perf_counter() - began)
        times[context] = 1e3 * statistics.median(seconds)
    opened.backend.close()
    return times


def sections(folder: Path, own: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Everything, the most wanted first; bundles are made when a section that needs them is run."""
    targets = [ORIN, own]
    built_in = functools.cache(lambda: retarget(Bundle.open(BUILT_IN), folder / "built-in", targets, quiet))
    specs = {"7b": read_spec(SPECS / "mimo-7b.json"), "window": deep(128), "full": deep(None)}
    made = functools.cache(lambda name: random_bundle(specs[name], folder / name, targets, quiet))
    known = functools.cache(
        lambda seed: random_weights([*shapes().values()][seed], folder / str(seed), targets, seed, quiet)
    )
    for c in targets:
        yield f"built-in logits, sm_{c}", lambda c=c: logits(built_in(), c)
        yield f"built-in greedy, sm_{c}", lambda c=c: greedy(built_in(), c)
    for c in reversed(targets):
        yield f"7b speed, sm_{c}", lambda c=c: random_speed(made("7b"), c)
    for seed, name in enumerate(shapes()):
        for c in targets:
            yield f"{name} logits, sm_{c}", lambda c=c, seed=seed: logits(known(seed), c)
    for name in ("window", "full"):
        for c in targets:
            yield f"depth, {name} layers, sm_{c}", lambda c=c, name=name: depth(made(name), c)


def wrong(name: str, result: Any) -> bool:
    if "logits" in name:
        return not all(error <= TOLERANCE for error in result.values())
    return "greedy" in name and any(r["gap"] > TIE for r in result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="only fill the cache of compiled kernels")
    parser.add_argument("--target", type=int, default=90, help="the GPU's own compute capability")
    parser.add_argument("--budget", type=float, default=500, help="seconds after which no section is begun")
    parser.add_argument("--only", default="", metavar="PATTERN", help="sections whose name matches")
    parser.add_argument("--variants", type=Path, help="with --compile: these as well (tests/interpret.py records them)")
    args = parser.parse_args()
    if args.compile:
        more = [Variant(**json.loads(line)) for line in args.variants.read_text().splitlines()] if args.variants else []
        for c in (ORIN, args.target):
            needed = {k: v for s in all_specs() for k, v in lower(s, tuning(f"sm_{c}")).variants().items()}
            needed |= {v.key: v for v in more}
            with tempfile.TemporaryDirectory() as out:
                compile_variants(needed.values(), c, Path(out), progress=lambda *p: print(*p, flush=True))
        return
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, measure in sections(Path(folder), args.target):
            if not re.search(args.only, name):
                continue
            if time.perf_counter() - BEGAN > args.budget:
                log("out of time")
                break
            try:
                results[name] = measure()
            except Exception as e:  # the other sections are still wanted
                traceback.print_exc()
                results[name] = f"FAILED: {type(e).__name__}: {e}"
            log(f"{name}: {json.dumps(results[name])}")
    bad = [n for n, r in results.items() if isinstance(r, str) or wrong(n, r)]
    print(f"wrong: {bad or 'nothing'}")
    print(json.dumps(results))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
