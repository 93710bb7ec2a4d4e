"""How many drafts pay: a step with k drafts takes draft(k) + run(k + 1) seconds and yields 1 + p1 + p1 p2 + .. tokens.

Seconds are measured as decoding goes along, p_i is the share of drafts i that held where all before them did. Chosen is
the k of most tokens a second. What is not in use is tried now and then, at a loss of PROBE_SHARE of all time at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mimo_edge.spec import MAX_DRAFTS

PROBE_SHARE = 0.01
BURST = 4  # steps of a probe: a single one says little, and heads may have to catch up first
PROBE_EVERY = 32  # steps at least
HYSTERESIS = 1.03  # what another k must be better by
_SURE = 3  # measurements of seconds before they are relied on
_LOWER, _HIGHER = 0.15, 0.1  # weights of a new one: what disturbs a measurement makes it higher
_PACE, _IN_USE = 0.2, 0.1  # weights of a new pace, and of what is in use, of which there are many measurements
_CREDIT = 32  # steps' time that probes may lose at once
_FIRST = 0.7  # acceptance before anything is known
_TRUST = 12.0  # steps that the engine's usual acceptance counts for in a new reply


@dataclass
class Average:
    """Exponentially weighted seconds. The first measurement touches new memory, and any may be disturbed: of the first
    few the lowest one counts, later ones as no more than twice the average."""

    value: float = 0.0
    count: int = 0

    def add(self, seconds: float, share: float = 1.0) -> None:
        """`share` of the usual weight."""
        if self.count < _SURE:
            self.value = min(self.value, seconds) if self.count else seconds
        else:
            weight = share * (_LOWER if seconds < self.value else _HIGHER)
            self.value += weight * (min(seconds, 2 * self.value) - self.value)
        self.count += 1


class Costs:
    """Seconds on this device: of steps by rows, and of a head's draft; by context in buckets that double.

    They are those at `pace` 1. What slows all steps down (other programs, heat) shows in the steps in use and counts
    for the others, which were measured before. A step of another size than the one before it is not measured: changing
    costs.
    """

    def __init__(self) -> None:
        self._runs: dict[int, dict[int, Average]] = {}  # rows -> bucket
        self._drafts: dict[int, Average] = {}  # of one head
        self._missing = Average()  # of a row and head that had to catch up
        self._last_rows = 0
        self.pace = 1.0
        self.credit: float | None = None  # seconds that probes may still lose

    def ran(self, rows: int, context: int, seconds: float, in_use: bool = True) -> None:
        same, self._last_rows = rows == self._last_rows, rows
        if not same:
            return
        average = self._runs.setdefault(rows, {}).setdefault(context.bit_length(), Average())
        if average.count >= _SURE and in_use:
            self.pace += _PACE * (min(max(seconds / average.value, self.pace / 2), 2 * self.pace) - self.pace)
        average.add(seconds / self.pace, _IN_USE if in_use else 1.0)

    def drafted(self, heads: int, context: int, missing: int, seconds: float) -> None:
        """`missing`: rows that each head evaluated beyond the usual ones."""
        seconds /= self.pace
        if not missing:
            self._drafts.setdefault(context.bit_length(), Average()).add(seconds / heads)
        elif usual := self.draft(1, context):
            self._missing.add(max(0.0, seconds / heads - usual) / missing)

    def measured(self, rows: int) -> int:
        """How often."""
        return sum(a.count for a in self._runs.get(rows, {}).values())

    def run(self, rows: int, context: int) -> float:
        """Of a step; between numbers of rows that were measured, and outside of them, on a line."""
        known = sorted(self._runs)
        if rows in known or len(known) < 2:
            return _nearest(self._runs[rows if rows in known else known[0]], context) if known else 0.0
        low = max((r for r in known[:-1] if r < rows), default=known[0])
        high = min(r for r in known if r > low)
        a, b = _nearest(self._runs[low], context), _nearest(self._runs[high], context)
        return a + (b - a) * (rows - low) / (high - low)

    def draft(self, heads: int, context: int, missing: int = 0) -> float:
        return heads * (_nearest(self._drafts, context) + missing * self._missing.value) if self._drafts else 0.0


def _nearest(buckets: dict[int, Average], context: int) -> float:
    return buckets[min(buckets, key=lambda b: abs(b - context.bit_length()))].value


@dataclass
class Acceptance:
    """Of drafts by position, older steps counting less: of `tries` of draft i, `hits` held."""

    memory: float  # steps
    hits: list[float] = field(default_factory=lambda: [_FIRST * _TRUST / 2] * MAX_DRAFTS)
    tries: list[float] = field(default_factory=lambda: [_TRUST / 2] * MAX_DRAFTS)

    def add(self, accepted: int, tested: int) -> None:
        """Of a step's drafts the first `tested` were compared, of which the first `accepted` held."""
        for i in range(tested):
            self.hits[i] += (i < accepted) - self.hits[i] / self.memory
            self.tries[i] += 1 - self.tries[i] / self.memory

    def tokens(self, drafts: int) -> float:
        """That a step is expected to yield."""
        total = share = 1.0
        for hits, tries in zip(self.hits[:drafts], self.tries, strict=False):
            share *= hits / tries
            total += share
        return total

    def begin(self, memory: float) -> Acceptance:
        """Of a new reply, that begins with what is usual."""
        shares = [h / t for h, t in zip(self.hits, self.tries, strict=True)]
        return Acceptance(memory, [_TRUST * s for s in shares], [_TRUST] * MAX_DRAFTS)


