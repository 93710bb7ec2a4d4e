"""Specs with MTP heads, and a game of random drafts against heads that keep every row they evaluated, without rings."""

from dataclasses import replace

import numpy as np
import torch
from rows import error
from specs import gemma_spec, mimo_spec, qwen_spec

from mimo_edge.backends import oracle
from mimo_edge.backends.base import Step
from mimo_edge.kv.layout import HIDDEN_ROWS
from mimo_edge.spec import MAX_DRAFTS, FeedForwardSpec, GateSpec, MoeSpec, MtpSpec

K = MAX_DRAFTS


def with_mtp(spec, heads, attention, ffn="dense", **how):
    return replace(spec, mtp=MtpSpec(heads, attention, ffn, **how))


def with_ffn(spec, ffn):
    return replace(spec, ffn=spec.ffn | {"mtp": ffn})


HEADS = {
    "mimo": mimo_spec(mtp=3),
    "mimo-7b": with_mtp(qwen_spec(), 1, "full", order="hidden_first", zero_first=True),
    "post-norm": replace(mimo_spec(5), mtp=MtpSpec(2, "window", "dense", "hidden_first", "post_norm")),
    "chained": with_mtp(mimo_spec(6), 3, "window", chained=True),
    "chained-full": with_mtp(qwen_spec(), 2, "full", chained=True, hidden="post_norm"),
    "gemma": with_mtp(gemma_spec(), 2, "wide", zero_first=True),
    "gated": with_ffn(mimo_spec(mtp=2), FeedForwardSpec(64, gate=GateSpec(16, 8))),
    "moe": with_ffn(mimo_spec(mtp=2), FeedForwardSpec(32, moe=MoeSpec(4, 2))),
    "biased": replace(with_ffn(mimo_spec(mtp=1), FeedForwardSpec(32, moe=MoeSpec(4, 2))), output_bias=True),
    "window-of-one": mimo_spec(1, mtp=3),
}


class PlainHeads:
    """Heads of one sequence of the oracle: every row that was evaluated, the newest of a position."""

    def __init__(self, spec, weights, tokens):
        self._spec, self._weights = spec, weights
        self._hidden = oracle.forward(
            spec, weights, torch.from_numpy(tokens), torch.arange(len(tokens)), [None] * len(spec.layers)
        ).hidden
        self._rows = [{} for _ in range(spec.mtp.heads)]
        self._last = (0, self._hidden)

    def draft(self, head, held, start, tokens):
        a = self._spec.attention[self._spec.mtp.attention]
        end, past = start + len(tokens), [self._rows[head][p] for p in range(held, start)]
        k = torch.stack([k for k, _ in past]) if past else torch.zeros(0, a.kv_heads, a.head_dim)
        v = torch.stack([v for _, v in past]) if past else torch.zeros(0, a.kv_heads, a.v_head_dim)
        first, hidden = self._last if head and self._spec.mtp.chained else (0, self._hidden)
        logits, own, k, v = oracle.mtp(
            self._spec, self._weights, head, hidden[start - first : end - first], torch.from_numpy(tokens),
            torch.arange(start, end), oracle.Past(k, v, torch.arange(held, start)),
        )  # fmt: skip
        self._rows[head] |= {start + i: (k[i], v[i]) for i in range(len(tokens))}
        self._last = start, own
        return logits[-1].numpy()


class Game:
    """One sequence in a backend: steps with random accept counts, drafts, gaps without drafts, restarts."""

    def __init__(self, backend, spec, weights, slots, tokens, rng):
        self.spec, self._backend, self._slots, self._tokens, self._rng = spec, backend, slots, tokens, rng
        self._plain = PlainHeads(spec, weights, tokens)
        self._ends = [(0, 0)] * spec.mtp.heads  # of each head: oldest row there, end of all rows
        self.n, self.errors = 0, []

    @property
    def worst(self):
        return np.max(self.errors)  # NaN if one is

    def step(self, rows):
        """`rows` rows, some of them with wrong tokens that are not accepted."""
        accepted = int(self._rng.integers(1, rows + 1)) if self.n else rows
        tokens = self._tokens[self.n : self.n + rows].copy()
        tokens[accepted:] = self._rng.integers(0, self.spec.vocab_size, len(tokens[accepted:]))
        self._backend.run([Step(self._slots, self.n, tokens, np.array([0]))])
        accepted = min(accepted, len(tokens))
        self._backend.commit([accepted])
        self.n += accepted

    def draft(self, heads, restart=False):
        """The newest rows of the first heads, from one a draft may rewrite, or from anywhere after a restart."""
        room, start = self._backend._layout.rings[HIDDEN_ROWS], 0  # hidden states that are there
        for head in range(heads):
            held, end = self._ends[head]
            if head == 0 or not self.spec.mtp.chained:
                low, high = max(held, end - K - 1, self.n - room, 0), min(end, self.n - 1)
                anew = restart or low > high
                start = int(
                    self._rng.integers(max(0, self.n - room), self.n) if anew else self._rng.integers(low, high + 1)
                )
                held = start if anew else held
            elif not max(held, end - K - 1) <= start <= end:
                held = start
            self._compare(head, held, start)

    def _compare(self, head, held, start):
        tokens = self._rng.integers(0, self.spec.vocab_size, self.n - start)
        got = self._backend.draft(self._slots, head, held, start, tokens).copy()
        self.errors.append(error(got, self._plain.draft(head, held, start, tokens)))
        self._ends[head] = held, self.n


def play(games, rng, rounds=40):
    """Sequences take turns; the worst error of any draft."""
    for game in games:
        game.step(int(rng.integers(1, 14)))
    for _ in range(rounds):
        for game in games:
            if game.n + K + 1 <= len(game._tokens):
                game.step(K + 1)
            if rng.random() < 0.7:  # else a gap
                game.draft(int(rng.integers(1, game.spec.mtp.heads + 1)), restart=rng.random() < 0.1)
    return np.max([game.worst for game in games])
