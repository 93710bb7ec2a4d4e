"""Sizes of the two pools. The one place where bytes of KV are computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mimo_edge.kv.windows import ring_slots
from mimo_edge.spec import MAX_DRAFTS, AttentionSpec, ModelSpec


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
    """

    spec: ModelSpec = field(repr=False)
    context: int
    sequences: int
    pages: int
    page_size: int
    element_bytes: int
    rings: dict[str, int]

    @property
    def full_token_bytes(self) -> int:
        """Bytes of one token in all full layers."""
        return self.element_bytes * sum(a.kv_elements for _, a in _layers(self.spec) if a.window is None)

    @property
    def ring_bytes(self) -> int:
        """Bytes of one sequence's rings in all window layers; independent of the context once it exceeds R."""
        return self.element_bytes * sum(
            a.kv_elements * self.rings[kind] for kind, a in _layers(self.spec) if a.window is not None
        )

    @property
    def row_kinds(self) -> tuple[RowKind, ...]:
        """Kinds in use by layers. What a copied prefix consists of: state that is added here is part of it."""
        elements: dict[str, int] = {}
        for kind, a in _layers(self.spec):
            elements[kind] = elements.get(kind, 0) + a.kv_elements
        return tuple(
            RowKind(kind, self.spec.attention[kind].window, self.rings.get(kind), self.element_bytes * n)
            for kind, n in elements.items()
        )

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
    spec: ModelSpec, context: int, sequences: int = 1, element_bytes: int = 4, page_size: int = 64
) -> KvLayout:
    """Pools that hold `sequences` sequences of `context` tokens each."""
    rings = {
        kind: ring_slots(a.window, MAX_DRAFTS, context) for kind, a in spec.attention.items() if a.window is not None
    }
    return KvLayout(
        spec=spec,
        context=context,
        sequences=sequences,
        pages=sequences * math.ceil(context / page_size),
        page_size=page_size,
        element_bytes=element_bytes,
        rings=rings,
    )


def _layers(spec: ModelSpec) -> list[tuple[str, AttentionSpec]]:
    return [(layer.attention, spec.attention[layer.attention]) for layer in spec.layers]
