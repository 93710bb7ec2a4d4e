"""Drafts change no token: replies with 0, 3 and adaptive drafts, greedy and sampled, cache and gates on and off.

    python scripts/check_mtp.py --backend onnxruntime-float --prompts 1000 [--part I/N > FILE]
    python scripts/check_mtp.py --merge FILE ...
    python scripts/check_mtp.py --distribution 200000

Replies are compared with the same setting's without drafts and cache. Where they differ, the first difference is

- a tie, if the two tokens are within epsilon of each other (evaluation/ties.py), by default twice the largest
  difference between logits of the same rows in steps of 1 and of 4. It is measured without gates: a gate's block that
  is kept or skipped by a last bit moves logits by much more;
- a gate tie, if a block's score is within epsilon of its threshold, and turning that one block around, in an evaluation
  of the text by the oracle, brings the two tokens within epsilon of each other (_gate_ties.py);
- else wrong.

Where activations are rounded to 8 bits a last bit moves everything, gates' scores too: there epsilon is measured with
gates, and is the only rule. The last line holds the counts as JSON, which --merge adds up.

--distribution draws continuations of a model of 6 tokens and compares them with the exact distribution by chi-square,
in three settings, and once with a biased rule, which has to fail.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _distribution
import _mtp
import numpy as np
from _gate_ties import GateTies

from mimo_edge.bundle import BUILT_IN
from mimo_edge.cache import CacheOptions
from mimo_edge.engine import Engine
from mimo_edge.evaluation.ties import first_difference, margin
from mimo_edge.generation import Generation
from mimo_edge.request import SamplingParams

SAMPLINGS = {"greedy": SamplingParams(), "T=1": SamplingParams(1.0, seed=1)}
DRAFTS = (3, "auto")
GATES = ("on", "off")
ROUNDS_ACTIVATIONS = "onnxruntime"  # the backend of which a last bit can move logits by tenths, gates or not
NARROW = 0.1  # of ties, scores apart
COUNTS = ("equal", "tie", "gate tie", "WRONG", "narrow", "widest", "tokens", "steps")
Counts = dict[str, dict[str, float]]  # by setting, then by name
Reply = tuple[int, ...]
CHANGED = "drafts changed tokens"


def prompts_of(engine: Engine, count: int, context: int) -> list[list[int]]:
    """Commands (longer than the window, most of them), general text that is short, that crosses the end of the window
    in the reply, or that fills the context but for a few tokens; in a mixed order."""
    sources = (
        (0.4, _mtp.commands(engine)),
        (0.02, _mtp.texts(engine, context - 12, stride=700)),
        (0.2, _mtp.texts(engine, 116, stride=116)),
        (1.0, _mtp.texts(engine, 40, stride=64)),
    )
    prompts: list[list[int]] = []
    for share, source in sources:
        prompts += itertools.islice(source, min(round(share * count), count - len(prompts)))
    if len(prompts) < count:
        sys.exit(f"there are {len(prompts)} prompts (asked for: {count})")
    random.Random(0).shuffle(prompts)
    return prompts


def rounding(engine: Engine, prompts: list[list[int]]) -> float:
    """The largest difference between logits of the same rows in steps of 1 and of 4."""
    worst = []
    for prompt in prompts:
        one, four = (_mtp.rows_in_steps(engine, prompt, sizes) for sizes in ([1] * 16, [4] * 4))
        worst.append(float(np.abs(one - four).max()))
    return max(worst)


@dataclass(frozen=True)
class Pair:
    """A bundle's engine without drafts and cache, one with both, and what its gates can explain."""

    plain: Engine
    cached: Engine
    ties: GateTies | None
    epsilon: float

    def reason(self, prompt: list[int], want: Reply, got: Reply, params: SamplingParams) -> tuple[str, float]:
        """(equal, tie, gate tie or WRONG; by how much scores have to move)."""
        at = first_difference(want, got)
        if at is None:
            return "equal", 0.0
        text = [*prompt, *want[:at]]
        pair = want[at], got[at]
        by = margin(_mtp.logits_behind(self.plain, text), pair, len(text), params, text)
        if abs(by) < self.epsilon:
            return "tie", abs(by)
        gate = self.ties is not None and self.ties.explain(text, pair, params, self.epsilon)
        return ("gate tie" if gate else "WRONG"), by


def compare(gates: str, pair: Pair, prompt: list[int], options: argparse.Namespace, counts: Counts) -> None:
    """One prompt in all settings of a bundle."""

    def reply(engine: Engine, params: SamplingParams, drafts: Any) -> Any:
        generation = engine.generate(prompt, max_tokens=options.max_tokens, sampling=params, drafts=drafts)
        for _ in generation:
            pass
        return generation.result

    for name, params in SAMPLINGS.items():
        want = reply(pair.plain, params, 0).tokens
        ways = [(pair.plain, "no cache", d) for d in DRAFTS] + [(pair.cached, "cache", d) for d in (0, *DRAFTS)]
        for engine, where, drafts in ways:
            got = reply(engine, params, drafts)
            found, by = pair.reason(prompt, want, got.tokens, params)
            of = counts.setdefault(f"gates {gates}, {name}, {where}, {drafts} drafts", dict.fromkeys(COUNTS, 0.0))
            of[found] += 1
            of["narrow"] += found == "tie" and by < NARROW
            of["widest"] = max(of["widest"], by)
            of["tokens"] += len(got.tokens) - 1
            of["steps"] += got.mtp.steps or len(got.tokens) - 1


