"""Sizes of the two pools. The one place where bytes of KV are computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mimo_edge.errors import BadInputError
from mimo_edge.kv.windows import ring_slots
from mimo_edge.spec import MAX_DRAFTS, AttentionSpec, ModelSpec

# Names of the state that MTP heads need, beside the attention kinds of layers; a kind of a spec cannot have a dot.
HEAD_ROWS, HIDDEN_ROWS = "mtp.heads", "mtp.hidden"


@dataclass(frozen=True)
class RowKind:
    """The rows of all layers of one attention kind, which are read and written together.

    `slots` is the ring's size, None where pages hold all rows. `token_bytes` is one token in all of these layers.
    """

    name: str
    window: int | None
    slots: int | None
    token_bytes: int


@dataclass(frozen=True)
class KvLayout:
    """Capacities of the pools of one engine.

    Full layers share `pages` pages of `page_size` tokens; window layers of kind w have `sequences` rings of
    `rings[w]` slots. `element_bytes` is 4 on the CPU backends (float32) and 2 on a GPU (float16).

    With `heads` MTP heads every sequence also has a ring rings[HIDDEN_ROWS] of the main model's hidden states (float32,
    before the final norm), and every head keys and values of its own: rings[HEAD_ROWS] where heads have a window,
    rows of the sequence's pages where they see everything. Row p of head i is f(h_p, t_{p+1+i}):

        rows of head i        n-K-W .. window of the oldest row .. n-K-1 .. rewritten by every draft .. n-1
        hidden states needed  n-K-W ................ to catch up ..................................... n-1

    So keys and values of window heads follow from hidden states alone, and a copied prefix leaves them out.
    """

    spec: ModelSpec = field(repr=False)
    context: int
    sequences: int
    pages: int
    page_size: int
    element_bytes: int
    rings: dict[str, int]
    heads: int = 0

    @property
    def full_token_bytes(self) -> int:
        """Bytes of one token in all full layers, and heads that see everything."""
        return sum(k.token_bytes for k in self.row_kinds if k.window is None)

    @property
    def ring_bytes(self) -> int:
        """Bytes of one sequence's rings in all window layers and heads; no more of them once the context exceeds R."""
        rings = [(k.token_bytes, k.slots) for k in self.row_kinds]
        if HEAD_ROWS in self.rings:
            rings.append((self.head_token_bytes, self.rings[HEAD_ROWS]))
        return sum(token_bytes * slots for token_bytes, slots in rings if slots is not None)

    @property
    def head_attention(self) -> AttentionSpec:
        """Of every MTP head."""
        assert self.spec.mtp is not None
        return self.spec.attention[self.spec.mtp.attention]

    @property
    def head_token_bytes(self) -> int:
        """Bytes of one token in all MTP heads."""
        return self.heads * self.element_bytes * self.head_attention.kv_elements if self.heads else 0

    @property
    def row_kinds(self) -> tuple[RowKind, ...]:
        """Kinds in use by layers, then what heads add. What a copied prefix consists of: state that is added here is
        part of it."""
        elements: dict[str, int] = {}
        for kind, a in _layers(self.spec):
            elements[kind] = elements.get(kind, 0) + a.kv_elements
        kinds = [
            RowKind(kind, self.spec.attention[kind].window, self.rings.get(kind), self.element_bytes * n)
            for kind, n in elements.items()
        ]
        if self.heads:
            window = self.head_attention.window
            if window is None:
                kinds.append(RowKind(HEAD_ROWS, None, None, self.head_token_bytes))
            needed = MAX_DRAFTS + 1 if window is None else window + MAX_DRAFTS  # hidden states in front of a draft
            kinds.append(RowKind(HIDDEN_ROWS, needed + 1, self.rings[HIDDEN_ROWS], 4 * self.spec.hidden_size))
        return tuple(kinds)

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.full_token_bytes

    @property
    def full_bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def window_bytes(self) -> int:
        return self.sequences * self.ring_bytes

    def pages_for(self, tokens: int) -> int:
        return math.ceil(tokens / self.page_size)


@dataclass(frozen=True)
class SequenceSlots:
    """Where a sequence's rows live. Fixed at admission, for the whole life of the sequence.

    Full layers: position p is slot `pages[p // page_size] * page_size + p % page_size`.
    Window layers of kind w: position p is slot `ring * R_w + p % R_w`.
    """

    pages: tuple[int, ...]
    ring: int


def plan_layout(
    spec: ModelSpec,
    context: int,
    sequences: int = 1,
    element_bytes: int = 4,
    page_size: int = 64,
    heads: int = 0,
    chunk: int = 0,
) -> KvLayout:
    """Pools that hold `sequences` sequences of `context` tokens each, with the state of the first `heads` MTP heads.

    `chunk` is the most rows of a step: heads that see everything take them in before the next one.
    """
    rings = {
        kind: ring_slots(a.window, MAX_DRAFTS, context) for kind, a in spec.attention.items() if a.window is not None
    }
    if heads:
        assert spec.mtp is not None
        window = spec.attention[spec.mtp.attention].window
        if window is None:
            rings[HIDDEN_ROWS] = min(context, chunk + 2 * (MAX_DRAFTS + 1))
        else:
            rings[HEAD_ROWS] = min(context, window + MAX_DRAFTS)
            rings[HIDDEN_ROWS] = ring_slots(window + MAX_DRAFTS + 1, MAX_DRAFTS, context)
    return KvLayout(
        spec=spec,
        context=context,
        sequences=sequences,
        pages=sequences * math.ceil(context / page_size),
        page_size=page_size,
        element_bytes=element_bytes,
        rings=rings,
        heads=heads,
    )


def resolve_context(spec: ModelSpec, wanted: int | None) -> int:
    """Tokens of context to allocate; None is all that the model has. Raises BadInputError when out of range."""
    if wanted is None:
        return spec.max_context
    if not 1 <= wanted <= spec.max_context:
        raise BadInputError(f"context {wanted} is out of range (allowed: 1 to {spec.max_context}, the model's own)")
    return wanted


def _layers(spec: ModelSpec) -> list[tuple[str, AttentionSpec]]:
    return [(layer.attention, spec.attention[layer.attention]) for layer in spec.layers]
