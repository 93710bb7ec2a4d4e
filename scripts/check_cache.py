"""Random conversations through every tier of the prefix cache, compared with the same ones without a cache.

    python scripts/check_cache.py gemma --conversations 200 --backend onnxruntime-float

Turns append, edit, take back, branch off, and leave out the last reply, as chat templates do. Greedy tokens must be
equal (a) from a session's own rows, (b) from memory, (c) from files, with memory for hardly more than one prompt, (d)
from files after the process that wrote them was killed (SIGKILL), again and again. Where they differ, the gap between
the best two logits without a cache says whether that was a tie.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import _bench
import numpy as np

from mimo_edge.cache import CacheOptions
from mimo_edge.engine import Engine
from mimo_edge.kv.snapshots import Geometry

REPLY = 6  # tokens
GROUP = 20  # conversations at a time
DISK = 8 << 30


@dataclass(frozen=True)
class Turn:
    """A prompt, what follows it without a cache, and how far the best two logits of each token were apart."""

    conversation: int
    number: int
    prompt: list[int]
    reply: list[int]
    gaps: list[float]


@dataclass
class Score:
    turns: int = 0
    equal: int = 0
    ties: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    widest: float = 0.0  # gap at a difference

    def add(self, turn: Turn, tokens: tuple[int, ...], reused: int, tie: float) -> None:
        self.turns += 1
        self.prompt_tokens += len(turn.prompt)
        self.reused_tokens += reused
        if list(tokens) == turn.reply:
            self.equal += 1
            return
        at = next(i for i, (a, b) in enumerate(zip(tokens, turn.reply, strict=False)) if a != b)
        self.ties += turn.gaps[at] < tie
        self.widest = max(self.widest, turn.gaps[at])

    def __str__(self) -> str:
        share = f"{self.reused_tokens / max(1, self.prompt_tokens):.0%} of prompt tokens reused"
        wrong = self.turns - self.equal - self.ties
        return (
            f"{self.turns} replies, {self.equal} equal, {self.ties} differ at a tie (widest gap {self.widest:.2g}), "
            f"{wrong} WRONG; {share}"
        )


@contextmanager
def opened(options: argparse.Namespace, cache: CacheOptions | None = None) -> Iterator[Engine]:
    with Engine.open(options.bundle, options.backend, max_context=options.context, cache=cache) as engine:
        yield engine


def conversations(engine: Engine, options: argparse.Namespace) -> list[Turn]:
    """Every turn answered without a cache; conversations take turns in groups, as clients would."""
    r, words = random.Random(options.seed), engine.text.encode(_bench.prose(), special=False)
    gaps = watch(engine)
    turns = []
    for first in range(0, options.conversations, GROUP):
        histories: dict[int, list[int]] = {i: [] for i in range(first, min(first + GROUP, options.conversations))}
        for number in range(options.turns):
            for i, history in histories.items():
                length = options.more if number else options.first
                at, n = r.randrange(len(words) - 2 * length), r.randint(max(1, length // 4), length)
                prompt = [*edited(history, r), *words[at : at + n]][: options.context - REPLY]
                gaps.clear()
                reply = list(answer(engine, prompt)[0])
                turns.append(Turn(i, number, prompt, reply, list(gaps)))
                histories[i] = prompt + (reply if r.random() < 0.7 else [])  # or the template left it out
    return turns


def edited(history: list[int], r: random.Random) -> list[int]:
    """Mostly as it is; sometimes taken back, branched off somewhere, or with a word replaced."""
    kind = r.random()
    if not history or kind < 0.6:
        return history
    if kind < 0.75:
        return history[: len(history) - r.randint(1, 30)]
    at = r.randrange(len(history))
    return history[:at] if kind < 0.9 else [*history[:at], r.choice(history), *history[at + 1 :]]


def watch(engine: Engine) -> list[float]:
    """The gap between the best two logits of every token that is chosen from now on."""
    gaps: list[float] = []
    run = engine.backend.run

    def watched(steps):
        outputs = run(steps)
        if len(outputs[0].logits):
            second, best = np.partition(outputs[0].logits[-1], -2)[-2:]
            gaps.append(float(best - second))
        return outputs

    engine.backend.run = watched  # type: ignore[method-assign]
    return gaps


def answer(asked, prompt: list[int]) -> tuple[tuple[int, ...], int]:
    """(tokens, reused) of an engine or a session."""
    generation = asked.generate(prompt, max_tokens=REPLY)
    for _ in generation:
        pass
    return generation.result.tokens, generation.result.cache.reused_tokens


def from_sessions(options: argparse.Namespace, turns: list[Turn]) -> Score:
    score = Score()
    with opened(options) as engine:
        for i in range(options.conversations):
            with engine.session() as session:
                for turn in (t for t in turns if t.conversation == i):
                    score.add(turn, *answer(session, turn.prompt), options.tie)
    return score


def from_cache(options: argparse.Namespace, turns: list[Turn], cache: CacheOptions) -> Score:
    score = Score()
    with opened(options, cache) as engine:
        for turn in turns:
            score.add(turn, *answer(engine, turn.prompt), options.tie)
            assert engine.cache is not None
            if cache.folder is not None:
                engine.cache.flush()
    return score


def least_bytes(options: argparse.Namespace) -> int:
    """Memory for one context, and for the bookkeeping of what the folder holds."""
    with opened(options) as engine:
        return Geometry.of(engine.layout).most_bytes(options.context) + (64 << 20)


def after_kills(options: argparse.Namespace, turns: list[Turn], folder: Path, least: int) -> tuple[Score, int]:
    """All turns but the last are answered by processes that are killed; then the last ones, from what is left."""
    work, r = folder / "turns.json", random.Random(options.seed)
    first, last = ([t for t in turns if (t.number == options.turns - 1) == is_last] for is_last in (False, True))
    work.write_text(json.dumps([t.prompt for t in first]))
    done, kills = 0, 0
    while done < len(first):
        command = [sys.executable, __file__, str(options.bundle), "--backend", options.backend, "--context"]
        command += [str(options.context), "--answer", str(work), "--from", str(done), "--folder", str(folder / "cache")]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        end = time.monotonic() + r.uniform(0.5, 1.5) * options.life
        for line in child.stdout:
            done = int(line) + 1
            if time.monotonic() > end:
                break
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        kills += 1
    cache = CacheOptions(bytes=least, folder=folder / "cache", disk_bytes=DISK)
    return from_cache(options, last, cache), kills


def answer_for_ever(options: argparse.Namespace) -> None:
    prompts = json.loads(options.answer.read_text())
    cache = CacheOptions(folder=options.folder, disk_bytes=DISK)
    with opened(options, cache) as engine:
        for i in range(options.start, len(prompts)):
            answer(engine, prompts[i])
            print(i, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--backend", default="onnxruntime-float")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=500, help="tokens of a first prompt, at most")
    parser.add_argument("--more", type=int, default=60, help="tokens that a turn adds, at most")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tie", type=float, default=1e-3, help="logits closer than this may change places")
    parser.add_argument("--life", type=float, default=4.0, help="seconds that a process lives before it is killed")
    parser.add_argument("--seed", type=int, default=0)
    for hidden, kind in (("--answer", Path), ("--folder", Path)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="start", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer is not None:
        answer_for_ever(options)
        return
    with opened(options) as engine:
        turns = conversations(engine, options)
    least = least_bytes(options)
    print(f"{options.conversations} conversations of {options.turns} turns, {options.backend}", flush=True)
    print(f"  own rows of a session: {from_sessions(options, turns)}", flush=True)
    print(f"  from memory:           {from_cache(options, turns, CacheOptions(bytes=4 << 30))}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        cache = CacheOptions(bytes=least, folder=Path(folder), disk_bytes=DISK)
        print(f"  from files:            {from_cache(options, turns, cache)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        score, kills = after_kills(options, turns, Path(folder), least)
        print(f"  after {kills} kill -9:      {score}", flush=True)


if __name__ == "__main__":
    main()
