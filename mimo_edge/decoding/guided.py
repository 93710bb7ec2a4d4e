"""Replies that follow a JSON schema, a regular expression or a grammar, token by token, with llguidance.

A guide says which tokens may come next. Whoever generates asks it before every choice and tells it every token. Forced
tokens need no choice and no logits; where one is forced the mask allows only that one, so that asking changes nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from mimo_edge.decoding.sampling import Mask
from mimo_edge.decoding.vocabulary import Vocabulary
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.extras import needs_extra
from mimo_edge.request import Grammar
from mimo_edge.text import Text

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPACT: Any = {"whitespace_flexible": False}  # a schema's x-guidance says otherwise
_KEPT = 8  # compiled grammars
T = TypeVar("T")
_SHOWN = 240  # characters of what llguidance says


class Guide(Protocol):
    """What may be generated next. For one thread at a time."""

    def mask(self) -> Mask | None:
        """bool [vocab]: tokens that may come next, at least one. None allows all."""

    def advance(self, token: int) -> None:
        """A token was chosen (not the end token of what is finished). Raises MimoEdgeError if it was not allowed."""

    def rollback(self, count: int) -> None:
        """The last `count` advances are taken back."""

    def forced(self) -> list[int]:
        """Tokens that have to come next as the grammar leaves no choice; nothing is advanced."""

    @property
    def finished(self) -> bool:
        """Nothing but the end may follow."""


def mask_behind(guide: Guide, drafts: Sequence[int]) -> Mask | None:
    """What may follow `drafts`, which the guide allows one after the other; it stays where it is."""
    for token in drafts:
        guide.advance(token)
    mask = guide.mask()
    guide.rollback(len(drafts))
    return mask


class GrammarGuide:
    """A Guide by llguidance's matcher."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, grammar: Grammar):
        self._matcher, self._size, self._grammar = matcher, vocab_size, grammar

    def mask(self) -> Mask:
        bits = np.frombuffer(self._sound(self._matcher.compute_bitmask()), np.uint8)
        return np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)

    def advance(self, token: int) -> None:
        if self._sound(self._matcher.try_consume_tokens([token])) != 1:
            raise MimoEdgeError(f"token {token} cannot follow: the grammar does not allow it")

    def rollback(self, count: int) -> None:
        self._sound(self._matcher.rollback(count))

    def forced(self) -> list[int]:
        return self._sound(self._matcher.compute_ff_tokens())

    @property
    def finished(self) -> bool:
        return self._sound(self._matcher.is_stopped())

    def _sound(self, answer: T) -> T:
        """What the matcher said. Raises MimoEdgeError when it has failed (and counts as stopped), BadInputError at a
        limit of llguidance."""
        if self._matcher.is_error():
            why = self._matcher.get_error()
            if "NoExtension" in why:
                raise MimoEdgeError(f"the grammar cannot go on: {_line(why)}")
            raise _too_complex(self._grammar, why)
        return answer


class Guides:
    """Makes an engine's guides. What they share is made with the first one. Threads may share it."""

    def __init__(self, text: Text):
        self._text = text
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled = lru_cache(_KEPT)(self._compile)

    def start(self, grammar: Grammar) -> Guide:
        """A guide at the start of a reply.

        Raises BadInputError when the grammar cannot be compiled or no text satisfies it, UnsupportedError when
        llguidance is not installed or cannot use the model's tokenizer.
        """
        with needs_extra("guided", "a schema, regex or grammar"):
            import llguidance  # noqa: F401
        with self._lock:
            return GrammarGuide(self._compiled(grammar).deep_copy(), self._text.spec.vocab_size, grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        self._tokenizer = self._tokenizer or adapt(self._text)
        try:
            source = _source(grammar)
        except Exception as e:  # the converter of llama.cpp's notation raises bare ones
            raise _refused(grammar, str(e)) from None
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(grammar, matcher.get_error())
        if obstacle := self._obstacle(matcher.deep_copy(), grammar):
            raise _refused(grammar, obstacle)
        return matcher

    def _obstacle(self, matcher: LLMatcher, grammar: Grammar) -> str:
        """Why the first choice cannot be reached, if so: what fails at once should fail before the model runs."""
        guide = GrammarGuide(matcher, self._text.spec.vocab_size, grammar)
        try:
            mask = guide.mask()
            mask[list(self._text.spec.eos_ids)] = False
            if not mask.any():
                return f"no text {'but the empty one ' * matcher.is_accepting()}satisfies it"
            for token in guide.forced():
                guide.advance(token)
            if not guide.finished:
                guide.mask()
        except MimoEdgeError as e:
            if "NoExtension" in matcher.get_error():
                return "no text satisfies it"
            if isinstance(e, BadInputError):
                raise
            return str(e)
        return ""


def adapt(text: Text) -> LLTokenizer:
    """llguidance's view of a bundle's tokenizer."""
    from llguidance import LLTokenizer

    spec = text.spec
    ends = spec.eos_ids or (spec.vocab_size,)  # one that is never sampled, for a model without
    size = max(spec.vocab_size, *(i + 1 for i in ends))
    wrapper: Any = Vocabulary(text.tokenizer, size, ends)
    return LLTokenizer(wrapper, n_vocab=size, eos_token=list(ends))


def _source(grammar: Grammar) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if grammar.kind == "schema":
        return LLMatcher.grammar_from_json_schema(grammar.text, defaults=COMPACT)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))


def _refused(grammar: Grammar, why: str) -> BadInputError:
    return BadInputError(f"the {grammar.kind} cannot be used: {_line(why)}")


def _too_complex(grammar: Grammar, why: str) -> BadInputError:
    """llguidance gave up on what it could compile, usually at one of its limits on work."""
    shown = grammar.text if len(grammar.text) <= 60 else grammar.text[:56] + " ..."
    return BadInputError(
        f"the {grammar.kind} {shown!r} is too complex ({_line(why)[:80]}; allowed: what llguidance follows within its "
        "limits): give a simpler one, with fewer and smaller nested repetitions"
    )


def _line(message: str) -> str:
    """llguidance's message in one line, without the excerpt of the grammar that it points into."""
    lines = [s for s in message.splitlines() if not re.fullmatch(r"\s*(\d+ \|.*|\^)?\s*", s)]
    text = " ".join(" ".join(lines).replace("<non-verbose/>", "").split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 4] + " ..."
