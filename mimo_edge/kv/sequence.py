"""One sequence: the tokens whose rows are committed, and where the rows lie. Metadata only."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from mimo_edge.kv.heads import HeadRows
from mimo_edge.kv.layout import KvLayout, SequenceSlots
from mimo_edge.kv.windows import can_truncate


class Sequence:
    """Row i of the slots holds token `tokens[i]`, for i < len(tokens); nothing else may be read.

    `heads` are the rows of the layout's MTP heads.
    """

    def __init__(self, layout: KvLayout, slots: SequenceSlots):
        self.slots = slots
        self.tokens: list[int] = []
        self._highest = 0  # end of all rows ever written
        self._rings = [(k.window, k.slots) for k in layout.row_kinds if k.window is not None and k.slots is not None]
        window = layout.head_attention.window if layout.heads else None
        self.heads = [HeadRows(i, window) for i in range(layout.heads)]

    def append(self, tokens: Tokens[int]) -> None:
        """The rows of `tokens` were stored behind those that are committed."""
        self.tokens.extend(tokens)
        self._highest = max(self._highest, len(self.tokens))

    def wrote(self, end: int) -> None:
        """Rows up to `end` may have been written, committed or not: what rings held in their place is gone."""
        self._highest = max(self._highest, end)

    def first_held(self, slots: int | None) -> int:
        """Oldest position that a ring of so many slots still holds; 0 where pages hold all rows."""
        return 0 if slots is None else max(0, self._highest - slots)

    def restore(self, tokens: Tokens[int], highest: int) -> None:
        """Rows up to `highest` were copied into the slots; those of `tokens` count as committed."""
        self.tokens = list(tokens)
        self._highest = highest
        for head in self.heads:
            head.restored(len(tokens))

    def can_truncate(self, length: int) -> bool:
        return 0 <= length <= len(self.tokens) and all(
            can_truncate(len(self.tokens), self._highest, length, window, ring) for window, ring in self._rings
        )

    def keep_prefix_of(self, prompt: Tokens[int]) -> int:
        """Goes back to the rows that a prompt shares and returns how many those are.

        At least the prompt's last token is left to evaluate. Everything is dropped when rings no longer hold the
        window of the row to continue at.
        """
        shared = self.reusable(prompt)
        if not shared:
            self.reset()
        elif shared < len(self.tokens):
            del self.tokens[shared:]
            for head in self.heads:
                head.back_to(shared)
        return shared

    def reusable(self, prompt: Tokens[int]) -> int:
        """How many rows keep_prefix_of would keep."""
        shared = 0
        for ours, theirs in zip(self.tokens, prompt[:-1], strict=False):
            if ours != theirs:
                break
            shared += 1
        return shared if self.can_truncate(shared) else 0

    def reset(self) -> None:
        """Back to no rows; right at any time, also when a store was cut off half way."""
        self.tokens = []
        self._highest = 0
        for head in self.heads:
            head.restored(0)
