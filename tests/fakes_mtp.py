"""The fake backend with MTP heads, whose rows say what they were made of.

A hidden state is the position and a hash of all tokens up to it; a head's row adds the token it was paired with.
`draft` fails when a row that it reads is not there, belongs to other tokens, or was paired with a token that is not
the text's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from fakes import TEMPLATE, FakeBackend, fake_spec, fake_text, scramble

from mimo_edge.engine import Engine
from mimo_edge.kv.layout import HEAD_ROWS, HIDDEN_ROWS
from mimo_edge.spec import MtpSpec


def state(tokens: list[int]) -> int:
    """Stands for the hidden state behind `tokens`."""
    return hash(tuple(tokens)) & 2**40 - 1


def some(position: int, head: int) -> bool:
    return (position * 7 + head * 3) % 5 == 0


class FakeHeads(FakeBackend):
    """`misses(position, head)` says which drafts are wrong."""

    heads = 3

    def __init__(self, rule=scramble, misses=some):
        super().__init__(rule)
        self.misses = misses
        self.drafts = []  # (head, first row, rows)

    def allocate(self, layout):
        super().allocate(layout)
        self._rings[HIDDEN_ROWS] = np.full(layout.sequences * layout.rings.get(HIDDEN_ROWS, 0), -1)
        self._head_rows = [{} for _ in range(layout.heads)]  # slot -> position, state, token

    def commit(self, accepted):
        steps = self._rows
        super().commit(accepted)
        for step, rows in zip(steps, accepted, strict=True):
            if self.layout.heads:
                text = self._text(step.slots, step.start + rows)
                for p in range(step.start, step.start + rows):
                    self._rings[HIDDEN_ROWS][self._at(step.slots, HIDDEN_ROWS, p)] = state(text[: p + 1])

    def draft(self, slots, head, held, start, tokens):
        assert not self._rows and len(tokens) and 0 <= held <= start
        n = start + len(tokens)
        text, rows, window = self._text(slots, n), self._head_rows[head], self.layout.head_attention.window
        for p, token in enumerate(tokens.tolist(), start):
            hidden = int(self._rings[HIDDEN_ROWS][self._at(slots, HIDDEN_ROWS, p)])
            assert hidden == state(text[: p + 1]), f"the hidden state of row {p} is lost"
            rows[self._at(slots, HEAD_ROWS, p)] = p, hidden, token
        self.drafts.append((head, start, len(tokens)))
        unknown = [-1] * (1 + head - len(tokens))  # so few rows do not show all tokens up to the last one
        known = [*text, *unknown, *tokens.tolist()[-1 - head :]]
        self._check(rows, slots, head, max(held, 0 if window is None else n - window), text, known)
        token = self.rule(known)
        logits = np.zeros(self.layout.spec.vocab_size, np.float32)
        logits[token ^ 1 if self.misses(n, head) else token] = 1
        return logits

    def read_rows(self, slots, kind, first, last, out):
        if kind != HEAD_ROWS:
            return super().read_rows(slots, kind, first, last, out)
        values = out.view(np.int64).reshape(last - first, self.layout.heads, 2)
        for row, p in zip(values, range(first, last), strict=True):
            for rows, part in zip(self._head_rows, row, strict=True):
                part[:] = rows.get(self._at(slots, HEAD_ROWS, p), (p, -1, -1))[1:]

    def write_rows(self, slots, kind, first, last, rows):
        if kind != HEAD_ROWS:
            return super().write_rows(slots, kind, first, last, rows)
        for p, row in enumerate(rows.view(np.int64).reshape(last - first, self.layout.heads, 2).tolist(), first):
            for held, part in zip(self._head_rows, row, strict=True):
                held[self._at(slots, HEAD_ROWS, p)] = (p, *part)

    def _check(self, rows, slots, head, first, text, known):
        window = self.layout.head_attention.window
        assert first == max(0, len(text) - window) if window else first == 0, (
            f"head {head} sees rows from {first} on only"
        )
        for p in range(first, len(text)):
            position, hidden, token = rows[self._at(slots, HEAD_ROWS, p)]
            assert (position, hidden) == (p, state(text[: p + 1])), f"row {p} of head {head} is another's"
            if known[p + 1 + head] >= 0:
                assert token == known[p + 1 + head], f"row {p} of head {head} was paired with a wrong token"

    def _text(self, slots, n):
        return [int(self._full[self._slot(slots, p)]) for p in range(n)]


class WritingHeads(FakeHeads):
    """Stores the rows of short runs in rings at once, as a GPU does."""

    writes_in_run = True

    def run(self, steps):
        outputs = super().run(steps)
        for step in steps:
            if len(step.tokens) <= 4:
                for p, token in enumerate(step.tokens.tolist(), step.start):
                    for kind in self._sizes:
                        self._rings[kind][self._at(step.slots, kind, p)] = token
        return outputs


def heads_engine(
    rule=scramble, *, misses=some, context=64, window=5, full=False, template=TEMPLATE, backend=FakeHeads, **options
) -> Engine:
    """An engine whose heads see `window` rows, or all with `full`."""
    spec = replace(fake_spec(context, window), mtp=MtpSpec(3, "full" if full else "window", "dense"))
    return Engine(spec, fake_text(spec, template), backend(rule, misses), **options)
