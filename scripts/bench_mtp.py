"""Tokens a second of plain, MTP and adaptive decoding, with gates on and off, taking turns in one process.

    python scripts/bench_mtp.py --backend onnxruntime --threads 2

Workloads: `commands`, held-out commands with replies of about 300 tokens, greedy; `random`, prompts of random tokens,
sampled at temperature 1. Parts: tokens up to 128, and from 128 to 256. The first token, which prefill leads to, is left
out. The ratio to plain decoding is a pass's own, and the median over passes is reported.

Last, drafts just behind a long prompt against the same tokens' drafts later in a reply.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import _bench
import _mtp

from mimo_edge.bundle import BUILT_IN
from mimo_edge.engine import Engine
from mimo_edge.request import Result, SamplingParams
from mimo_edge.spec import MAX_DRAFTS

MODES: dict[str, Any] = {"plain": 0, "MTP 3": 3, "adaptive": "auto"}
PARTS = {"all": (1, 10_000), "first 128": (1, 128), "128 to 256": (128, 256)}
LONG, REPLY = 280, 300  # tokens
SAMPLINGS = {"commands": SamplingParams(), "random": SamplingParams(1.0, seed=1)}


class Speeds:
    """Of one mode and workload: seconds and tokens by part, a pass; counts of drafts."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.steps = self.decoded = 0
        self.accepted = [0] * MAX_DRAFTS
        self.shares: dict[str, list[float]] = defaultdict(list)
        self.reason = ""

    def begin_pass(self) -> None:
        for part in PARTS:
            self.seconds[part].append(0.0)
            self.tokens[part].append(0)

    def add(self, times: list[float], result: Result) -> None:
        """`times`: seconds at which each token was known."""
        for part, (first, last) in PARTS.items():
            if len(times) > first:
                end = min(last, len(times) - 1)
                self.seconds[part][-1] += times[end] - times[first - 1]
                self.tokens[part][-1] += end - first + 1
        use = result.mtp
        self.decoded += len(times) - 1
        self.steps += use.steps or len(times) - 1
        for i, n in enumerate(use.accepted_by_position or ()):
            self.accepted[i] += n
        for name in ("draft", "verify", "accept"):
            self.shares[name].append(getattr(use, f"{name}_share") or 0.0)
        self.reason = use.reason

    def rate(self, part: str, number: int) -> float:
        return self.tokens[part][number] / max(self.seconds[part][number], 1e-9)

    def against(self, plain: Speeds, part: str) -> list[float]:
        return [
            self.rate(part, i) / plain.rate(part, i) for i in range(len(self.seconds[part])) if plain.tokens[part][i]
        ]


def timed(
    engine: Engine, prompt: list[int], drafts: Any, sampling: SamplingParams, tokens: int
) -> tuple[list[float], Result]:
    times: list[float] = []
    generation = engine.generate(
        prompt,
        max_tokens=tokens,
        sampling=sampling,
        drafts=drafts,
        on_token=lambda _t, _p, seconds: times.append(seconds),
    )
    for _ in generation:
        pass
    return times, generation.result


