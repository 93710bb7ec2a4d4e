"""The vocabulary of a request: what is asked for and what comes back. Everything else imports these."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from mimo_edge.errors import BadInputError

Drafts = Literal["auto"] | int  # drafts of a step: a number, or as many as pay
FinishReason = Literal["stop", "length", "deadline", "cancelled", "error"]
OnToken = Callable[[int, str, float], object]  # a token, the text that became final with it, seconds since the call
DEFAULT_MAX_TOKENS = 256
EMPTY_PROMPT = "the prompt is empty: give some text with --prompt or on stdin"


def is_number(value: object) -> bool:
    """An integer or a float, numpy's too; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen from logits, in this order: repetition penalty, temperature, top-k, top-p, min-p.

    The defaults are greedy. Temperature 0 takes the best token; top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are
    off. The same seed gives the same tokens, however the prompt is split into steps.
    Raises BadInputError naming the value and what is allowed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        def need(name: str, ok: bool, allowed: str) -> None:
            if not ok:
                raise BadInputError(f"{name} {getattr(self, name)!r} is out of range (allowed: {allowed})")

        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            need(name, is_number(getattr(self, name)), "a number")
        for name in ("top_k", "seed"):
            need(name, type(getattr(self, name)) is int, "an integer")
        need("temperature", 0 <= self.temperature <= 100, "0 to 100, 0 takes the best token")
        need("top_k", self.top_k >= 0, "0 or more, 0 is off")
        need("top_p", 0 < self.top_p <= 1, "above 0, at most 1, 1 is off")
        need("min_p", 0 <= self.min_p < 1, "0 or more, below 1, 0 is off")
        need("repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "0.01 to 100, 1 is off")
        need("seed", 0 <= self.seed < 2**63, "0 to 2**63-1")


GREEDY = SamplingParams()


@dataclass(frozen=True)
class Grammar:
    """What a reply has to look like: JSON text of a schema, a regular expression, or a grammar."""

    kind: Literal["schema", "regex", "grammar"]
    text: str


@dataclass(frozen=True)
class Request:
    """A prompt as token ids and what may follow it. Raises BadInputError on an empty prompt or an impossible limit.

    `tenant` keeps requests of different owners from sharing cached rows. `marks` are positions in the prompt behind
    which the next prompt is likely to differ; they only steer what is cached. `drafts` of None are the engine's.
    `deadline` is in seconds from the call.
    """

    prompt: tuple[int, ...]
    max_tokens: int = DEFAULT_MAX_TOKENS
    sampling: SamplingParams = GREEDY
    stop: tuple[str, ...] = ()
    tenant: str = ""
    marks: tuple[int, ...] = ()
    drafts: Drafts | None = None
    grammar: Grammar | None = None
    deadline: float | None = None
    on_token: OnToken | None = None
    logprobs: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise BadInputError(EMPTY_PROMPT)
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise BadInputError(f"max_tokens {self.max_tokens!r} is out of range (allowed: 1 or more)")
        if not isinstance(self.sampling, SamplingParams):
            raise BadInputError(f"sampling {self.sampling!r} must be SamplingParams(...)")
        if not all(isinstance(s, str) for s in self.stop):
            raise BadInputError(f"stop {self.stop!r} must hold strings")
        if not all(self.stop):
            raise BadInputError("a stop string is empty (allowed: one character or more)")
        seconds = self.deadline
        if seconds is not None and not (is_number(seconds) and 0 < seconds < math.inf):
            raise BadInputError(f"deadline {self.deadline!r} is out of range (allowed: seconds above 0, from the call)")


@dataclass(frozen=True)
class Timings:
    """Seconds and tokens a second; None where nothing was measured.

    `ttft_s` runs from the call to the first token. The two speeds count time inside engine steps only, not what
    the caller does between pieces; `decode_tok_s` leaves the first token out, which prefill produced.
    """

    load_s: float
    ttft_s: float | None
    prefill_tok_s: float | None
    decode_tok_s: float | None


@dataclass(frozen=True)
class CacheUse:
    """`reused_tokens` of the `prompt_tokens` were already in the KV cache and were not evaluated again."""

    prompt_tokens: int
    reused_tokens: int


@dataclass(frozen=True)
class MemoryUse:
    """Bytes: stored weights, both KV pools as allocated, and the process's highest resident set so far."""

    weights_bytes: int
    full_kv_bytes: int
    window_kv_bytes: int
    peak_rss_bytes: int


@dataclass(frozen=True)
class MtpUse:
    """Multi-token prediction; None when no drafts were made.

    Of the steps behind the first token: how many, drafted and accepted tokens in all and by position, and the shares
    of their time that making drafts, verifying them in the model, and sampling took. `reason` says why so many.
    """

    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    drafted_by_position: tuple[int, ...] | None = None
    accepted_by_position: tuple[int, ...] | None = None
    draft_share: float | None = None
    verify_share: float | None = None
    accept_share: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Result:
    """A finished reply. `text` is what was handed out; `tokens` are all its ids, those of a stop included.

    `logprobs`, if asked for: of every token, the natural logarithm of the probability that the model itself gave it,
    before temperature, filters, penalty and grammar; None where a grammar left no choice and the model was not asked.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    timings: Timings
    cache: CacheUse
    memory: MemoryUse
    mtp: MtpUse
    logprobs: tuple[float | None, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
