"""MTP heads of the reference backend: the main model's hidden states in rings, every head's own keys and values."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mimo_edge.backends import host_rows, oracle
from mimo_edge.backends.base import SequenceSlots
from mimo_edge.kv.layout import HEAD_ROWS, HIDDEN_ROWS, KvLayout
from mimo_edge.kv.windows import first_visible


class ReferenceHeads:
    """Reads only slots that hold a committed hidden state or an evaluated row, so the others may hold anything."""

    def __init__(self, weights: oracle.Weights, layout: KvLayout):
        a, slots = layout.head_attention, host_rows.capacity(layout, HEAD_ROWS)
        self._weights, self._layout = weights, layout
        self._hidden = torch.zeros(host_rows.capacity(layout, HIDDEN_ROWS), layout.spec.hidden_size)
        self._pools = [
            (torch.zeros(slots, a.kv_heads, a.head_dim), torch.zeros(slots, a.kv_heads, a.v_head_dim))
            for _ in range(layout.heads)
        ]
        self._last: dict[int, tuple[int, Tensor]] = {}  # of each ring: first row and hidden states of the last head

    def store(self, slots: SequenceSlots, start: int, hidden: Tensor) -> None:
        """Keeps the newest of the committed rows `hidden` [n, hidden] from position `start` on."""
        first = max(0, len(hidden) - self._layout.rings[HIDDEN_ROWS])
        self._hidden[self._at(HIDDEN_ROWS, slots, start + first, start + len(hidden))] = hidden[first:]

    def draft(
        self, slots: SequenceSlots, head: int, held: int, start: int, tokens: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """As base.DraftHeads."""
        layout, end = self._layout, start + len(tokens)
        keys, values = self._pools[head]
        oldest = max(held, first_visible(start, layout.head_attention.window))
        at = self._at(HEAD_ROWS, slots, oldest, start)
        with torch.inference_mode():
            logits, own, k, v = oracle.mtp(
                layout.spec,
                self._weights,
                head,
                self._inputs(slots, head, start, end),
                torch.from_numpy(tokens),
                torch.arange(start, end),
                oracle.Past(keys[at], values[at], torch.arange(oldest, start)),
            )
        first = max(start, end - layout.rings.get(HEAD_ROWS, layout.context))
        at = self._at(HEAD_ROWS, slots, first, end)
        keys[at], values[at] = k[first - start :], v[first - start :]
        self._last[slots.ring] = start, own
        return logits[-1].numpy()

    def pools(self, kind: str) -> host_rows.Pools:
        """What `kind` consists of, as bytes go to and come from the prefix cache."""
        if kind == HIDDEN_ROWS:
            return [(self._hidden.numpy(),)]
        return [(k.numpy(), v.numpy()) for k, v in self._pools]

    def _inputs(self, slots: SequenceSlots, head: int, start: int, end: int) -> Tensor:
        """The hidden states that a head pairs with tokens: the main model's, in a chain the previous head's."""
        mtp = self._layout.spec.mtp
        if head and mtp and mtp.chained:
            first, own = self._last[slots.ring]
            return own[start - first : end - first]
        return self._hidden[self._at(HIDDEN_ROWS, slots, start, end)]

    def _at(self, kind: str, slots: SequenceSlots, first: int, last: int) -> Tensor:
        return torch.from_numpy(host_rows.addresses(self._layout, slots, kind, np.arange(first, last)))
