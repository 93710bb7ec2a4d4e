"""One reply while it is generated: which rows come next, which token they lead to, when it ends, what is shown."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mimo_edge.backends.base import Step
from mimo_edge.decoding.guided import Guide, mask_behind
from mimo_edge.decoding.sampling import Sampler, log_probability, not_finite
from mimo_edge.errors import MimoEdgeError
from mimo_edge.kv.lineage import Lineage
from mimo_edge.kv.sequence import Sequence
from mimo_edge.request import CacheUse, FinishReason, Request, Result, Timings
from mimo_edge.room import Seat
from mimo_edge.text import StopStrings, TextStream

if TYPE_CHECKING:
    from mimo_edge.engine import Engine


@dataclass(frozen=True)
class _Sampled:
    """A token, the text that became final with it, and why the reply ends there, if it does."""

    token: int
    piece: str = ""
    end: FinishReason | None = None
    stopped: bool = False  # by a stop string: no text follows


class Generation:
    """Iterate to get the reply's text in pieces, as soon as they are final; `result` follows.

    A piece is never part of a character or of a stop string. `cancel` may be called from any thread; `close`, leaving
    an exception inside a step (Ctrl-C too), or dropping the object end it as well. Ended is ended: whatever the
    reason, memory is given back and the sequence holds exactly the rows that were committed.
    """

    def __init__(self, engine: Engine, seat: Seat, request: Request, guide: Guide | None = None):
        self.finish_reason: FinishReason | None = None
        self._engine, self._seat, self.request, self._guide = engine, seat, request, guide
        self._sampler = Sampler(request.sampling, request.prompt)
        self._stream = TextStream(engine.text, request.prompt)
        self._stops = StopStrings(request.stop)
        self._began = time.perf_counter()
        self.due = None if request.deadline is None else self._began + request.deadline
        self.lineage: Lineage | None = None
        self._reused = 0
        self._pending: list[int] = []  # tokens whose rows are not evaluated yet
        self._planned = 0  # of these, in the step that runs
        self.speculation = engine.speculation(request.drafts)
        self._ready: deque[_Sampled] = deque()  # of the last step, not handed out yet
        self._chosen = 0  # of these, the first ones, which the next step need not evaluate, but for the last
        self._logprobs: list[float | None] = []
        self._gone = False  # the room was given back
        self.tokens: list[int] = []
        self._pieces: list[str] = []
        self._cancelled = threading.Event()
        self._ttft_s: float | None = None
        self._prefill_s = self._decode_s = 0.0
        if seat.sequence is not None:
            self._begin(seat.sequence)

    def _begin(self, sequence: Sequence) -> None:
        """There is room."""
        self.sequence = sequence
        self._reused, self.lineage = self._engine.begin(sequence, self.request)
        self._pending = list(self.request.prompt[self._reused :])

    @property
    def left(self) -> int:
        """Tokens to evaluate before the next one can be chosen."""
        return len(self._pending)

    def plan(self, rows: int) -> Step:
        """The next `rows` pending rows at most, with drafts behind a single one once the reply has begun. Logits are
        asked for behind all rows that a token of the reply can follow."""
        start, speculation = len(self.sequence.tokens), self.speculation
        if self.lineage is not None:
            rows = self.lineage.rows(start, rows)
        self._planned = count = min(rows, len(self._pending))
        if self.tokens and len(self._pending) == 1:
            room = min(self._engine.layout.context - start - 1, self.request.max_tokens - len(self.tokens) - 1)
            speculation.propose(self.sequence, self._pending[0], room, self._draft, self.plain)
        else:
            speculation.prepare(self.sequence, self._pending, count)
        tokens = np.array([*self._pending[:count], *speculation.drafts], np.int64)
        first = count - 1 if count == len(self._pending) else count
        return Step(self.sequence.slots, start, tokens, np.arange(first, len(tokens)))

    def choose(self, logits: NDArray[np.float32]) -> int:
        """Samples behind the planned rows, given the logits that were asked for [M, vocab]; how many rows to commit."""
        position = len(self.sequence.tokens) + self._planned

        def token(i: int) -> int:
            forced = self._guide is not None and self._guide.forced()
            token = self._sampler.sample(logits[i], position + i, self._guide.mask() if self._guide else None)
            known = self.request.logprobs and not forced
            self._logprobs.append(log_probability(logits[i], token) if known else None)
            return token

        return self._take(token, len(logits))

    def _draft(self, logits: NDArray[np.float32], position: int, drafts: Tokens[int]) -> int:
        """A draft behind `drafts`, chosen as its token will be."""
        mask = mask_behind(self._guide, drafts) if self._guide else None
        return self._sampler.choose(logits, position, drafts, mask)

    def choose_best(self, tokens: Tokens[int]) -> int:
        """As `choose`, with the best token behind each row as a device found it, -1 where logits are not finite."""
        position = len(self.sequence.tokens) + self._planned

        def token(i: int) -> int:
            if tokens[i] < 0:
                raise not_finite(position + i)
            return int(tokens[i])

        return self._take(token, len(tokens))

    def _take(self, token: Callable[[int], int], count: int) -> int:
        """Tokens as long as the drafts before them hold and the reply does not end. What lies behind its end, or is
        forced to it, is not committed either, so that its rows are the same with any number of drafts."""
        drafts, free = self.speculation.drafts, 0
        for i in range(count):
            if not self._guide or not self._guide.forced():
                free = i + 1
            sampled = self._accept(token(i))
            self._ready.append(sampled)
            if sampled.end or (i < len(drafts) and sampled.token != drafts[i]):
                break
        self._chosen = len(self._ready)
        if self._guide and self._ready:
            self._append_forced(self._guide.forced())
        if self._ready and self._ready[-1].end:
            self._chosen = free
        return self._planned + max(0, self._chosen - 1)

    def _append_forced(self, tokens: Tokens[int]) -> None:
        """What the grammar leaves no choice about follows without logits; the next step evaluates its rows together."""
        for token in tokens:
            if self._ready[-1].end:
                break
            self._sampler.remember(token)
            self._logprobs.append(None)
            self._ready.append(self._accept(token))

    def settle(self) -> None:
        """The step is committed."""
        tokens = [s.token for s in self._ready]
        sampled = tokens[: self._chosen]
        self._pending = [*self._pending[self._planned :], *sampled[-1:], *tokens[self._chosen :]]
        if self.tokens and self._planned == 1:
            self.speculation.settle(self.sequence, sampled, max(0, len(sampled) - 1))

    @property
    def plain(self) -> bool:
        """Whether a token depends on its position's logits and noise alone, and nothing else is asked of the logits."""
        return self.request.sampling.repetition_penalty == 1 and self._guide is None and not self.request.logprobs

    @property
    def greedy(self) -> bool:
        """Whether every token is the best one, whatever came before, and nothing else is asked of the logits."""
        return self.plain and self.request.sampling.temperature == 0

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
        """The text that became final with the next token; an engine step, if none is at hand."""
        if self._ready:
            return self._hand_out(self._ready.popleft())
        if reason := self.interrupted():
            return self._finish(reason)
        if self._seat.sequence is None:
            if (sequence := self._seat.wait(self.interrupted, self.due)) is not None:
                self._begin(sequence)
            return ""
        began = time.perf_counter()
        self._engine.step(self)
        now = time.perf_counter()
        if self._ttft_s is not None:
            self._decode_s += now - began
            return ""
        self._prefill_s += now - began
        if self._ready:
            self._ttft_s = now - self._began
        return ""

    def _accept(self, token: int) -> _Sampled:
        if token in self._engine.spec.eos_ids:
            return _Sampled(token, end="stop")
        if self._guide:
            self._guide.advance(token)
        piece, stopped = self._stops.push(self._stream.push(token))
        if stopped:
            return _Sampled(token, piece, "stop", stopped=True)
        evaluated = len(self.sequence.tokens) + self._planned + len(self._ready)  # rows in front of this token
        if self._guide and self._guide.finished:
            return _Sampled(token, piece, "stop")
        full = evaluated == self._engine.layout.context
        last = len(self.tokens) + len(self._ready) + 1 == self.request.max_tokens
        return _Sampled(token, piece, "length" if full or last else None)

    def _hand_out(self, sampled: _Sampled) -> str:
        self.tokens.append(sampled.token)
        piece = sampled.piece
        if sampled.end is not None:
            rest = self._finish(sampled.end)
            piece += "" if sampled.stopped else rest
        if self.request.on_token:
            self.request.on_token(sampled.token, piece, time.perf_counter() - self._began)
        return piece

    def _finish(self, reason: FinishReason) -> str:
        """An end that was foreseen: what was evaluated may be of use to the next request."""
        self._engine.remember(self)
        return self._end(reason)

    def _end(self, reason: FinishReason) -> str:
        """Ends the reply, once; the text that was held back."""
        self.finish_reason = self.finish_reason or reason
        if not self._gone:
            self._gone = True
            self._seat.leave()
        piece, stopped = self._stops.push(self._stream.finish())
        return piece if stopped else piece + self._stops.finish()

    def cancel(self) -> None:
        """Ends the reply before its next step, with reason "cancelled"; from any thread, without waiting."""
        self._cancelled.set()
        self._seat.wake()
        self._engine.wake()

    def interrupted(self) -> FinishReason | None:
        """Why no further step is wanted, if so."""
        if self._cancelled.is_set():
            return "cancelled"
        return "deadline" if self.due is not None and time.perf_counter() >= self.due else None

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
            mtp=self.speculation.use(),
            logprobs=tuple(self._logprobs[: len(self.tokens)]) if self.request.logprobs else None,
        )

    def _timings(self) -> Timings:
        rows, decoded = len(self.request.prompt) - self._reused, len(self.tokens) - 1
        return Timings(
            load_s=self._engine.load_s,
            ttft_s=self._ttft_s,
            prefill_tok_s=rows / self._prefill_s if self._ttft_s is not None else None,
            decode_tok_s=decoded / self._decode_s if decoded > 0 and self._decode_s else None,
        )
