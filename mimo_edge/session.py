"""A conversation: replies that follow each other over one sequence of the KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from types import TracebackType
from typing import TYPE_CHECKING

from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.generation import Generation
from mimo_edge.kv.sequence import Sequence
from mimo_edge.options import Options
from mimo_edge.room import Seat
from mimo_edge.text import Message

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mimo_edge.engine import Engine


class Session:
    """Keeps rows between replies: a prompt that begins like the last one is evaluated only where it differs.

    Belongs to one thread at a time. A new reply ends the one before it.
    """

    def __init__(self, engine: Engine, sequence: Sequence, tenant: str = "", messages: Iterable[Message] = ()):
        self.sequence = sequence
        self._tenant = tenant
        self._engine = engine
        self._closed = False
        self._reply: Generation | None = None
        self._asked: str | None = None  # what `_reply` answers in the conversation; None outside of chat
        self._messages: list[Message] = list(messages)

    def generate(self, prompt: str | Tokens[int], **options: Unpack[Options]) -> Generation:
        """One reply to a whole prompt, as Engine.generate; the result says how many of its tokens were reused."""
        if self._closed:
            raise MimoEdgeError("the session is closed: open another with engine.session()")
        engine = self._engine
        request = engine.request(prompt, self._tenant, options)
        guide = engine.guides.start(request.grammar) if request.grammar else None
        self._settle()
        self._reply = Generation(engine, Seat(self.sequence), request, guide)
        return self._reply

    def chat(self, text: str, **options: Unpack[Options]) -> Generation:
        """The model's reply to `text` in the conversation so far, through the bundle's chat template. Options as in
        Engine.generate.

        Raises BadInputError without a template, on empty text, and when the conversation outgrew the context; the
        conversation is then as it was.
        """
        if not isinstance(text, str):
            raise BadInputError(f"a message must be a string, not {type(text).__name__}")
        self._settle()
        user = {"role": "user", "content": text}
        prompt = self._engine.text.encode_chat([*self._messages, user]) if text else []
        reply = self.generate(prompt, **options)
        self._asked = text
        return reply

    @property
    def messages(self) -> list[Message]:
        """The conversation so far; a reply that is under way ends."""
        self._settle()
        return list(self._messages)

    def _settle(self) -> None:
        """Ends the last reply and, when it belongs to the conversation, remembers it."""
        if self._reply is None:
            return
        self._reply.close()
        if self._asked is not None and self._reply.finish_reason != "error":
            self._messages.append({"role": "user", "content": self._asked})
            self._messages.append({"role": "assistant", "content": self._reply.result.text})
        self._reply = self._asked = None

    def close(self) -> None:
        """Ends a running reply and gives the room back."""
        if not self._closed:
            self._closed = True
            self._settle()
            self._engine.room.release(self.sequence)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
