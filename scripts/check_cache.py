"""Random conversations through every tier of the prefix cache, compared with the same ones without a cache.

    python scripts/check_cache.py gemma --conversations 200 --backend onnxruntime-float --work progress

Turns append, edit, take back, branch off, and leave out the last reply, as chat templates do; half of the conversations
begin alike, and three in ten begin with more than a window. Greedy tokens must be equal (a) from a session's own rows,
(b) from memory, (c) from files, with nothing left in memory, (d) from files after the processes that wrote them were
killed (SIGKILL) at random moments. Where they differ, the gap between the best two logits without a cache says whether
that was a tie. Conversations go through in groups; with --work a second run continues behind the last whole group.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import _bench
import numpy as np

from mimo_edge.cache import CacheOptions
from mimo_edge.engine import Engine

GROUP = 20  # conversations at a time, whose turns alternate
MEMORY, DISK = 4 << 30, 8 << 30
WAYS = ("own rows of a session", "from memory", "from files", "after kill -9")


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
    restored: int = 0  # replies that did not begin with nothing
    prompt_tokens: int = 0
    reused_tokens: int = 0
    widest: float = 0.0  # gap at a difference
    kills: int = 0

    def add(self, turn: Turn, tokens: tuple[int, ...], reused: int, tie: float) -> None:
        self.turns += 1
        self.restored += reused > 0
        self.prompt_tokens += len(turn.prompt)
        self.reused_tokens += reused
        if list(tokens) == turn.reply:
            self.equal += 1
            return
        at = next(i for i, (a, b) in enumerate(zip(tokens, turn.reply, strict=False)) if a != b)
        self.ties += turn.gaps[at] < tie
        self.widest = max(self.widest, turn.gaps[at])

    def __add__(self, other: Score) -> Score:
        mine, theirs = asdict(self), asdict(other)
        return Score(**{k: max(mine[k], theirs[k]) if k == "widest" else mine[k] + theirs[k] for k in mine})

    @property
    def wrong(self) -> int:
        return self.turns - self.equal - self.ties

    def __str__(self) -> str:
        share = f"{self.restored} continue stored rows, {self.reused_tokens / max(1, self.prompt_tokens):.0%} of tokens"
        kills = f"; {self.kills} kills" if self.kills else ""
        return (
            f"{self.turns} replies, {self.equal} equal, {self.ties} differ at a tie (widest gap {self.widest:.2g}), "
            f"{self.wrong} WRONG; {share}{kills}"
        )


@contextmanager
def opened(options: argparse.Namespace, cache: CacheOptions | None = None) -> Iterator[Engine]:
    context, threads = options.context, options.threads
    with Engine.open(options.bundle, options.backend, max_context=context, threads=threads, cache=cache) as engine:
        yield engine


def conversations(engine: Engine, options: argparse.Namespace, group: int) -> list[Turn]:
    """Every turn of a group answered without a cache."""
    r, words = random.Random(f"{options.seed} {group}"), engine.text.encode(_bench.prose(), special=False)
    gaps = watch(engine)
    window = max((a.window for a in engine.spec.attention.values() if a.window), default=options.first // 2)
    turns = []
    first = group * GROUP
    histories: dict[int, list[int]] = {i: [] for i in range(first, min(first + GROUP, options.conversations))}
    for number in range(options.turns):
        for i, history in histories.items():
            added = more(words, r, options.more) if number else beginning(words, r, window, options.first)
            prompt = [*edited(history, r), *added][: options.context - options.reply]
            gaps.clear()
            reply = list(answer(engine, prompt, options.reply)[0])
            turns.append(Turn(i, number, prompt, reply, list(gaps)))
            histories[i] = prompt + (reply if r.random() < 0.7 else [])  # or the template left it out
    return turns


def beginning(words: list[int], r: random.Random, window: int, most: int) -> list[int]:
    """More than a window, or a part of one; with what others begin with, or without."""
    is_long = r.random() < 0.3 and window < most
    shared = (window + (most - window) // 3 if is_long else min(window, most) // 10) if r.random() < 0.5 else 0
    return words[:shared] + more(words, r, (most if is_long else min(window, most) // 4) - shared, is_long)


def more(words: list[int], r: random.Random, most: int, all_of_it: bool = False) -> list[int]:
    at = r.randrange(len(words) - 2 * most)
    return words[at : at + (most if all_of_it else r.randint(max(1, most // 4), most))]


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


def answer(asked, prompt: list[int], tokens: int) -> tuple[tuple[int, ...], int]:
    """(tokens, reused) of an engine or a session."""
    generation = asked.generate(prompt, max_tokens=tokens)
    for _ in generation:
        pass
    return generation.result.tokens, generation.result.cache.reused_tokens


def from_sessions(options: argparse.Namespace, turns: list[Turn]) -> Score:
    score = Score()
    with opened(options) as engine:
        for i in sorted({t.conversation for t in turns}):
            with engine.session() as session:
                for turn in (t for t in turns if t.conversation == i):
                    score.add(turn, *answer(session, turn.prompt, options.reply), options.tie)
    return score


def from_cache(options: argparse.Namespace, turns: list[Turn], folder: Path | None) -> Score:
    """With a folder, what is restored comes from there: after every reply memory is emptied."""
    score = Score()
    with opened(options, CacheOptions(bytes=MEMORY, folder=folder, disk_bytes=DISK)) as engine:
        cache = engine.cache
        assert cache is not None
        for turn in turns:
            score.add(turn, *answer(engine, turn.prompt, options.reply), options.tie)
            if folder is not None:
                cache.flush()
                for snapshot in [s for s in cache.prefix.have.snapshots.values() if s.in_memory]:
                    cache.prefix.evict(snapshot, "memory")
    return score


def after_kills(options: argparse.Namespace, turns: list[Turn], folder: Path) -> Score:
    """All turns but the last are answered by processes that are killed; then the last ones, from what is left."""
    work, r = folder / "turns.json", random.Random(options.seed)
    first, last = ([t for t in turns if (t.number == options.turns - 1) == is_last] for is_last in (False, True))
    work.write_text(json.dumps([t.prompt for t in first]))
    command = [sys.executable, __file__, str(options.bundle), "--backend", options.backend, "--context"]
    command += [str(options.context), "--threads", str(options.threads), "--answer", str(work)]
    command += ["--reply", str(options.reply), "--folder", str(folder / "cache")]
    done, kills = 0, 0
    while done < len(first):
        child = subprocess.Popen([*command, "--from", str(done)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        death = threading.Timer(r.uniform(0.0, 2.0) * options.life, child.kill)
        for line in child.stdout:
            if death.ident is None:
                death.start()  # its first reply is there: now it may die at any moment
            done = int(line) + 1
        death.cancel()
        kills += child.wait() < 0
        child.stdout.close()
    score = from_cache(options, last, folder / "cache")
    score.kills = kills
    return score


def answer_for_ever(options: argparse.Namespace) -> None:
    prompts = json.loads(options.answer.read_text())
    cache = CacheOptions(folder=options.folder, disk_bytes=DISK)
    with opened(options, cache) as engine:
        for i in range(options.start, len(prompts)):
            answer(engine, prompts[i], options.reply)
            print(i, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--backend", default="onnxruntime-float")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=500, help="tokens of a first prompt, at most")
    parser.add_argument("--more", type=int, default=60, help="tokens that a turn adds, at most")
    parser.add_argument("--reply", type=int, default=6, help="tokens of a reply")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tie", type=float, default=1e-3, help="logits closer than this may change places")
    parser.add_argument("--life", type=float, default=3.0, help="seconds from a first reply to SIGKILL, on average")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, help="a folder for what is done; the same command goes on there")
    parser.add_argument("--seed", type=int, default=0)
    for hidden, kind in (("--answer", Path), ("--folder", Path)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--from", dest="start", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer is not None:
        answer_for_ever(options)
        return
    print(f"{options.conversations} conversations of {options.turns} turns, {options.backend}", flush=True)
    total: dict[str, Score] = {}
    with tempfile.TemporaryDirectory() if options.work is None else nullcontext(options.work) as work:
        Path(work).mkdir(parents=True, exist_ok=True)
        asked = {k: str(v) for k, v in vars(options).items() if k != "work"}
        if kept(Path(work) / "options.json", lambda: asked) != asked:
            _bench.refuse(f"{work} holds results of other options")
        for group in range(-(-options.conversations // GROUP)):
            for way, score in through(options, Path(work), group).items():
                total[way] = total.get(way, Score()) + score
            print(f"{min(options.conversations, (group + 1) * GROUP)} conversations:", flush=True)
            for way, score in total.items():
                print(f"  {way + ':':23s}{score}", flush=True)
    if any(score.wrong for score in total.values()):
        raise SystemExit(1)


def through(options: argparse.Namespace, work: Path, group: int) -> dict[str, Score]:
    """One group through all ways; what an earlier run found out is taken from `work`."""
    turns = [Turn(**t) for t in kept(work / f"turns-{group}.json", lambda: without_cache(options, group))]
    ways = {
        WAYS[0]: lambda folder: from_sessions(options, turns),
        WAYS[1]: lambda folder: from_cache(options, turns, None),
        WAYS[2]: lambda folder: from_cache(options, turns, folder),
        WAYS[3]: lambda folder: after_kills(options, turns, folder),
    }

    def score(way: str) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            return asdict(ways[way](Path(folder)))

    return {w: Score(**kept(work / f"way{i}-{group}.json", partial(score, w))) for i, w in enumerate(WAYS)}


def without_cache(options: argparse.Namespace, group: int) -> list[dict]:
    with opened(options) as engine:
        return [asdict(t) for t in conversations(engine, options, group)]


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What the file says, or what `make` returns, written there."""
    if not path.exists():
        temp = path.with_suffix(".partial")
        temp.write_text(json.dumps(make()))
        temp.replace(path)
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
