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
from pathlib import Path
from types import TracebackType

from mimo_edge.backends import registry
from mimo_edge.backends.base import Backend
from mimo_edge.bundle import TOKENIZER, Bundle
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.generation import Generation
from mimo_edge.kv.layout import plan_layout
from mimo_edge.kv.pools import KvPools
from mimo_edge.kv.sequence import Sequence
from mimo_edge.params import stored_tensors
from mimo_edge.request import DEFAULT_MAX_TOKENS, GREEDY, MemoryUse, Request, SamplingParams
from mimo_edge.session import Session
from mimo_edge.spec import ModelSpec
from mimo_edge.text import Text

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
        chunk: int = CHUNK,
        load_s: float = 0.0,
    ):
        """Takes the backend over (close() closes it) and allocates the KV pools. `open` is the usual way in."""
        self.spec, self.text, self.backend, self.chunk, self.load_s = spec, text, backend, chunk, load_s
        self.layout = plan_layout(spec, resolve_context(spec, max_context), sessions)
        self.pools = KvPools(self.layout)
        self._lock = threading.RLock()  # dropped generations may be collected, and give room back, inside a step
        self._closed = False
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
    ) -> Engine:
        """Loads a bundle. `sessions` is how many sequences of `max_context` tokens (default: the bundle's) it holds.

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
        engine = Engine(bundle.spec, text, loaded, max_context=max_context, sessions=sessions)
        engine.load_s = time.perf_counter() - began
        return engine

    def generate(
        self,
        prompt: str | Tokens[int],
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        sampling: SamplingParams = GREEDY,
        stop: str | Iterable[str] = (),
    ) -> Generation:
        """One reply to a text or to token ids. Room for all of it is taken now and given back at the end of the reply.

        Raises BadInputError on an empty or too long prompt, MimoEdgeError when open sessions leave no room.
        """
        request = self.request(prompt, max_tokens, sampling, stop)
        session = self._admit(min(self.layout.context, len(request.prompt) + max_tokens))
        try:
            return Generation(self, session.sequence, request, on_end=session.close)
        except BaseException:  # a value of a wrong type: the room goes back before anybody hears of it
            session.close()
            raise

    def session(self) -> Session:
        """A conversation that keeps its KV cache between replies; takes room for a whole context until it is closed."""
        return self._admit(self.layout.context)

    def request(
        self, prompt: str | Tokens[int], max_tokens: int, sampling: SamplingParams, stop: str | Iterable[str]
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
        return Request(tuple(tokens), max_tokens, sampling, (stop,) if isinstance(stop, str) else tuple(stop))

    def step(self, generation: Generation) -> int | None:
        """Evaluates the next rows of one reply; the token that follows them, None while its prompt is not through."""
        with self._lock:
            self._check_open()
            plan = generation.plan(self.chunk)
            [output] = self.backend.run([plan])
            token = generation.choose(output)
            self._commit(generation.sequence, plan.tokens.tolist())
        return token

    def _commit(self, sequence: Sequence, tokens: list[int]) -> None:
        try:
            self.backend.commit([len(tokens)])
            sequence.append(tokens)
        except BaseException:  # Ctrl-C too: rows may be half written, so nothing of this sequence is trusted
            sequence.reset()
            raise

    def _admit(self, tokens: int) -> Session:
        with self._lock:
            self._check_open()
            return Session(self, Sequence(self.layout, self.pools.admit(tokens)))

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
            if not self._closed:
                self._closed = True
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
