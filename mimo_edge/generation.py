"""One reply while it is generated: which rows come next, which token they lead to, when it ends, what is shown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from mimo_edge.backends.base import Step, StepOutput
from mimo_edge.decoding.sampling import Sampler, not_finite
from mimo_edge.errors import MimoEdgeError
from mimo_edge.kv.sequence import Sequence
from mimo_edge.request import CacheUse, FinishReason, MtpUse, Request, Result, Timings
from mimo_edge.text import StopStrings, TextStream

if TYPE_CHECKING:
    from mimo_edge.engine import Engine


class Generation:
    """Iterate to get the reply's text in pieces, as soon as they are final; `result` follows.

    A piece is never part of a character or of a stop string. `cancel` may be called from any thread; `close`, leaving
    an exception inside a step (Ctrl-C too), or dropping the object end it as well. Ended is ended: whatever the
    reason, memory is given back and the sequence holds exactly the rows that were committed.
    """

    def __init__(self, engine: Engine, sequence: Sequence, request: Request, on_end: Callable[[], None] | None = None):
        self.sequence = sequence
        self.finish_reason: FinishReason | None = None
        self._engine, self.request, self._on_end = engine, request, on_end
        self._sampler = Sampler(request.sampling, request.prompt)
        self._stream = TextStream(engine.text, request.prompt)
        self._stops = StopStrings(request.stop)
        self._began = time.perf_counter()
        self._reused, self.lineage = engine.begin(sequence, request)
        self._pending = list(request.prompt[self._reused :])  # tokens whose rows are not evaluated yet
        self._planned = 0  # of these, in the step that runs
        self.tokens: list[int] = []
        self._pieces: list[str] = []
        self._cancelled = threading.Event()
        self._ttft_s: float | None = None
        self._prefill_s = self._decode_s = 0.0

    @property
    def left(self) -> int:
        """Tokens to evaluate before the next one can be chosen."""
        return len(self._pending)

    def plan(self, rows: int) -> Step:
        """The next `rows` pending rows at most; logits are asked for behind the last one only."""
        start = len(self.sequence.tokens)
        if self.lineage is not None:
            rows = self.lineage.rows(start, rows)
        tokens = np.array(self._pending[:rows], np.int64)
        self._planned = len(tokens)
        last = [len(tokens) - 1] if len(tokens) == len(self._pending) else []
        return Step(self.sequence.slots, start, tokens, np.array(last, np.int64))

    def choose(self, output: StepOutput) -> int | None:
        """The token behind the planned rows, if they reach the end of what is known."""
        if not len(output.logits):
            return None
        return self._sampler.sample(output.logits[-1], self._position)

    @property
    def greedy(self) -> bool:
        """Whether every token is the best one, whatever came before."""
        return self.request.sampling.temperature == 0 and self.request.sampling.repetition_penalty == 1

    def take_best(self, token: int) -> int:
        """The best token as a device found it; it says -1 when logits are not finite."""
        if token < 0:
            raise not_finite(self._position)
        return token

    @property
    def _position(self) -> int:
        """Of the next token."""
        return len(self.request.prompt) + len(self.tokens)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        try:
            while self.finish_reason is None:
                piece = self._advance()
                if piece:
                    self._pieces.append(piece)
                    return piece
        except BaseException as e:
            self._end("cancelled" if isinstance(e, KeyboardInterrupt) else "error")
            raise
        raise StopIteration

    def _advance(self) -> str:
        """One engine step, and the text that became final with it."""
        if self._cancelled.is_set():
            return self._finish("cancelled")
        began = time.perf_counter()
        token = self._engine.step(self)
        now = time.perf_counter()
        if self._ttft_s is None:
            self._prefill_s += now - began
        else:
            self._decode_s += now - began
        if token is None:
            self._pending = self._pending[self._planned :]
            return ""
        if self._ttft_s is None:
            self._ttft_s = now - self._began
        self._pending = [token]
        return self._accept(token)

    def _accept(self, token: int) -> str:
        self.tokens.append(token)
        if token in self._engine.spec.eos_ids:
            return self._finish("stop")
        piece, stopped = self._stops.push(self._stream.push(token))
        if stopped:
            self._finish("stop")
            return piece
        full = len(self.sequence.tokens) == self._engine.layout.context
        if full or len(self.tokens) == self.request.max_tokens:
            return piece + self._finish("length")
        return piece

    def _finish(self, reason: FinishReason) -> str:
        """An end that was foreseen: what was evaluated may be of use to the next request."""
        self._engine.remember(self)
        return self._end(reason)

    def _end(self, reason: FinishReason) -> str:
        """Ends the reply, once; the text that was held back."""
        self.finish_reason = self.finish_reason or reason
        if self._on_end:
            self._on_end()
            self._on_end = None
        piece, stopped = self._stops.push(self._stream.finish())
        return piece if stopped else piece + self._stops.finish()

    def cancel(self) -> None:
        """Ends the reply before its next step, with reason "cancelled"."""
        self._cancelled.set()

    def close(self) -> None:
        """Ends the reply now, unless it has ended."""
        if self.finish_reason is None:
            self._end("cancelled")

    def __del__(self) -> None:
        if hasattr(self, "_prefill_s"):  # constructed
            self.close()

    @property
    def result(self) -> Result:
        """The finished reply. Raises MimoEdgeError while it is not finished."""
        if self.finish_reason is None:
            raise MimoEdgeError("the reply is not finished: iterate over it to the end, or close it")
        return Result(
            text="".join(self._pieces),
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason,
            timings=self._timings(),
            cache=CacheUse(len(self.request.prompt), self._reused),
            memory=self._engine.memory(),
            mtp=MtpUse(),
        )

    def _timings(self) -> Timings:
        rows, decoded = len(self.request.prompt) - self._reused, len(self.tokens) - 1
        return Timings(
            load_s=self._engine.load_s,
            ttft_s=self._ttft_s,
            prefill_tok_s=rows / self._prefill_s if self._ttft_s is not None else None,
            decode_tok_s=decoded / self._decode_s if decoded > 0 else None,
        )