class Chooser:
    """Chooses for one reply; `costs` and `usual` are the engine's, which go on learning."""

    def __init__(self, costs: Costs, usual: Acceptance, most: int):
        self.costs, self._usual, self.acceptance, self._most = costs, usual, usual.begin(64), most
        self._now = most
        self._burst = self._since = self._turn = 0
        self._probing: int | None = None

    def choose(self, context: int, room: int, missing: int) -> int:
        """Drafts of the next step behind `context` rows, at most `room`; heads have to catch up `missing` rows."""
        best = self._now = self._best(context, missing)
        for k in (self._most, 0):
            if self.costs.measured(k + 1) < _SURE:
                return min(k, room)
        self._since += 1
        if self._burst == 0:
            self._probing = self._probe(best, context, missing)
        if self._probing is not None:
            self._burst -= 1
            return min(self._probing, room)
        return min(best, room)

    @property
    def in_use(self) -> bool:
        """Whether the step is no probe."""
        return self._probing is None

    def seconds(self, drafts: int, context: int, missing: int = 0) -> float:
        """Of a step. What heads have to catch up is shared out over the steps between probes.

        More than a step a row and draft is not believed: it was disturbed, and does not pay either way.
        """
        one = self.costs.run(1, context)
        draft = self.costs.draft(drafts, context)
        catching_up = self.costs.draft(drafts, context, missing) - draft
        usual = min(draft, drafts * one) + min(self.costs.run(drafts + 1, context), (drafts + 1) * one)
        return usual + catching_up / PROBE_EVERY

    def rate(self, drafts: int, context: int, missing: int = 0) -> float:
        """Tokens a second."""
        return self.acceptance.tokens(drafts) / max(self.seconds(drafts, context, missing), 1e-9)

    def _best(self, context: int, missing: int) -> int:
        rates = [self.rate(k, context, missing) for k in range(self._most + 1)]
        best = rates.index(max(rates))
        return best if rates[best] > HYSTERESIS * rates[self._now] else self._now

    def _probe(self, best: int, context: int, missing: int) -> int | None:
        """Another k, once so many steps have passed that it can be afforded: all drafts or none, taking turns."""
        others = [k for k in (self._most, 0) if k != best]
        k = others[self._turn % len(others)]
        lost = BURST * self._lost(k, self.seconds(k, context), self.acceptance.tokens(k), best, context)
        lost += self.costs.draft(k, context, missing) - self.costs.draft(k, context)
        if self._since < PROBE_EVERY or lost > (self.costs.credit or 0):
            return None
        self._turn, self._since, self._burst = self._turn + 1, 0, BURST
        return k

    def _lost(self, drafts: int, seconds: float, tokens: float, best: int, context: int) -> float:
        return max(0.0, seconds - tokens / self.rate(best, context)) if drafts != best else 0.0

    def learn(self, context: int, drafts: int, tested: int, accepted: int, seconds: float) -> None:
        """A step took `seconds`, draft included."""
        seconds /= self.costs.pace
        most = _CREDIT * self.seconds(0, context)
        credit = most / 2 if self.costs.credit is None else self.costs.credit
        if self._probing is not None:
            credit -= self._lost(drafts, seconds, accepted + 1, self._now, context)
        self.costs.credit = min(credit + PROBE_SHARE * seconds, most)
        if self._burst == 0:
            self._probing = None
        self.acceptance.add(accepted, tested)
        self._usual.add(accepted, tested)

    def why(self, context: int) -> str:
        """What the choice rests on now."""
        drafting = max(range(1, self._most + 1), key=lambda k: self.rate(k, context))
        ms = [1e3 * self.costs.pace * self.seconds(k, context) for k in (drafting, 0)]
        with_drafts = f"{self.acceptance.tokens(drafting):.2f} tokens in {ms[0]:.1f} ms"
        without = f"1 in {ms[1]:.1f} ms"
        return f"{with_drafts} with {drafting} draft{'s' * (drafting > 1)}, {without} without"
