"""What a model is put through on every backend. A scenario leaves rows of logits and replies; parity_judge.py compares
them with the oracle, which sees each text as a whole and has no cache.

Texts are random with fixed seeds. Memory that was not written is NaN, and a neighbour lies in front of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from parity_models import Model
from tokenizers import Tokenizer, models

from mimo_edge.backends.base import Step
from mimo_edge.backends.cuda_steps import part_of
from mimo_edge.cache import CacheOptions
from mimo_edge.engine import Engine
from mimo_edge.kv.layout import KvLayout, plan_layout
from mimo_edge.kv.pools import KvPools
from mimo_edge.spec import MAX_DRAFTS
from mimo_edge.text import Text


@dataclass(frozen=True)
class Part:
    """Logits [len(rows), vocab] behind some rows of a text; with `head`, those of that MTP head behind the last row,
    which saw no row before `held`."""

    text: NDArray[np.int64]
    rows: NDArray[np.int64]
    logits: NDArray[np.float32]
    head: int | None = None
    held: int = 0


@dataclass(frozen=True)
class Reply:
    """Tokens chosen greedily behind a prompt."""

    prompt: NDArray[np.int64]
    tokens: tuple[int, ...]


@dataclass
class Outcome:
    parts: list[Part] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)


class Place:
    """A sequence of a backend whose memory was just allocated."""

    def __init__(self, backend: Any, model: Model, heads: int = 0):
        self.backend, self.n = backend, 0
        chunk = getattr(backend, "chunk", model.chunk)
        element = getattr(backend, "element_bytes", 4)
        layout = plan_layout(model.spec, model.context, 2, element, heads=heads, chunk=chunk)
        backend.allocate(layout)
        poison(backend)
        pools = KvPools(layout)
        pools.admit(1)
        self.layout: KvLayout = layout
        self.slots = pools.admit(model.context)

    def run(self, tokens: NDArray[np.int64], rows: NDArray[np.int64], accepted: int | None = None):
        """Evaluates tokens behind the committed ones, commits those accepted (None: all); logits of `rows`."""
        (out,) = self.backend.run([Step(self.slots, self.n, tokens, rows)])
        logits = out.logits.copy()
        self._commit(len(tokens) if accepted is None else accepted)
        return logits

    def prefill(self, tokens: NDArray[np.int64], chunk: int) -> None:
        for at in range(0, len(tokens), chunk):
            self.run(tokens[at : at + chunk], np.array([], np.int64))

    def best(self, tokens: NDArray[np.int64], accept: Callable[[list[int]], int]) -> list[int]:
        """The best token behind each row; `accept` says how many rows are committed."""
        step = Step(self.slots, self.n, tokens, np.arange(len(tokens)))
        if hasattr(self.backend, "best"):
            following = self.backend.best(step).tolist()
        else:
            following = self.backend.run([step])[0].logits.argmax(1).tolist()
        self._commit(accept(following))
        return following

    def _commit(self, rows: int) -> None:
        self.backend.commit([rows])
        self.n += rows


def poison(backend: Any) -> None:
    """NaN wherever keys and values are kept and nothing was written."""
    for keys, values in getattr(backend, "_pools", ()):
        keys[:], values[:] = np.nan, np.nan
    for name, buffer in backend.programs.buffers.items() if hasattr(backend, "programs") else ():
        if part_of(buffer) == "kv" and buffer.fill is None and name in backend._arenas["kv"].address:
            backend._arenas["kv"].fill(name, 0xFF)
    if hasattr(backend, "driver"):
        backend.driver.sync()


def some(count: int) -> NDArray[np.int64]:
    """Up to 12 rows of a step, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, 12).astype(np.int64))


def in_steps(place: Place, text: NDArray[np.int64], sizes: list[int]) -> Part:
    rows, logits, at = [], [], 0
    for size in sizes:
        asked = some(size)
        logits.append(place.run(text[at : at + size], asked))
        rows.append(at + asked)
        at += size
    return Part(text[:at], np.concatenate(rows), np.concatenate(logits))


def whole(backend: Any, model: Model, folder: Path) -> Outcome:
    """A prompt in one step."""
    text = model.random(model.whole, 1)
    return Outcome([in_steps(Place(backend, model), text, [len(text)])])


def chunked(backend: Any, model: Model, folder: Path) -> Outcome:
    """A prompt in odd steps."""
    text = model.random(sum(model.odd), 2)
    return Outcome([in_steps(Place(backend, model), text, list(model.odd))])


def past_the_window(backend: Any, model: Model, folder: Path) -> Outcome:
    """Single rows from in front of the window's end to where the ring has wrapped."""
    count = model.reply
    first = max(1, model.window + 12 - count)
    text, place = model.random(first + count, 3), Place(backend, model)
    place.prefill(text[:first], model.chunk)
    logits = [place.run(text[at : at + 1], np.array([0])) for at in range(first, first + count)]
    return Outcome([Part(text, np.arange(first, first + count), np.concatenate(logits))])


def drafts(backend: Any, model: Model, folder: Path) -> Outcome:
    """Four rows a step of which some are rejected, and later overwritten, over the ring's end; then greedy tokens row
    by row, and with drafts of which every fifth is wrong."""
    outcome, first = Outcome(), max(1, model.window + 12 - model.reply)
    text, place = model.random(first + model.reply + 4, 4), Place(backend, model)
    place.prefill(text[:first], model.chunk)
    rows, logits, turn = [], [], 0
    while place.n < first + model.reply:
        right = (1, 4, 0, 3, 2)[turn % 5]
        step = text[place.n : place.n + 4].copy()
        step[max(1, right) :] = (step[max(1, right) :] + 1) % model.spec.vocab_size
        rows.append(place.n + np.arange(max(1, right)))
        logits.append(place.run(step, np.arange(4), right)[: max(1, right)])
        turn += 1
    outcome.parts.append(Part(text, np.concatenate(rows), np.concatenate(logits)))
    prompt = model.random(first, 5)
    plain = greedy(Place(backend, model), model, prompt, ())
    drafted = greedy(Place(backend, model), model, prompt, plain)
    outcome.replies += [Reply(prompt, plain), Reply(prompt, drafted)]
    return outcome


