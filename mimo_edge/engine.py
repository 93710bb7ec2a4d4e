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
from typing import TYPE_CHECKING

from mimo_edge.backends import registry
from mimo_edge.backends.base import Backend, Step
from mimo_edge.bundle import TOKENIZER, Bundle
from mimo_edge.cache import CacheOptions, EngineCache
from mimo_edge.decoding.guided import Guides
from mimo_edge.decoding.mtp import Drafter, Speculation, check_drafts, usable_heads
from mimo_edge.device.process import give_back
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.generation import Generation
from mimo_edge.kv.layout import plan_layout, resolve_context
from mimo_edge.kv.lineage import Lineage
from mimo_edge.kv.sequence import Sequence
from mimo_edge.options import Options, make_request
from mimo_edge.params import stored_tensors
from mimo_edge.request import Drafts, MemoryUse, Request
from mimo_edge.room import Room
from mimo_edge.session import Session
from mimo_edge.spec import MAX_DRAFTS, ModelSpec
from mimo_edge.text import Message, Text
from mimo_edge.turns import Turns

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mimo_edge.aio import AsyncGeneration

log = logging.getLogger("mimo_edge")
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
        drafts: Drafts = "auto",
        queue: int = 0,
    ):
        """Takes the backend over (close() closes it) and allocates the KV pools. `open` is the usual way in.

        With `cache`, prompts reuse rows of earlier ones; `fingerprint` names the model there. `drafts` and `queue` are
        as in `open`.
        """
        self.spec, self.text, self.backend, self.load_s = spec, text, backend, load_s
        most: int = getattr(backend, "chunk", CHUNK)
        self.chunk = most if chunk is None else min(chunk, most)
        element_bytes = getattr(backend, "element_bytes", 4)
        check_drafts(drafts)
        self.drafts, context = drafts, resolve_context(spec, max_context)
        heads, self._why_no_drafts = usable_heads(spec, backend, drafts)
        self.layout = plan_layout(spec, context, sessions, element_bytes, heads=heads, chunk=self.chunk)
        self._lock = threading.RLock()
        self._turns, self.room, self.guides = Turns(), Room(self.layout, queue), Guides(text)
        self.pools = self.room.pools
        self.cache = EngineCache(backend, self.layout, fingerprint, cache, self._lock) if cache else None
        try:
            backend.allocate(self.layout)
        except (MemoryError, ValueError, OverflowError):  # numpy's ways of saying that no address space holds it
            kv = self.layout.full_bytes + self.layout.window_bytes
            raise MimoEdgeError(
                f"no memory for {kv:,} bytes of KV cache ({sessions} x {self.layout.context} tokens): "
                "choose a smaller --context"
            ) from None
        self.drafter = Drafter(backend, self.layout) if heads else None

    @staticmethod
    def open(
        path: str | Path,
        backend: str = "auto",
        max_context: int | None = None,
        sessions: int = 1,
        threads: int | None = None,
        cache: CacheOptions | None = None,
        memory_budget: int | None = None,
        drafts: Drafts = "auto",
        queue: int = 0,
        chunk: int | None = None,
    ) -> Engine:
        """Loads a bundle. `sessions` is how many sequences of `max_context` tokens (default: the bundle's) it holds.
        Without `cache`, only sessions reuse rows. `memory_budget` is the most bytes that all of it may take
        (docs/device.md): refused, by item, before weights are loaded. `drafts` is how many tokens MTP heads draft for a
        step to verify: 0 to 3, or "auto", as many as pay; replies may ask for fewer. Tokens are the same. `queue` is
        how many requests may wait for room; others are refused at once. `chunk` is the most rows of a prompt in a step.

        Raises BadInputError on a damaged bundle or a value out of range, UnsupportedError when the backend's library
        is not installed, MimoEdgeError when memory runs out.
        """
        began = time.perf_counter()
        cores = os.cpu_count() or 1
        for name, value, most in (("sessions", sessions, 4096), ("threads", threads, cores), ("chunk", chunk, CHUNK)):
            if value is not None and not 1 <= value <= most:
                raise BadInputError(f"{name} {value} is out of range (allowed: 1 to {most})")
        check_drafts(drafts)
        bundle = Bundle.open(path)
        context = resolve_context(bundle.spec, max_context)  # before the weights are loaded
        if memory_budget is not None:
            from mimo_edge.device.budget import enforce

            backend = enforce(bundle, backend, context, sessions, cache, memory_budget, drafts).backend
        text = Text.open(bundle.file(TOKENIZER), bundle.spec, bundle.chat_template)
        give_back()
        loaded = registry.load(backend, bundle, threads)
        engine = Engine(
            bundle.spec,
            text,
            loaded,
            max_context=max_context,
            sessions=sessions,
            cache=cache,
            fingerprint=bundle.fingerprint,
            drafts=drafts,
            queue=queue,
            chunk=chunk,
        )
        engine.load_s = time.perf_counter() - began
        return engine

    def generate(
        self,
        prompt: str | Tokens[int],
        *,
        tenant: str = "",
        session_id: str | None = None,
        **options: Unpack[Options],
    ) -> Generation:
        """One reply to a text or to token ids; options.Options says what else can be given. Room for all of it is taken
        now and given back at the end of the reply; with a queue, the first piece may wait for room.

        Requests of different `tenant`s share no cached rows. The rows of a `session_id` stay in place for its next
        request, as long as nobody needs the room; of two at once, the last to finish leaves its own.
        Raises BadInputError on an empty or too long prompt and on options that cannot be right, MimoEdgeError when
        there is neither room nor a place in the queue.
        """
        request = self.request(prompt, tenant, options)
        guide = self.guides.start(request.grammar) if request.grammar else None
        rows = min(self.layout.context, len(request.prompt) + request.max_tokens)
        seat = self.room.enter(rows, None if session_id is None else (tenant, session_id))
        try:
            return Generation(self, seat, request, guide)
        except BaseException:  # whatever it is, the room goes back before anybody hears of it
            seat.leave()
            raise

    def agenerate(
        self,
        prompt: str | Tokens[int],
        *,
        tenant: str = "",
        session_id: str | None = None,
        **options: Unpack[Options],
    ) -> AsyncGeneration:
        """As `generate`, for asyncio: `async for piece in engine.agenerate(...)` does not block the event loop.

        What generate raises comes from the first piece.
        """
        from mimo_edge.aio import AsyncGeneration

        return AsyncGeneration(partial(self.generate, prompt, tenant=tenant, session_id=session_id, **options))

    def session(self, tenant: str = "", messages: Iterable[Message] = ()) -> Session:
        """A conversation that keeps its KV cache between replies; takes room for a whole context until it is closed.

        `messages` are what was said before.
        """
        return Session(self, self.room.admit(self.layout.context), tenant, messages)

    def request(self, prompt: str | Tokens[int], tenant: str, options: Options) -> Request:
        return make_request(self.text, self.layout, prompt, tenant, options)

    def step(self, generation: Generation) -> None:
        """Evaluates the next rows of one reply and chooses the tokens that follow them; nothing if it is over first."""
        with self._turns.turn(generation.left, generation.interrupted, generation.due) as mine:
            if mine:
                with self._lock:
                    self._step(generation)

    def wake(self) -> None:
        """Replies that wait for their turn look at whether they are over."""
        self._turns.wake()

    def _step(self, generation: Generation) -> None:
        self.room.check_open()
        plan = generation.plan(self.chunk)
        if getattr(self.backend, "writes_in_run", False):
            generation.sequence.wrote(plan.start + len(plan.tokens) + generation.speculation.in_round)
        tokens = self._evaluate(generation, plan)
        generation.speculation.lap("accept")
        self._commit(generation.sequence, tokens)
        generation.speculation.lap("verify")
        generation.settle()
        lineage = generation.lineage
        if self.cache and lineage and lineage.due(end := len(generation.sequence.tokens)):
            self._save(generation, lasting=lineage.lasts(end))

    def _evaluate(self, generation: Generation, plan: Step) -> list[int]:
        """Runs a plan; those of its tokens that belong to the text. What follows them comes from the device where the
        backend can tell, without the logits."""
        speculation = generation.speculation
        if speculation.in_round:
            pending = int(plan.tokens[0])
            following = speculation.round(generation.sequence, pending, generation.request.sampling)
            speculation.lap("verify")
            return [pending, *following][: generation.choose_best(following)]
        best = getattr(self.backend, "best", None)
        if best and generation.greedy and len(plan.logit_rows) and len(plan.tokens) <= MAX_DRAFTS + 1:
            tokens = best(plan)[plan.logit_rows]
            speculation.lap("verify")
            return plan.tokens[: generation.choose_best(tokens)].tolist()
        [output] = self.backend.run([plan])
        speculation.lap("verify")
        return plan.tokens[: generation.choose(output.logits)].tolist()

    def _save(self, generation: Generation, lasting: bool) -> None:
        assert self.cache and generation.lineage
        if self.drafter:
            self.drafter.finish(generation.sequence)
        self.cache.save(generation.lineage, generation.sequence, lasting)

    def speculation(self, drafts: Drafts | None) -> Speculation:
        """For one reply."""
        return Speculation(self.drafter, self.drafts if drafts is None else drafts, self._why_no_drafts)

    def begin(self, sequence: Sequence, request: Request) -> tuple[int, Lineage | None]:
        """(how many rows of the prompt `sequence` holds from now on, where to take snapshots of it)."""
        if self.cache is None:
            return sequence.keep_prefix_of(request.prompt), None
        lineage = self.cache.begin(sequence, request)
        return lineage.reused, lineage

    def remember(self, generation: Generation) -> None:
        """Caches the rows of a reply that ends."""
        if self.cache and generation.lineage and not self.room.closed:
            with self._lock:
                self._save(generation, lasting=True)
            self.cache.record(generation.request, generation.tokens)

    def _commit(self, sequence: Sequence, tokens: list[int]) -> None:
        try:
            self.backend.commit([len(tokens)])
            sequence.append(tokens)
        except BaseException:  # Ctrl-C too: rows may be half written, so nothing of this sequence is trusted
            sequence.reset()
            raise

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
        if self.room.close():
            if self.cache:
                self.cache.close()  # without the lock, which its writer needs
            with self._lock:
                self.backend.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