def prompts_of(engine: Engine, options: argparse.Namespace) -> dict[str, list[list[int]]]:
    return {
        "commands": list(itertools.islice(_mtp.commands(engine, LONG), options.prompts)),
        "random": _mtp.random_tokens(engine, 64, max(1, options.prompts // 2)),
    }


def measure(
    engines: dict[str, tuple[Engine, Engine]], options: argparse.Namespace
) -> dict[tuple[str, str, str], Speeds]:
    """(gates, workload, mode) -> speeds."""
    speeds: dict[tuple[str, str, str], Speeds] = defaultdict(Speeds)
    for number in range(-1, options.passes):  # the first warms up
        if number == 0:
            speeds.clear()
        for gates, (plain, drafting) in engines.items():
            for workload, prompts in prompts_of(plain, options).items():
                for mode in MODES:
                    speeds[gates, workload, mode].begin_pass()
                for prompt in prompts if number >= 0 else prompts[:1]:
                    for mode, drafts in MODES.items():
                        engine = drafting if drafts else plain
                        out = timed(engine, prompt, drafts, SAMPLINGS[workload], REPLY)
                        speeds[gates, workload, mode].add(*out)
        print(f"pass {number + 1} of {options.passes}", flush=True)
    return speeds


def show(speeds: dict[tuple[str, str, str], Speeds]) -> list[dict[str, Any]]:
    rows = []
    for (gates, workload, mode), s in speeds.items():
        plain = speeds[gates, workload, "plain"]
        row: dict[str, Any] = {"gates": gates, "workload": workload, "mode": mode}
        for part in PARTS:
            if any(s.tokens[part]):
                row[part] = _bench.median([s.rate(part, i) for i in range(len(s.seconds[part]))])
                row[f"{part}, of plain"] = _bench.median(s.against(plain, part))
        row["tokens a step"] = s.decoded / s.steps
        row["accepted"] = [n / s.steps for n in s.accepted]
        row |= {f"{name} share": _bench.median(v) for name, v in s.shares.items()}
        row["reason"] = s.reason
        rows.append(row)
        speed = "  ".join(f"{part} {row[part]:.1f} ({row[f'{part}, of plain']:.2f})" for part in PARTS if part in row)
        drafts = " ".join(f"{100 * a:.0f}" for a in row["accepted"])
        shares = " ".join(f"{100 * row[f'{name} share']:.0f}" for name in ("draft", "verify", "accept"))
        print(
            f"gates {gates:3s} {workload:9s}{mode:9s} {speed}  {row['tokens a step']:.2f} a step, accepted {drafts} %, "
        )
        print(f"{'':24s} time in draft, verify, accept {shares} %; {s.reason}")
    return rows


def behind_prompts(engine: Engine, count: int) -> tuple[list[float], list[float]]:
    """Shares of steps whose draft i held: just behind a long prompt, and in the same text late in a reply."""
    early, late = [0] * (MAX_DRAFTS + 1), [0] * (MAX_DRAFTS + 1)  # steps, then accepted by position

    def counts(prompt: list[int], tokens: int) -> tuple[list[int], Result]:
        _, result = timed(engine, prompt, MAX_DRAFTS, SamplingParams(), tokens)
        return [result.mtp.steps or 0, *(result.mtp.accepted_by_position or (0,) * MAX_DRAFTS)], result

    found = 0
    for prompt in _mtp.texts(engine, 256):
        if found == count:
            break
        whole, result = counts(prompt, 257)
        if len(result.tokens) < 257:
            continue
        part, _ = counts(prompt, 193)
        again, _ = counts([*prompt, *result.tokens[:192]], 65)
        late = [a + b - c for a, b, c in zip(late, whole, part, strict=True)]
        early = [a + b for a, b in zip(early, again, strict=True)]
        found += 1
    return [n / max(1, early[0]) for n in early[1:]], [n / max(1, late[0]) for n in late[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", default=BUILT_IN)
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--behind", type=int, default=20, help="Texts of the last comparison.")
    options = parser.parse_args()
    load = _bench.load_average()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        paths = {"on": options.bundle, "off": _mtp.without_gates(options.bundle, Path(folder) / "dense")}

        def opened(path: Path, drafts: Any) -> Engine:
            room = {"max_context": 1024, "threads": options.threads}
            return stack.enter_context(Engine.open(path, options.backend, drafts=drafts, **room))

        engines = {gates: (opened(path, 0), opened(path, "auto")) for gates, path in paths.items()}
        rows = show(measure(engines, options))
        early, late = behind_prompts(engines["on"][1], options.behind)
    print(
        "accepted by position just behind a prompt", *(f"{a:.3f}" for a in early), "late", *(f"{a:.3f}" for a in late)
    )
    _bench.report({"load": load, "rows": rows, "just_behind_a_prompt": early, "late": late, "passes": options.passes})


if __name__ == "__main__":
    main()
