"""Time to the first token of a prompt that the cache knows, and what the cache costs prompts that it does not know.

    python scripts/bench_cache.py gemma --tokens 4096

Engines take turns in one process, so a noisy machine hits all. A hit is the same prompt again (its last token is
evaluated), from memory and from a file. The system's page cache is warm: a file's first read depends on the disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _bench

from mimo_edge.cache import CacheOptions, EngineCache
from mimo_edge.engine import Engine

BYTES = 2 << 30


class Spent:
    """Seconds that requests spend in an engine's cache: looking up, copying in and out. What noise cannot hide."""

    def __init__(self, cache: EngineCache):
        self.seconds = 0.0
        for name in ("begin", "save"):
            setattr(cache, name, self._timed(getattr(cache, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, int, tuple[int, ...]]:
    """(seconds to the first token, reused tokens, tokens)."""
    generation = engine.generate(prompt, max_tokens=4)
    for _ in generation:
        pass
    result = generation.result
    assert result.timings.ttft_s is not None
    return result.timings.ttft_s, result.cache.reused_tokens, result.tokens


def prompts(engine: Engine, tokens: int, rounds: int) -> list[list[int]]:
    """Prompts of which no two begin alike."""
    words = engine.text.encode(_bench.prose(), special=False)
    words *= -(-(tokens + rounds) // len(words))
    return [[words[i * 7 + 1], *words[i : i + tokens - 1]] for i in range(rounds)]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Seconds to the first token, of each kind of request."""
    context = options.tokens + 64
    kinds = ("no cache", "miss", "miss, with files", "of a miss, in the cache", "memory", "file")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}

    def opened(cache: CacheOptions | None) -> Engine:
        return Engine.open(options.bundle, options.backend, max_context=context, threads=options.threads, cache=cache)

    files = CacheOptions(bytes=BYTES, folder=folder)
    with opened(None) as plain, opened(CacheOptions(bytes=BYTES)) as memory, opened(files) as disk:
        assert memory.cache is not None and disk.cache is not None
        spent = Spent(memory.cache)
        for i, prompt in enumerate(prompts(plain, options.tokens, options.rounds + 1)):
            expected: tuple[int, ...] = ()
            spent.seconds = 0.0
            for name, engine in (("no cache", plain), ("miss", memory), ("miss, with files", disk)):
                seconds, reused, tokens = first_token(engine, prompt)
                if reused:
                    _bench.refuse(f"{reused} tokens of a new prompt were reused")
                expected = expected or tokens
                if tokens != expected:
                    _bench.refuse(f"the tokens differ: {tokens} and {expected}")
                times[name] += [seconds] if i else []  # the first round warms up
            times["of a miss, in the cache"] += [spent.seconds] if i else []
            disk.cache.flush()
            for snapshot in list(disk.cache.prefix.have.snapshots.values()):
                disk.cache.prefix.evict(snapshot, "memory")  # what files hold stays known
            for name, engine in (("memory", memory), ("file", disk)):
                seconds, reused, tokens = first_token(engine, prompt)
                if reused < options.tokens - 1:
                    _bench.refuse(f"only {reused} tokens came from {name}")
                times[name] += [seconds] if i else []
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    load = _bench.load_average()
    with tempfile.TemporaryDirectory() as folder:
        times = measure(options, Path(folder) / "cache")
    base = _bench.median(times["no cache"])
    for name, seconds in times.items():
        middle = _bench.median(seconds)
        paired = _bench.median([s / b for s, b in zip(seconds, times["no cache"], strict=True)])
        print(f"{name:25s}{1000 * middle:9.1f} ms  spread {_bench.spread(seconds):5.1%}  {paired:7.2%} of no cache")
    _bench.report({"tokens": options.tokens, "load": load, "no_cache_s": base, "times": times})


if __name__ == "__main__":
    main()
