"""Decode and prefill speed of a bundle on a CPU against llama.cpp, in the same run.

    python scripts/bench_cpu.py BUNDLE --gguf FILE [--gguf FILE ...] [--profile]

Contestants take turns on the same tokens; a step is tokens in, best token out. Times are medians over the steps of all
rounds, +- half the quartile distance; ratios are taken within a round, then their median (and range). Reports nothing
unless the bundle's greedy tokens through ONNX Runtime are the reference backend's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import onnxruntime
from _bench import (
    CHECKED,
    EngineModel,
    LlamaCpp,
    Model,
    check,
    gguf_bytes,
    load_average,
    median,
    our_bytes,
    prose,
    read_bandwidth,
    report,
    spread,
)
from numpy.typing import NDArray

from mimo_edge.backends.onnxruntime import OnnxRuntimeBackend
from mimo_edge.engine import Engine
from mimo_edge.kv.layout import KvLayout

CONTEXT = 2048
PREFILL = 512
SHORT = 16, 128  # decode from, to; below the window everything is seen
FULL, STEPS = (600, 1100), 32  # contexts at which windows of 512 are full, and steps at each

Times = dict[str, list[list[float]]]  # scenario -> round -> seconds a token, one value a step


class Theirs:
    def __init__(self, path: Path, threads: int):
        self.llama = LlamaCpp(path, threads, CONTEXT)

    def run(self, tokens: Sequence[int], start: int) -> NDArray:
        for at in range(0, len(tokens), LlamaCpp.BATCH):
            logits = self.llama.run(tokens[at : at + LlamaCpp.BATCH], start + at)
        return logits


def decode(model: Model, tokens: list[int], start: int, steps: int) -> list[float]:
    """Seconds of each step behind `start` tokens; tokens are given, so that all contestants do the same."""
    model.run(tokens[:start], 0)
    times = []
    for i in range(start, start + steps):
        began = time.perf_counter()
        model.run(tokens[i : i + 1], i).argmax()
        times.append(time.perf_counter() - began)
    return times


def prefill(model: Model, tokens: list[int]) -> list[float]:
    began = time.perf_counter()
    model.run(tokens, 0).argmax()
    return [(time.perf_counter() - began) / len(tokens)]


def scenarios(tokens: list[int]) -> dict[str, Callable[[Model], list[float]]]:
    """What is timed: seconds a token, one value a step."""
    return {
        f"decode, context {SHORT[0]} to {SHORT[1]}": lambda model: decode(model, tokens, SHORT[0], SHORT[1] - SHORT[0]),
        f"decode, context {FULL[0]}": lambda model: decode(model, tokens, FULL[0], STEPS),
        f"decode, context {FULL[1]}": lambda model: decode(model, tokens, FULL[1], STEPS),
        f"prefill of {PREFILL}": lambda model: prefill(model, tokens[:PREFILL]),
    }


def compete(models: dict[str, Model], tokens: list[int], rounds: int) -> dict[str, Times]:
    """Contestants take turns within each scenario; who begins changes. The first round warms up and is not counted."""
    found: dict[str, Times] = {name: defaultdict(list) for name in models}
    for r in range(rounds + 1):
        for what, scenario in scenarios(tokens).items():
            for name in list(models)[:: 1 if r % 2 else -1]:
                times = scenario(models[name])
                if r:
                    found[name][what].append(times)
    return found


def engine_speed(engine: Engine, tokens: list[int], rounds: int) -> float:
    """Tokens a second of Engine.generate, text out, over the same contexts as the short decode; median."""
    speeds = []
    for _ in range(rounds):
        reply = engine.generate(tokens[: SHORT[0]], max_tokens=SHORT[1] - SHORT[0] + 1)
        "".join(reply)
        speeds.append(reply.result.timings.decode_tok_s or 0.0)
    return median(speeds)


def kv_bytes(layout: KvLayout, context: int) -> int:
    """Bytes of keys and values that a step at `context` reads."""
    ring = max(layout.rings.values(), default=1)
    return layout.full_token_bytes * context + layout.ring_bytes * min(context, ring) // ring


def floors(weights: dict[str, int], layout: KvLayout, bandwidth: float) -> dict[str, dict[str, float]]:
    """Seconds a decoded token takes at least: weights and KV read once. KV is float16 in llama.cpp, float32 in ours."""
    contexts = {f"decode, context {SHORT[0]} to {SHORT[1]}": sum(SHORT) // 2}
    contexts |= {f"decode, context {c}": c for c in FULL}
    return {
        name: {
            what: (size + kv_bytes(layout, c) // (1 if name == "ours" else 2)) / bandwidth
            for what, c in contexts.items()
        }
        for name, size in weights.items()
    }


def profile(bundle: Path, tokens: list[int], threads: int) -> dict[str, float]:
    """Milliseconds a decoded token by operator, from ONNX Runtime's profiler (which slows small operators down)."""
    with tempfile.TemporaryDirectory() as folder:

        class Profiled(onnxruntime.SessionOptions):
            def __init__(self) -> None:
                super().__init__()
                self.enable_profiling, self.profile_file_prefix = True, f"{folder}/ort"

        with mock.patch.object(onnxruntime, "SessionOptions", Profiled):
            engine = Engine.open(bundle, "onnxruntime", max_context=CONTEXT, threads=threads)
        with engine:
            decode(EngineModel(engine, CONTEXT), tokens, FULL[0], STEPS)
            assert isinstance(engine.backend, OnnxRuntimeBackend)
            events = json.loads(Path(engine.backend._session.end_profiling()).read_text())
    runs = sorted(e["ts"] for e in events if e["name"] == "model_run")[-STEPS:]
    spent: dict[str, float] = defaultdict(float)
    for e in events:
        if e.get("cat") == "Node" and e["name"].endswith("_kernel_time") and e["ts"] >= runs[0]:
            spent[e["args"]["op_name"]] += e["dur"] / 1e3 / STEPS
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def show(found: dict[str, Times], floor: dict[str, dict[str, float]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for what in found["ours"]:
        print(f"\n{what}")
        summary[what] = {}
        for name, times in found.items():
            steps = [t for of_round in times[what] for t in of_round]
            ms, least = median(steps) * 1e3, floor[name].get(what)
            cell: dict[str, Any] = {"ms": ms, "spread": spread(steps), "tok_s": 1e3 / ms}
            text = f"  {name:28} {ms:7.2f} ms a token +-{cell['spread']:4.0%}, {cell['tok_s']:7.1f} tokens/s"
            if least:
                cell["of_floor"] = least * 1e3 / ms
                text += f", {cell['of_floor']:4.0%} of what memory allows"
            if name != "ours":
                pairs = zip(times[what], found["ours"][what], strict=True)
                ratios = [median(theirs) / median(ours) for theirs, ours in pairs]
                cell["ours_is_times"] = {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
                text += f"; ours is {median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
            summary[what][name] = cell
            print(text)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--gguf", type=Path, action="append", required=True, help="for llama.cpp; may be repeated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="also say where a decode step's time goes")
    args = parser.parse_args()
    noise, bandwidth = load_average(), read_bandwidth(args.threads)
    others: dict[str, Model] = {f"llama.cpp {p.stem}": Theirs(p, args.threads) for p in args.gguf}
    with Engine.open(args.bundle, "onnxruntime", CONTEXT, sessions=2, threads=args.threads) as engine:
        ours, tokens = EngineModel(engine, CONTEXT), engine.text.encode(prose())
        weights = {"ours": our_bytes(engine.spec)[1]} | {f"llama.cpp {p.stem}": gguf_bytes(p) for p in args.gguf}
        print(f"memory: {bandwidth / 1e9:.1f} GB/s read by {args.threads} threads")
        floor = floors(weights, engine.layout, bandwidth)
        for name, size in weights.items():
            least = next(iter(floor[name].values()))
            print(f"floor, {name}: {size / 1e6:.1f} MB of weights a token, at most {1 / least:.0f} tokens/s")
        equal = check(args.bundle, {"ours": ours, **others}, tokens)
        print(f"greedy tokens equal to the reference backend's, of {CHECKED}: {equal}")
        found = compete({"ours": ours, **others}, tokens, args.rounds)
        summary = show(found, floor)
        speed = engine_speed(engine, tokens, args.rounds)
        print(f"\nEngine.generate, text out, context {SHORT[0]} to {SHORT[1]}: {speed:.1f} tokens/s")
    ops = profile(args.bundle, tokens, args.threads) if args.profile else {}
    for op, ms in ops.items():
        print(f"  {op:28} {ms:7.3f} ms a token")
    results = {"threads": args.threads, "rounds": args.rounds, "load_average": noise, "bandwidth": bandwidth}
    report(
        results | {"weight_bytes": weights, "equal": equal, "times": summary, "generate_tok_s": speed, "ops_ms": ops}
    )


if __name__ == "__main__":
    main()
