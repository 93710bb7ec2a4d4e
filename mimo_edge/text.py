"""Text to tokens and back: the tokenizer, text that grows token by token, stop strings, chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mimo_edge.errors import BadInputError
from mimo_edge.spec import ModelSpec

Message = Mapping[str, str]  # {"role": "user", "content": "..."}
INCOMPLETE = "\ufffd"  # what decoders put where bytes do not yet make a character


class Text:
    """A bundle's tokenizer and chat template. Raises BadInputError when the tokenizer file cannot be read."""

    def __init__(self, tokenizer: Tokenizer, spec: ModelSpec, chat_template: str | None = None):
        tokenizer.no_truncation()  # a tokenizer.json may ask for it and would cut prompts silently
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.spec = spec
        self._template = chat_template
        added = tokenizer.get_added_tokens_decoder().values()
        self._control = [token.content for token in added if token.special and token.content]

    @staticmethod
    def open(path: Path, spec: ModelSpec, chat_template: str | None = None) -> Text:
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:  # the library raises bare Exception
            raise BadInputError(f"{path}: not a tokenizer: {e}") from None
        return Text(tokenizer, spec, chat_template)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids; `special` lets the tokenizer add what it adds to a text (usually the begin token).

        Raises BadInputError on text that is not valid Unicode or holds a token the model does not know.
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise BadInputError(f"the prompt is not valid Unicode at character {e.start}: {text[e.start]!r}") from None
        ids = self.tokenizer.encode(text, add_special_tokens=special).ids
        self.check(ids)
        return ids

    def check(self, ids: Sequence[int]) -> None:
        """Raises BadInputError when an id is outside the model's vocabulary."""
        size = self.spec.vocab_size
        bad = next((i for i in ids if not 0 <= i < size), None)
        if bad is not None:
            raise BadInputError(f"token {bad} is outside the model's vocabulary (allowed: 0 to {size - 1})")

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the model's reply.

        Raises BadInputError without a template, and when a message spells a control token: it could forge a turn.
        """
        for message in messages:
            for token in self._control:
                if token in message["content"]:
                    raise BadInputError(f"a message holds the model's control token {token!r}: remove it from the text")
        rendered = self.render_chat(messages)
        bos = self._token(self.spec.bos_id)
        return self.encode(rendered, special=not (bos and rendered.startswith(bos)))

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The conversation as the text that the template makes of it."""
        template = self.need_chat_template()
        eos = self.spec.eos_ids[0] if self.spec.eos_ids else None
        return render(template, messages, self._token(self.spec.bos_id), self._token(eos))

    def need_chat_template(self) -> str:
        """Raises BadInputError when the bundle has none."""
        if self._template is None:
            raise BadInputError("this bundle has no chat template: use --prompt without --chat")
        return self._template

    def _token(self, token: int | None) -> str:
        return (self.tokenizer.id_to_token(token) or "") if token is not None else ""


def render(template: str, messages: Sequence[Message], bos_token: str = "", eos_token: str = "") -> str:
    """A Hugging Face chat template, with what transformers gives it (utils/chat_template_utils.py).

    Raises BadInputError when the template is malformed or refuses the messages.
    """
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return env.from_string(template).render(
            messages=messages,
            add_generation_prompt=True,
            bos_token=bos_token,
            eos_token=eos_token,
            tools=None,
            documents=None,
        )
    except Exception as e:  # a template is a program from elsewhere: it may fail in any way
        raise BadInputError(f"the chat template failed: {e}") from None


class TextStream:
    """Text of a reply as it grows. Pieces put together are exactly what the reply adds to the decoded prompt.

    Decodes a short window of tokens, so that spaces at token borders come out as in the whole text, and holds back
    what may still change: bytes that do not yet make a character.

        ... prompt ... | start ......... shown ......... | end of tokens
                         context, shown    not yet shown
    """

    def __init__(self, text: Text, prompt: Sequence[int]):
        self._text = text
        self._tokens = _visible_end(text, prompt)
        self._start, self._shown = 0, len(self._tokens)

    def push(self, token: int) -> str:
        """The text that became final with `token`; may be empty."""
        self._tokens.append(token)
        piece = self._rest()
        if not piece or piece.endswith(INCOMPLETE):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return piece

    def finish(self) -> str:
        """What was held back, with a replacement character for bytes that stayed incomplete."""
        return self._rest()

    def _rest(self) -> str:
        shown = self._text.decode(self._tokens[self._start : self._shown])
        whole = self._text.decode(self._tokens[self._start :])
        if whole.startswith(shown):
            return whole[len(shown) :]
        # ByteFallback replaces a whole run of bytes, shown characters too, when an invalid byte follows them
        return self._text.decode(self._tokens[self._shown :])


def _visible_end(text: Text, prompt: Sequence[int]) -> list[int]:
    """Enough of the prompt's end for decoding to go on from: something visible, as decoders treat the first visible
    token of a text differently, and no part of a character at its start, as that spoils the bytes that follow."""
    count = 8
    while count < len(prompt) and (text.decode(prompt[-count:]) or INCOMPLETE).startswith(INCOMPLETE):
        count *= 2
    return list(prompt[-count:])


class StopStrings:
    """Cuts text at the first stop string to end, and holds back text that may be the start of one."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """(text that is certainly not part of a stop string, whether one was found)."""
        text = self._held + piece
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = max((_overlap(text, s) for s in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
