"""Drafts change no token: replies with 0, 3 and adaptive drafts, greedy and sampled, cache and gates on and off.

    python scripts/check_mtp.py --backend onnxruntime-float --prompts 1000
    python scripts/check_mtp.py --distribution 200000

Replies are compared with the same setting's without drafts and cache. Where they differ, the first difference is a tie
if the two tokens are within --epsilon of each other (evaluation/ties.py), and an error otherwise. The default epsilon
is twice the largest difference seen between logits of the same rows in steps of 1 and of 4, printed first.

--distribution draws continuations of a model of 6 tokens and compares them with the exact distribution by chi-square,
in three settings, and once with a biased rule, which has to fail.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import _distribution
import _mtp
import numpy as np

from mimo_edge.bundle import BUILT_IN
from mimo_edge.cache import CacheOptions
from mimo_edge.engine import Engine
from mimo_edge.evaluation.ties import first_difference, margin
from mimo_edge.generation import Generation
from mimo_edge.request import SamplingParams

SAMPLINGS = {"greedy": SamplingParams(), "T=1": SamplingParams(1.0, seed=1)}
DRAFTS = (3, "auto")


def rounding(engine: Engine, prompts: list[list[int]]) -> float:
    """The largest difference between logits of the same rows in steps of 1 and of 4."""
    worst = []
    for prompt in prompts:
        one, four = (_mtp.rows_in_steps(engine, prompt, sizes) for sizes in ([1] * 8, [4, 4]))
        worst.append(float(np.abs(one - four).max()))
    return max(worst)


def prompts_of(engine: Engine, count: int) -> list[list[int]]:
    """Half commands, half general text."""
    half = itertools.islice(_mtp.commands(engine), count // 2)
    return [*half, *itertools.islice(_mtp.texts(engine, 96), count - count // 2)]


class Compared:
    """Counts of one setting."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.steps = self.tokens = 0
        self.worst = 0.0

    def add(
        self, engine: Engine, prompt: list[int], want: tuple[int, ...], got: Any, params: Any, epsilon: float
    ) -> None:
        at = first_difference(want, got.tokens)
        self.tokens += len(got.tokens) - 1
        self.steps += got.mtp.steps or len(got.tokens) - 1
        if at is None:
            self.counts["equal"] += 1
            return
        text = [*prompt, *want[:at]]
        pair = want[at], got.tokens[at]
        by = margin(_mtp.logits_behind(engine, text), pair, len(text), params, text)
        self.counts["tie" if by < epsilon else "WRONG"] += 1
        self.worst = max(self.worst, by)

    def line(self, name: str) -> str:
        total, c = sum(self.counts.values()), self.counts
        per_step = self.tokens / max(1, self.steps)
        return (
            f"{name:34s} {c['equal']:5d} of {total} equal, {c['tie']} ties, {c['WRONG']} wrong; "
            f"widest tie {self.worst:.2g}; {per_step:.2f} tokens a step"
        )


def reply(engine: Engine, prompt: list[int], options: argparse.Namespace, params: SamplingParams, drafts: Any) -> Any:
    generation = engine.generate(prompt, max_tokens=options.max_tokens, sampling=params, drafts=drafts)
    for _ in generation:
        pass
    return generation.result


def check(bundle: Path, gates: str, options: argparse.Namespace) -> list[str]:
    """Lines of all settings of one bundle."""
    room = {"max_context": options.context, "threads": options.threads}
    compared: dict[str, Compared] = {}
    with (
        Engine.open(bundle, options.backend, **room) as plain,
        Engine.open(bundle, options.backend, cache=CacheOptions(bytes=256 << 20), **room) as cached,
    ):
        prompts = prompts_of(plain, options.prompts)
        largest = rounding(plain, prompts[:: max(1, len(prompts) // 20)])
        epsilon = options.epsilon or 2 * largest
        print(f"gates {gates}: rows of 1 and of 4 differ by {largest:.2g} logits; epsilon {epsilon:.2g}", flush=True)
        for i, prompt in enumerate(prompts):
            for name, params in SAMPLINGS.items():
                want = reply(plain, prompt, options, params, 0).tokens
                ways = [(plain, "no cache", d) for d in DRAFTS] + [(cached, "cache", d) for d in (0, *DRAFTS)]
                for engine, where, drafts in ways:
                    got = reply(engine, prompt, options, params, drafts)
                    key = f"gates {gates}, {name}, {where}, {drafts} drafts"
                    compared.setdefault(key, Compared()).add(plain, prompt, want, got, params, epsilon)
            if i % 100 == 99:
                print(f"{i + 1} prompts", file=sys.stderr, flush=True)
    return [c.line(name) for name, c in compared.items()]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", default=BUILT_IN)
    parser.add_argument("--backend", default="onnxruntime-float")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gates", choices=("on", "off", "both"), default="both")
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--distribution", type=int, default=0, metavar="DRAWS", help="Only this check.")
    parser.add_argument("--length", type=int, default=4, help="Tokens of a continuation.")
    options = parser.parse_args()
    began = time.perf_counter()
    if options.distribution:
        sys.exit(0 if distribution(options.distribution, options.length) else "the distribution is wrong")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for gates in ("on", "off") if options.gates == "both" else (options.gates,):
            bundle = options.bundle if gates == "on" else _mtp.without_gates(options.bundle, Path(folder) / "dense")
            lines += check(bundle, gates, options)
    print("\n".join(lines))
    print(json.dumps({"backend": options.backend, "prompts": options.prompts, "s": time.perf_counter() - began}))
    if any(" 0 wrong" not in line for line in lines):
        sys.exit("drafts changed tokens")


if __name__ == "__main__":
    main()
