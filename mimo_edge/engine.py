"""The engine: one model, its memory, and the loop that every token goes through."""

from __future__ import annotations

import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from functools import partial
from pathlib import Path
from types import TracebackType

from mimo_edge.backends import registry
from mimo_edge.backends.base import Backend, Step
from mimo_edge.bundle import TOKENIZER, Bundle
from mimo_edge.cache import CacheOptions, EngineCache
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.generation import Generation
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.lineage import Lineage
from mimo_edge.kv.pools import KvPools
from mimo_edge.kv.sequence import Sequence
from mimo_edge.params import stored_tensors
from mimo_edge.request import DEFAULT_MAX_TOKENS, GREEDY, MemoryUse, Request, SamplingParams
from mimo_edge.session import Session
from mimo_edge.spec import MAX_DRAFTS, ModelSpec
from mimo_edge.text import Message, Text
from mimo_edge.turns import Turns
from mimo_edge.warm import WarmSequences

log = logging.getLogger("mimo_edge")
LONGEST_TOKEN = 256  # characters; vocabularies stay well below
CHUNK = 256  # rows of a prefill step: enough to use every core, little enough that a cancel is heard soon


class Engine:
    """Generates text with one model. Threads may share it: a step runs at a time, generations take turns.

    with Engine.open("gemma") as engine:
        for piece in engine.generate("The old lighthouse", max_tokens=50):
            print(piece, end="", flush=True)
    """

    def __init__(
        self,
        spec: ModelSpec,
        text: Text,
        backend: Backend,
        *,
        max_context: int | None = None,
        sessions: int = 1,
        chunk: int | None = None,
        load_s: float = 0.0,
        cache: CacheOptions | None = None,
        fingerprint: str = "",
    ):
        """Takes the backend over (close() closes it) and allocates the KV pools. `open` is the usual way in.

        With `cache`, prompts reuse rows of earlier ones; `fingerprint` names the model there.
        """
        self.spec, self.text, self.backend, self.load_s = spec, text, backend, load_s
        self.chunk: int = getattr(backend, "chunk", CHUNK) if chunk is None else chunk
        element_bytes = getattr(backend, "element_bytes", 4)
        self.layout = plan_layout(spec, resolve_context(spec, max_context), sessions, element_bytes)
        self.pools = KvPools(self.layout)
        self._lock = threading.RLock()  # dropped generations may be collected, and give room back, inside a step
        self._turns, self._warm = Turns(), WarmSequences()
        self._closed = False
        self.cache = EngineCache(backend, self.layout, fingerprint, cache, self._lock) if cache else None
        try:
            backend.allocate(self.layout)
        except (MemoryError, ValueError, OverflowError):  # numpy's ways of saying that no address space holds it
            kv = self.layout.full_bytes + self.layout.window_bytes
            raise MimoEdgeError(
                f"no memory for {kv:,} bytes of KV cache ({sessions} x {self.layout.context} tokens): "
                "choose a smaller --context"
            ) from None

    @staticmethod
    def open(
        path: str | Path,
        backend: str = "auto",
        max_context: int | None = None,
        sessions: int = 1,
        threads: int | None = None,
        cache: CacheOptions | None = None,
    ) -> Engine:
        """Loads a bundle. `sessions` is how many sequences of `max_context` tokens (default: the bundle's) it holds.
        Without `cache`, only sessions reuse rows.

        Raises BadInputError on a damaged bundle or a value out of range, UnsupportedError when the backend's library
        is not installed, MimoEdgeError when memory runs out.
        """
        began = time.perf_counter()
        cores = os.cpu_count() or 1
        for name, value, most in (("sessions", sessions, 4096), ("threads", threads, cores)):
            if value is not None and not 1 <= value <= most:
                raise BadInputError(f"{name} {value} is out of range (allowed: 1 to {most})")
        bundle = Bundle.open(path)
        resolve_context(bundle.spec, max_context)  # before the weights are loaded
        text = Text.open(bundle.file(TOKENIZER), bundle.spec, bundle.chat_template)
        loaded = registry.load(backend, bundle, threads)
        engine = Engine(
            bundle.spec,
            text,
            loaded,
            max_context=max_context,
            sessions=sessions,
            cache=cache,
            fingerprint=bundle.fingerprint,
        )
        engine.load_s = time.perf_counter() - began
        return engine

    def generate(
        self,
        prompt: str | Tokens[int],
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        sampling: SamplingParams = GREEDY,
        stop: str | Iterable[str] = (),
        tenant: str = "",
        marks: Tokens[int] = (),
        session_id: str | None = None,
    ) -> Generation:
        """One reply to a text or to token ids. Room for all of it is taken now and given back at the end of the reply.

        Requests of different `tenant`s share no cached rows. `marks` are token positions behind which the next prompt
        is likely to differ; they only steer what is cached. The rows of a `session_id` stay in place for its next
        request, as long as nobody needs the room; of two at once, the last to finish leaves its own.
        Raises BadInputError on an empty or too long prompt, MimoEdgeError when open sessions leave no room.
        """
        request = self.request(prompt, max_tokens, sampling, stop, tenant, marks)
        if session_id is None:
            sequence = self._admit(min(self.layout.context, len(request.prompt) + max_tokens))
            on_end = partial(self.release, sequence)
        else:
            sequence = self._warm_up((tenant, session_id))
            on_end = partial(self._keep_warm, (tenant, session_id), sequence)
        try:
            return Generation(self, sequence, request, on_end)
        except BaseException:  # a value of a wrong type: the room goes back before anybody hears of it
            self.release(sequence)
            raise

    def session(self, tenant: str = "", messages: Iterable[Message] = ()) -> Session:
        """A conversation that keeps its KV cache between replies; takes room for a whole context until it is closed.

        `messages` are what was said before.
        """
        return Session(self, self._admit(self.layout.context), tenant, messages)

    def request(
        self,
        prompt: str | Tokens[int],
        max_tokens: int,
        sampling: SamplingParams,
        stop: str | Iterable[str],
        tenant: str = "",
        marks: Tokens[int] = (),
    ) -> Request:
        """What was asked, checked: token ids that the model knows and that leave room in the context."""
        if isinstance(prompt, str):
            if len(prompt) > self.layout.context * LONGEST_TOKEN:  # do not spend minutes on tokenising it
                raise BadInputError(
                    f"the prompt has {len(prompt):,} characters, more than the context of {self.layout.context} tokens "
                    "can hold: shorten the prompt"
                )
            tokens = self.text.encode(prompt) if prompt else []
        else:
            tokens = list(prompt)
            self.text.check(tokens)
        if len(tokens) > self.layout.context:
            raise BadInputError(
                f"the prompt has {len(tokens)} tokens and the context {self.layout.context}: shorten the prompt, or "
                f"raise --context (this model allows {self.spec.max_context})"
            )
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return Request(tuple(tokens), max_tokens, sampling, stops, tenant, tuple(marks))

    def step(self, generation: Generation) -> int | None:
        """Evaluates the next rows of one reply; the token that follows them, None while its prompt is not through."""
        with self._turns.turn(generation.left), self._lock:
            self._check_open()
            plan = generation.plan(self.chunk)
            token = self._evaluate(generation, plan)
            self._commit(generation.sequence, plan.tokens.tolist())
            lineage = generation.lineage
            if self.cache and lineage and lineage.due(len(generation.sequence.tokens)):
                # the end of a prompt is soon superseded by that of its reply
                self.cache.save(lineage, generation.sequence, lasting=token is None)
        return token

    def _evaluate(self, generation: Generation, plan: Step) -> int | None:
        """Runs a plan; the token behind its last row, None where the prompt goes on. Greedy tokens come from the device
        where the backend can tell them, without the logits."""
        best = getattr(self.backend, "best", None)
        if best and generation.greedy and len(plan.logit_rows) and len(plan.tokens) <= MAX_DRAFTS + 1:
            return generation.take_best(int(best(plan)[-1]))
        [output] = self.backend.run([plan])
        return generation.choose(output)

    def begin(self, sequence: Sequence, request: Request) -> tuple[int, Lineage | None]:
        """(how many rows of the prompt `sequence` holds from now on, where to take snapshots of it)."""
        if self.cache is None:
            return sequence.keep_prefix_of(request.prompt), None
        lineage = self.cache.begin(sequence, request)
        return lineage.reused, lineage

    def remember(self, generation: Generation) -> None:
        """Caches the rows of a reply that ends."""
        if self.cache and generation.lineage and not self._closed:
            self.cache.save(generation.lineage, generation.sequence, lasting=True)
            self.cache.record(generation.request, generation.tokens)

    def _commit(self, sequence: Sequence, tokens: list[int]) -> None:
        try:
            self.backend.commit([len(tokens)])
            sequence.append(tokens)
        except BaseException:  # Ctrl-C too: rows may be half written, so nothing of this sequence is trusted
            sequence.reset()
            raise

    def _admit(self, tokens: int) -> Sequence:
        """Room for a sequence; warm ones make way, the longest unused first."""
        with self._lock:
            self._check_open()
            while not self.pools.can_admit(tokens) and (idle := self._warm.give_up()) is not None:
                self.pools.release(idle.slots)
            return Sequence(self.layout, self.pools.admit(tokens))

    def _warm_up(self, key: tuple[str, str]) -> Sequence:
        with self._lock:
            return self._warm.take(key) or self._admit(self.layout.context)

    def _keep_warm(self, key: tuple[str, str], sequence: Sequence) -> None:
        with self._lock:
            if (before := self._warm.put(key, sequence)) is not None:
                self.pools.release(before.slots)

    def release(self, sequence: Sequence) -> None:
        """Gives a sequence's pages and ring back."""
        with self._lock:
            self.pools.release(sequence.slots)

    def memory(self) -> MemoryUse:
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes, on macOS bytes
        return MemoryUse(
            weights_bytes=sum(t.nbytes for t in stored_tensors(self.spec)),
            full_kv_bytes=self.layout.full_bytes,
            window_kv_bytes=self.layout.window_bytes,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        )

    def close(self) -> None:
        """Frees weights and KV; the engine, its sessions and generations cannot be used after it."""
        with self._lock:
            was_open, self._closed = not self._closed, True
        if was_open:
            if self.cache:
                self.cache.close()  # without the lock, which its writer needs
            with self._lock:
                self.backend.close()

    def _check_open(self) -> None:
        if self._closed:
            raise MimoEdgeError("the engine is closed: open it again with Engine.open")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def resolve_context(spec: ModelSpec, wanted: int | None) -> int:
    """Tokens of context to allocate; None is all that the model has. Raises BadInputError when out of range."""
    if wanted is None:
        return spec.max_context
    if not 1 <= wanted <= spec.max_context:
        raise BadInputError(f"context {wanted} is out of range (allowed: 1 to {spec.max_context}, the model's own)")
    return wanted
