"""Ends replies of the built-in model, or another, at random moments: how long does it take, and what is left behind?

    python scripts/check_cancel.py --trials 1000 [BUNDLE]

Ways: `cancel` from another thread, a deadline, cancelling an asyncio task, closing a session's reply; in short and long
prompts and in replies, alone and while another thread generates. A reply has to end with the step that runs at that
moment, or with the next one if that was about to begin. Afterwards the pools hold what they held before, and the next
reply, in the same session where there is one, has the tokens of a fresh engine. Times are those of this machine with
whatever else it does.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mimo_edge import Engine
from mimo_edge.bundle import BUILT_IN
from mimo_edge.generation import Generation
from mimo_edge.session import Session

WAYS = ("cancel", "deadline", "task", "session")
FOLLOWING = 6  # tokens of the next reply
USUAL = 16  # tokens of a reply: half of the moments are spread over it, half over its prompt


@dataclass
class Steps:
    """Steps of an engine: which reply, from when to when."""

    spans: list[tuple[int, float, float]] = field(default_factory=list)

    def watch(self, engine: Engine) -> None:
        inner = engine._step

        def step(generation: Generation) -> None:
            name, began = id(generation.request), time.perf_counter()
            try:
                inner(generation)
            finally:
                self.spans.append((name, began, time.perf_counter()))

        engine._step = step  # type: ignore[method-assign]

    def after(self, generation: Generation, moment: float) -> tuple[int, float]:
        """(steps of a reply that began after a moment, when it and its last step were through)."""
        own = [(began, ended) for name, began, ended in self.spans if name == id(generation.request)]
        return sum(began > moment for began, _ in own), max((moment, *(ended for _, ended in own)))


class Check:
    """`fresh` opens an engine like `engine`, which it ends replies of; `prompts` are token ids."""

    def __init__(self, engine: Engine, fresh: Callable[[], Engine], prompts: list[list[int]], seed: int):
        self.engine, self.prompts, self.random = engine, prompts, random.Random(seed)
        with fresh() as other:
            self.expected = [tokens_of(other.generate(p, max_tokens=FOLLOWING)) for p in prompts]
            self.seconds = [[seconds(other.generate(p, max_tokens=n)) for n in (1, USUAL)] for p in prompts]
        self.steps = Steps()
        self.steps.watch(engine)
        self.latency: dict[str, list[float]] = defaultdict(list)
        self.beyond: list[float] = []  # seconds between the end of the last step and that of the reply
        self.interrupted = self.late = self.wrong = 0
        self.ends: dict[str, int] = defaultdict(int)

    def trial(self) -> None:
        way, i = self.random.choice(WAYS), self.random.randrange(len(self.prompts))
        prompt, moment = self.prompts[i], self.random.random() * self.random.choice(self.seconds[i])
        with self._neighbour(self.random.random() < 0.5):
            if way == "session":
                with self.engine.session() as session:
                    self._end(self._cancel, session.generate(prompt), moment)
                    self._follow(session)
            elif way == "task":
                asyncio.run(self._task(prompt, moment))
            elif way == "deadline":
                self._end(None, self.engine.generate(prompt, deadline=max(moment, 1e-6)), moment)
            else:
                self._end(self._cancel, self.engine.generate(prompt), moment)
            self._follow(self.engine)
        self.engine.pools.check_integrity()
        self.wrong += self.engine.pools.rings.used != 0

    def _end(self, interrupt: Callable | None, generation: Generation, wait: float) -> None:
        """Iterates in this thread; another one interrupts, or the deadline `wait` does."""
        at = [generation._began + wait]
        thread = threading.Thread(target=interrupt, args=(generation, wait, at)) if interrupt else None
        if thread:
            thread.start()
        for _ in generation:
            pass
        ended = time.perf_counter()
        if thread:
            thread.join()
        self._judge(generation, at[0], ended)

    @staticmethod
    def _cancel(generation: Generation, wait: float, at: list[float]) -> None:
        time.sleep(wait)
        generation.cancel()
        at[0] = time.perf_counter()

    async def _task(self, prompt: list[int], wait: float) -> None:
        reply = self.engine.agenerate(prompt)

        async def read() -> None:
            async for _ in reply:
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(wait)
        task.cancel()
        await asyncio.wait([task])
        at = time.perf_counter()
        await reply.aclose()
        if reply._reply.generation is not None:
            self._judge(reply._reply.generation, at, time.perf_counter())

    def _judge(self, generation: Generation, moment: float, ended: float) -> None:
        reason = generation.result.finish_reason
        self.ends[reason] += 1
        if reason not in ("cancelled", "deadline"):
            return  # it was through before
        begun, through = self.steps.after(generation, moment)
        self.interrupted += 1
        self.late += begun > 1
        self.beyond.append(ended - through)
        self.latency["in a reply" if generation.tokens else "in a prompt"].append(ended - moment)

    def _follow(self, asked: Engine | Session) -> None:
        i = self.random.randrange(len(self.prompts))
        self.wrong += tokens_of(asked.generate(self.prompts[i], max_tokens=FOLLOWING)) != self.expected[i]
        self.steps.spans.clear()

    @contextmanager
    def _neighbour(self, there: bool) -> Iterator[None]:
        """Another thread that generates meanwhile; its tokens have to be right too."""
        stop = threading.Event()

        def generate() -> None:
            while not stop.is_set():
                i = random.randrange(len(self.prompts))
                self.wrong += tokens_of(self.engine.generate(self.prompts[i], max_tokens=FOLLOWING)) != self.expected[i]

        thread = threading.Thread(target=generate)
        if there:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            if there:
                thread.join()


def tokens_of(generation: Generation) -> tuple[int, ...]:
    for _ in generation:
        pass
    return generation.result.tokens


def seconds(generation: Generation) -> float:
    began = time.perf_counter()
    tokens_of(generation)
    return time.perf_counter() - began


def report(check: Check) -> str:
    lines = [f"replies by end: {dict(check.ends)}"]
    for phase, seconds in sorted(check.latency.items()):
        line = ", ".join(f"{name} {1e3 * quantile(seconds, q):.1f}" for name, q in (("median", 0.5), ("99 %", 0.99)))
        lines.append(f"{phase}: {len(seconds)} ended early; ms to the end: {line}, most {1e3 * max(seconds):.1f}")
    lines.append(
        f"ms behind the last step: median {1e3 * quantile(check.beyond, 0.5):.2f}, "
        f"99 % {1e3 * quantile(check.beyond, 0.99):.2f}, most {1e3 * max(check.beyond):.2f}"
    )
    lines.append(f"ended more than a step later: {check.late}; wrong afterwards: {check.wrong}")
    return "\n".join(lines)


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", default=BUILT_IN)
    parser.add_argument("--trials", type=int, default=1000, help="replies that are ended early")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()

    def fresh() -> Engine:
        return Engine.open(
            options.bundle, "onnxruntime-float", max_context=256, sessions=3, threads=options.threads, chunk=32
        )

    with fresh() as engine:
        said = ["pick up the red cup", "turn on the kitchen light", "what can you see?"]
        prompts = [engine.text.encode_chat([{"role": "user", "content": text}]) for text in said]
        prompts += [(prompts[i] * 20)[: 80 + 50 * i] for i in range(3)]
        check = Check(engine, fresh, prompts, options.seed)
        while check.interrupted < options.trials:
            check.trial()
    print(report(check))
    sys.exit(bool(check.late or check.wrong))


if __name__ == "__main__":
    main()