def check(options: argparse.Namespace) -> dict[str, Any]:
    """This part's counts by setting, of as many prompts as there is time for."""
    began, counts, done = time.perf_counter(), Counts(), 0
    room = {"max_context": options.context, "threads": options.threads}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        exact = options.backend != ROUNDS_ACTIVATIONS
        paths = {"on": options.bundle}
        if options.gates != "on" or (exact and not options.epsilon):  # only backends of a CPU can read it
            paths["off"] = _mtp.without_gates(options.bundle, Path(folder) / "dense")

        def opened(path: Path, cache: CacheOptions | None = None) -> Engine:
            return stack.enter_context(Engine.open(path, options.backend, cache=cache, **room))

        engines, pairs = {gates: opened(path) for gates, path in paths.items()}, dict[str, Pair]()
        every = prompts_of(engines["on"], options.prompts, options.context)
        some = [p for p in every if len(p) < options.context // 2][:12]
        for gates in GATES if options.gates == "both" else (options.gates,):
            epsilon = options.epsilon or 2 * rounding(engines["off" if exact else gates], some)
            ties = GateTies(paths[gates]) if exact and gates == "on" else None
            cached = opened(paths[gates], CacheOptions(bytes=256 << 20))
            pairs[gates] = Pair(engines[gates], cached, ties, epsilon)
        part, parts = options.part
        for prompt in every[part - 1 :: parts]:
            if options.seconds and time.perf_counter() - began > options.seconds:
                break
            for gates, pair in pairs.items():
                compare(gates, pair, prompt, options, counts)
            done += 1
    epsilon = {gates: pair.epsilon for gates, pair in pairs.items()}
    seconds = time.perf_counter() - began
    return {"backend": options.backend, "prompts": done, "s": seconds, "epsilon": epsilon, "counts": counts}


def show(parts: list[dict[str, Any]]) -> bool:
    """A table a backend of what parts have counted; whether replies were compared and none is wrong."""
    wrong = compared = 0.0
    for backend in sorted({part["backend"] for part in parts}):
        own = [part for part in parts if part["backend"] == backend]
        prompts, seconds = sum(p["prompts"] for p in own), sum(p["s"] for p in own)
        epsilon = {g: max(p["epsilon"].get(g, 0) for p in own) for g in GATES if any(g in p["epsilon"] for p in own)}
        limits = ", ".join(f"{e:.2g} with gates {gates}" for gates, e in epsilon.items())
        print(f"{backend}: {prompts} prompts, {seconds:.0f} s; epsilon {limits}")
        for name in dict.fromkeys(name for p in own for name in p["counts"]):
            of = [p["counts"][name] for p in own if name in p["counts"]]
            c = {key: sum(o[key] for o in of) for key in COUNTS}
            replies = c["equal"] + c["tie"] + c["gate tie"] + c["WRONG"]
            print(
                f"  {name:38s} {c['equal']:.0f} of {replies:.0f} equal, {c['tie']:.0f} ties ({c['narrow']:.0f} of less "
                f"than {NARROW}), {c['gate tie']:.0f} gate "
                f"ties, {c['WRONG']:.0f} wrong; widest {max(o['widest'] for o in of):.2g}; "
                f"{c['tokens'] / max(1, c['steps']):.2f} tokens a step"
            )
            wrong, compared = wrong + c["WRONG"], compared + replies
    return bool(compared and not wrong)


def distribution(draws: int, length: int) -> bool:
    """Whether all three settings fit and the biased rule does not."""
    fits = []
    for params in _distribution.SETTINGS:
        engine = _distribution.table_engine(3)
        counts, accepted = _distribution.observed(engine, params, length, draws)
        by = _distribution.excess(counts, _distribution.expected(engine, params, length))
        fits.append(by < 4.5)
        print(
            f"{params}: {draws} draws of {length} tokens, {accepted} drafts accepted; chi-square {by:+.2f} sigma",
            flush=True,
        )
    fair, Generation.choose = Generation.choose, _distribution.accept_what_is_likely  # type: ignore[assignment,method-assign]
    engine = _distribution.table_engine(3)
    counts, _ = _distribution.observed(engine, _distribution.SETTINGS[0], length, draws // 10)
    by = _distribution.excess(counts, _distribution.expected(engine, _distribution.SETTINGS[0], length))
    Generation.choose = fair  # type: ignore[method-assign]
    print(f"a biased rule, {draws // 10} draws: chi-square {by:+.2f} sigma")
    return all(fits) and by > 6


def part_of(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(text)
    return part, parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", default=BUILT_IN)
    parser.add_argument("--backend", default="onnxruntime-float")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gates", choices=(*GATES, "both"), default="both")
    parser.add_argument("--epsilon", type=float)
    parser.add_argument(
        "--part", type=part_of, default=(1, 1), metavar="I/N", help="Every Nth prompt, from the Ith on."
    )
    parser.add_argument("--seconds", type=float, help="Begins no further prompt after so many.")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="Adds up the output of parts instead.")
    parser.add_argument("--distribution", type=int, default=0, metavar="DRAWS", help="Only this check.")
    parser.add_argument("--length", type=int, default=4, help="Tokens of a continuation.")
    options = parser.parse_args()
    if options.distribution:
        sys.exit(0 if distribution(options.distribution, options.length) else "the distribution is wrong")
    if options.merge:
        sys.exit(0 if show([json.loads(f.read_text().splitlines()[-1]) for f in options.merge]) else CHANGED)
    counted = check(options)
    right = show([counted])
    print(json.dumps(counted))
    sys.exit(0 if right else CHANGED)


if __name__ == "__main__":
    main()
