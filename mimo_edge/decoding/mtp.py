"""Multi-token prediction: heads draft the tokens behind the pending one, the model's next step verifies them.

    committed rows        pending   drafts
    t_0 .. t_{n-1}        t_n       d_{n+1} .. d_{n+k}

A step evaluates the pending token and the drafts. Behind each row a token is sampled as if there were no drafts, as
long as the drafts before it are what was sampled. A draft is chosen from its head's logits by the rules, with the
noise, of the position that it is for, which makes a sampled draft hold about as often as the two distributions allow.
Whether it holds changes nothing but the number of steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mimo_edge.backends.base import Backend, DraftHeads, DraftRounds, Round
from mimo_edge.decoding.adaptive import Acceptance, Chooser, Costs
from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.kv.heads import HeadRows
from mimo_edge.kv.layout import HIDDEN_ROWS, KvLayout
from mimo_edge.kv.sequence import Sequence as Rows
from mimo_edge.request import Drafts, MtpUse, SamplingParams
from mimo_edge.spec import MAX_DRAFTS, ModelSpec

log = logging.getLogger("mimo_edge")
PARTS = ("draft", "verify", "accept")  # of a step's time
Pick = Callable[[NDArray[np.float32], int, Sequence[int]], int]  # logits, position, the drafts before it


def usable_heads(spec: ModelSpec, backend: Backend, drafts: Drafts) -> tuple[int, str]:
    """(how many heads an engine has state for, why none).

    Raises UnsupportedError when more drafts are asked for than heads can make; "auto" then does without and logs why.
    """
    wanted = MAX_DRAFTS if drafts == "auto" else drafts
    if not wanted:
        return 0, "0 drafts, as asked"
    have = min(spec.mtp.heads if spec.mtp else 0, getattr(backend, "heads", 0))
    if not spec.mtp:
        why = "the model has no MTP heads"
    elif not have:
        why = f"backend {backend.name} does not draft with this bundle"
    else:
        why = f"there {'is' if have == 1 else 'are'} {have} MTP head{'s' * (have > 1)}"
    if drafts != "auto" and have < wanted:
        raise UnsupportedError(f"drafts {drafts}: {why} (allowed: auto, 0{f' to {have}' * (have > 0)})")
    if not have:
        log.log(logging.INFO if spec.mtp else logging.DEBUG, "no drafts, as %s", why)
    return min(have, wanted), "" if have else why


def check_drafts(drafts: Drafts, most: int = MAX_DRAFTS) -> None:
    """Raises BadInputError unless it is "auto" or a number from 0 to `most`."""
    if drafts != "auto" and not (type(drafts) is int and 0 <= drafts <= most):
        raise BadInputError(f"drafts {drafts!r} is out of range (allowed: auto, 0 to {most})")


class Drafter:
    """The heads of an engine's backend, and what was learned about them. For one thread at a time."""

    def __init__(self, backend: Backend, layout: KvLayout):
        assert isinstance(backend, DraftHeads) and layout.heads and layout.spec.mtp
        self._backend = cast(DraftHeads, backend)
        self._rounds = backend if isinstance(backend, DraftRounds) else None
        self._chained = layout.spec.mtp.chained
        self._ends = set(layout.spec.eos_ids)
        self._eager = layout.head_attention.window is None
        self._ring = layout.rings[HIDDEN_ROWS]
        self.heads = layout.heads
        self.costs, self.usual = Costs(), Acceptance(256)

    def missing(self, rows: Rows, heads: int) -> int:
        """How many rows the slowest head would evaluate beyond the usual ones."""
        return max((h.missing(len(rows.tokens)) for h in rows.heads[:heads]), default=0)

    def draft(self, rows: Rows, pending: int, count: int, pick: Pick) -> list[int]:
        """Up to `count` drafts behind the pending token; fewer if one ends the text."""
        n, heads, drafts = len(rows.tokens), rows.heads[:count], list[int]()
        starts = self._starts(heads, n)
        for head, start in zip(heads, starts, strict=True):
            known = [*rows.tokens[start + 1 + head.index :], pending, *drafts]
            logits = self._evaluate(rows, head, start, known[start - n :])
            head.evaluated(start, n, last=n)
            drafts.append(pick(logits, n + 1 + head.index, drafts))
            if drafts[-1] in self._ends:
                break
        return drafts

    def _starts(self, heads: Sequence[HeadRows], n: int) -> list[int]:
        """First row that each head evaluates behind n rows; heads of a chain evaluate the same ones."""
        starts = [h.start(n) for h in heads]
        return [min(starts)] * len(starts) if self._chained else starts

    @property
    def has_rounds(self) -> bool:
        """Whether the backend drafts, verifies and accepts in one call."""
        return self._rounds is not None

    def round(self, rows: Rows, pending: int, count: int, sampling: SamplingParams) -> list[int]:
        """A run of the pending token and `count` drafts, and the tokens that follow: the drafts that hold, one more."""
        assert self._rounds
        n, heads, first = len(rows.tokens), rows.heads[:count], max(0, len(rows.tokens) - MAX_DRAFTS)
        usual = max(0, first - 1)  # rows from here on are the round's
        starts = self._starts(heads, n)
        for head, start in zip(heads, starts, strict=True):
            missed = rows.tokens[start + 1 + head.index : usual + 1 + head.index]
            self._rounds.catch_up(rows.slots, head.index, _held(head, start), start, np.array(missed, np.int64))
        held = max(_held(head, start) for head, start in zip(heads, starts, strict=True))
        known = np.array([*rows.tokens[first:], pending], np.int64)
        tokens = self._rounds.round(Round(rows.slots, n, known, count, held, sampling)).tolist()
        for head, start in zip(heads, starts, strict=True):
            head.evaluated(start, n, last=n)
        return tokens

    def keep_up(self, rows: Rows, pending: Sequence[int], upcoming: int) -> None:
        """Heads that see everything take in rows before a step of `upcoming` rows pushes their hidden states out."""
        if self._eager and len(rows.tokens) + upcoming - self._ring > min(h.done for h in rows.heads):
            self.finish(rows, pending)

    def finish(self, rows: Rows, pending: Sequence[int] = ()) -> None:
        """Heads that see everything take in all rows whose tokens are known; others need hidden states only."""
        if not self._eager:
            return
        n = len(rows.tokens)
        last = n + len(pending) - 1
        starts, ends = [h.done for h in rows.heads], [min(n, last - h.index) for h in rows.heads]
        if self._chained:
            starts, ends = [min(starts)] * self.heads, [min(ends)] * self.heads
        for head, start, end in zip(rows.heads, starts, ends, strict=True):
            if start < end:
                first, stop = start + 1 + head.index, end + 1 + head.index
                known = [*rows.tokens[first:stop], *pending[max(0, first - n) : max(0, stop - n)]]
                self._evaluate(rows, head, start, known)
                head.evaluated(start, end, last)

    def _evaluate(self, rows: Rows, head: HeadRows, start: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        return self._backend.draft(rows.slots, head.index, _held(head, start), start, np.array(tokens, np.int64))


def _held(head: HeadRows, start: int) -> int:
    """The first row that counts for rows from `start` on."""
    return min(head.held, start) if start <= head.done else start


class Speculation:
    """Drafts of one reply: how many the next step has, what became of them, where the time goes.

    A step is prepare or propose; lap("verify") and lap("accept") as that is done; then settle. Where drafts are left to
    the device (`in_round`), `round` is the run.
    """

    def __init__(self, drafter: Drafter | None, wanted: Drafts, why_not: str = ""):
        """`why_not` says why there is no drafter."""
        self.drafts: list[int] = []  # of the step that runs
        self._drafter, self._wanted, self._why_not = drafter, wanted, why_not
        self._most = drafter.heads if drafter else 0
        if wanted != "auto":
            self._most = min(self._most, wanted)
        self._chooser = Chooser(drafter.costs, drafter.usual, self._most) if drafter and self._most else None
        self._steps = [0] * (MAX_DRAFTS + 1)  # by number of drafts
        self._accepted = [0] * MAX_DRAFTS  # by position
        self._total = dict.fromkeys(PARTS, 0.0)
        self._begin(0)

    def _begin(self, context: int) -> None:
        self.drafts, self._in_round = [], 0
        self._context, self._missing = context, 0
        self._seconds, self._mark = dict.fromkeys(PARTS, 0.0), time.perf_counter()

    def prepare(self, rows: Rows, pending: Sequence[int], upcoming: int) -> None:
        """Before a step of `upcoming` pending rows and no drafts."""
        self._begin(len(rows.tokens))
        if self._drafter:
            self._drafter.keep_up(rows, pending, upcoming)
        self.lap("draft")

    def propose(self, rows: Rows, pending: int, room: int, pick: Pick, plain: bool = False) -> None:
        """Before a step of one pending row: makes drafts, `room` at most. `plain`: temperature, filters and noise say
        it all, so that a device may choose tokens and drafts."""
        self.prepare(rows, [pending], 1 + max(0, min(self._most, room)))
        count = min(self._most, room)
        if self._drafter and self._chooser and count > 0:
            self._missing = self._drafter.missing(rows, self._most)
            if self._wanted == "auto":
                count = self._chooser.choose(count, self._missing)
            if count and plain and self._drafter.has_rounds:
                self._in_round = count
            elif count:
                self.drafts = self._drafter.draft(rows, pending, count, pick)
        self.lap("draft")

    @property
    def in_round(self) -> int:
        """How many drafts the next step leaves to the device."""
        return self._in_round

    def round(self, rows: Rows, pending: int, sampling: SamplingParams) -> list[int]:
        """Instead of a run: drafts and verifies in one call; the tokens behind the pending one."""
        assert self._drafter
        tokens = self._drafter.round(rows, pending, self._in_round, sampling)
        rejected = self._in_round + 1 - len(tokens)
        self.drafts = [*tokens[:-1], *[-1] * rejected]  # the device keeps those to itself
        return tokens

    def lap(self, part: str) -> None:
        """The time since the last lap went into `part` of PARTS."""
        now = time.perf_counter()
        self._seconds[part] += now - self._mark
        self._mark = now

    def settle(self, rows: Rows, sampled: Sequence[int], kept: int) -> None:
        """The step is committed: `sampled` behind its rows, of its drafts the first `kept` are the text's."""
        self._steps[len(self.drafts)] += 1
        for part, seconds in self._seconds.items():
            self._total[part] += seconds
        if self._drafter is None or self._chooser is None:
            return
        held = [draft == token for draft, token in zip(self.drafts, sampled, strict=False)]
        for head in rows.heads[: len(self.drafts)]:
            head.agreed(self._context + kept)
        for i in range(sum(held)):
            self._accepted[i] += 1
        count, drafting = len(self.drafts), self._seconds["draft"]
        step = self._seconds["verify"] + self._seconds["accept"]  # a device's rounds do not tell them apart
        if count:
            self._drafter.costs.drafted(count, self._missing, drafting)
        self._drafter.costs.ran(1 + count, step, self._chooser.in_use)
        self._chooser.learn(count, len(held), sum(held), drafting + step)

    def use(self) -> MtpUse:
        """Of the reply so far."""
        if not any(self._steps[1:]):
            return MtpUse(reason=self._reason())
        drafted = tuple(sum(self._steps[i + 1 :]) for i in range(MAX_DRAFTS))
        spent = sum(self._total.values())
        shares = {f"{part}_share": seconds / spent for part, seconds in self._total.items()}
        return MtpUse(
            steps=sum(self._steps),
            drafted=sum(drafted),
            accepted=sum(self._accepted),
            drafted_by_position=drafted,
            accepted_by_position=tuple(self._accepted),
            **shares,
            reason=self._reason(),
        )

    def _reason(self) -> str:
        if self._drafter is None:
            return self._why_not
        if self._wanted != "auto":
            return f"{self._wanted} drafts, as asked"
        if self._chooser is None or not any(self._steps):
            return "no step could have drafts"
        usual = max(range(len(self._steps)), key=lambda k: self._steps[k])
        share = self._steps[usual] / sum(self._steps)
        return f"{usual} drafts in {share:.0%} of steps: {self._chooser.why()}"