def greedy(place: Place, model: Model, prompt: NDArray[np.int64], foretold: tuple[int, ...]) -> tuple[int, ...]:
    """A reply; with one that is foretold, its next three tokens are a step's drafts, every fifth of them spoiled."""
    place.prefill(prompt[:-1], model.chunk)
    tokens = [int(prompt[-1])]  # the last one is pending
    while len(tokens) <= model.reply:
        ahead = [(t + (p % 5 == 0)) % model.spec.vocab_size for p, t in enumerate(foretold)]
        step = [tokens[-1], *ahead[len(tokens) - 1 :][:MAX_DRAFTS]]

        def accept(following: list[int], step: list[int] = step) -> int:
            held = next((i for i, (d, t) in enumerate(zip(step[1:], following, strict=False)) if d != t), len(step) - 1)
            return 1 + held

        before = place.n
        following = place.best(np.array(step), accept)
        tokens += following[: place.n - before]
    return tuple(tokens[1 : model.reply + 1])


def mtp(backend: Any, model: Model, folder: Path) -> Outcome:
    """What heads draft behind a prompt; then the engine's tokens with none and with as many drafts as heads."""
    heads, outcome = backend.heads, Outcome()
    n = model.window + 9
    text, place = model.random(n + heads + 1, 6), Place(backend, model, heads)
    place.prefill(text[:n], model.chunk)
    window = place.layout.head_attention.window
    start = 0 if window is None else max(0, n - MAX_DRAFTS - window)
    for m in range(heads):
        logits = backend.draft(place.slots, m, start, start, text[start + 1 + m : n + 1 + m]).copy()
        outcome.parts.append(Part(text, np.array([n - 1]), logits[None], m, start))
    for prompt in model.prompts:
        for count in (0, heads):
            with engine_over(backend, model, drafts=count) as engine:
                generation = engine.generate(prompt.tolist(), max_tokens=model.reply)
                list(generation)
                outcome.replies.append(Reply(prompt, generation.result.tokens))
    return outcome


def prefix_hit(backend: Any, model: Model, folder: Path) -> Outcome:
    """Rows of an earlier prompt out of memory, in another place, and a reply behind them."""
    prompt = model.random(model.cached, 7)
    with (
        engine_over(backend, model, drafts=0, cache=CacheOptions(bytes=1 << 29)) as engine,
        engine.session() as first,
        engine.session() as second,
    ):
        list(first.generate(prompt.tolist(), max_tokens=1))
        return continued(engine, second, np.append(prompt, 7), min(8, model.reply))


def from_disk(backend: Any, model: Model, folder: Path) -> Outcome:
    """Rows that an engine left in files, in an engine that never saw the prompt."""
    prompt, cache = model.random(model.cached, 8), CacheOptions(bytes=1 << 29, folder=folder)
    with engine_over(backend, model, drafts=0, cache=cache) as engine:
        list(engine.generate(prompt.tolist(), max_tokens=1))
        engine.cache.flush()
    with engine_over(backend, model, drafts=0, cache=cache) as engine, engine.session() as session:
        outcome = continued(engine, session, np.append(prompt, 7), min(8, model.reply))
        assert engine.cache.disk.counters["loaded"] == 1
        return outcome


def continued(engine: Engine, session: Any, prompt: NDArray[np.int64], count: int) -> Outcome:
    """A greedy reply whose prompt but for the last token was cached, from logits that are kept."""
    kept, run = [], engine.backend.run

    def noting(steps: Any) -> Any:
        outputs = run(steps)
        kept.extend((s.start + s.logit_rows, o.logits.copy()) for s, o in zip(steps, outputs, strict=True))
        return outputs

    backend = engine.backend
    with patch.object(backend, "run", noting), patch.object(backend, "best", None, create=True):
        generation = session.generate(prompt.tolist(), max_tokens=count)
        list(generation)
    assert generation.result.cache.reused_tokens == len(prompt) - 1
    text = np.append(prompt, generation.result.tokens).astype(np.int64)
    part = Part(text, np.concatenate([r for r, _ in kept]), np.concatenate([x for _, x in kept]))
    return Outcome([part], [Reply(prompt, generation.result.tokens)])


@contextmanager
def engine_over(backend: Any, model: Model, **options: Any) -> Iterator[Engine]:
    """An engine over a backend that stays open afterwards."""
    text = Text(Tokenizer(models.WordLevel({}, "")), model.spec)
    allocate = backend.allocate

    def poisoned(layout: KvLayout) -> None:
        allocate(layout)
        poison(backend)

    with patch.object(backend, "close", lambda: None), patch.object(backend, "allocate", poisoned):
        fingerprint, context = model.bundle.fingerprint, model.context
        with Engine(
            model.spec, text, backend, max_context=context, sessions=2, fingerprint=fingerprint, **options
        ) as engine:
            yield engine


SCENARIOS: dict[str, Callable[[Any, Model, Path], Outcome]] = {
    "prefill, whole": whole,
    "prefill, odd steps": chunked,
    "decode past the window": past_the_window,
    "drafts, some rejected": drafts,
    "MTP heads, 0 and 3 drafts": mtp,
    "prefix hit": prefix_hit,
    "restored from disk": from_disk,
}
