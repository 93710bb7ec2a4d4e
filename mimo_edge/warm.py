"""Sequences that stay where they are between the requests of a conversation, by the conversation's id."""

from __future__ import annotations

from mimo_edge.kv.sequence import Sequence

Key = tuple[str, str]  # tenant, session id


class WarmSequences:
    """For one thread at a time. Whoever takes a sequence owns it; the last to be put under a key is the warm one."""

    def __init__(self) -> None:
        self._warm: dict[Key, Sequence] = {}  # the longest unused first

    def take(self, key: Key) -> Sequence | None:
        return self._warm.pop(key, None)

    def put(self, key: Key, sequence: Sequence) -> Sequence | None:
        """The sequence that was warm before, which the caller has to release."""
        before = self._warm.pop(key, None)
        self._warm[key] = sequence
        return before

    def give_up(self) -> Sequence | None:
        """The longest unused, for a request that needs its room."""
        key = next(iter(self._warm), None)
        return None if key is None else self._warm.pop(key)
