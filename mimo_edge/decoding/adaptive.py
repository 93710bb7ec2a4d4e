"""How many drafts pay: a step with k drafts takes draft(k) + run(k + 1) seconds and yields 1 + p1 + p1 p2 + .. tokens.

Seconds are measured as decoding goes along, p_i is the share of drafts i that held where all before them did. Chosen is
the k of most tokens a second. What is not in use is tried now and then, at a loss of PROBE_SHARE of all time at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from mimo_edge.spec import MAX_DRAFTS

PROBE_SHARE = 0.01
BURST = 4  # steps of a probe with drafts at most: it ends where a draft does not hold
CHECK = 2  # steps of one without: the second one is measured
PROBE_EVERY = 32  # steps at least; twice as many each time that a probe changes nothing,
PROBE_RAREST = 128  # up to these
HYSTERESIS = 1.03  # what another k must be better by
_LATEST = 15  # measurements of seconds that count
_SURE = 3  # of them before they are relied on
_PACE = 0.1  # weight of a new pace
_CREDIT = 16  # steps' time that probes may lose at once
_FIRST = 0.7  # acceptance before anything is known
_TRUST = 3.0  # steps that a guess of acceptance counts for: text shows its kind in a few


class Latest:
    """The median of the latest seconds: the first touch new memory, and any may be disturbed."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=_LATEST)
        self.value, self.count = 0.0, 0

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self.value, self.count = median(self._seconds), self.count + 1


class Costs:
    """Seconds on this device: of steps by rows, and of a head's draft.

    They are those at `pace` 1. What slows all steps down (other programs, heat, a longer context) shows in the steps in
    use and counts for the others, which were measured before: only what a step costs beside another one matters. A step
    of another size than the one before it counts only as long as there is nothing better: changing costs.
    """

    def __init__(self) -> None:
        self._runs: dict[int, Latest] = {}  # by rows
        self._rough: dict[int, Latest] = {}  # of steps behind one of another size: all that short replies have
        self._draft, self._missing = Latest(), Latest()  # of one head; of a row and head that had to catch up
        self._first_draft = Latest()  # behind a prompt, catching up included: until there is another one
        self._last_rows = 0
        self.pace = 1.0
        self.credit: float | None = None  # seconds that probes may still lose

    def ran(self, rows: int, seconds: float, in_use: bool = True) -> None:
        same, self._last_rows = rows == self._last_rows, rows
        usual = (self._runs if same else self._rough).setdefault(rows, Latest())
        if same and in_use and usual.count >= _LATEST:
            self.pace += _PACE * (min(max(seconds / usual.value, self.pace / 2), 2 * self.pace) - self.pace)
        else:
            usual.add(seconds / self.pace)

    def drafted(self, heads: int, missing: int, seconds: float) -> None:
        """`missing`: rows that each head evaluated beyond the usual ones."""
        each = seconds / self.pace / heads
        if not missing:
            self._draft.add(each)
        elif self._draft.count:
            self._missing.add(max(0.0, each - self._draft.value) / missing)
        else:
            self._first_draft.add(each)

    def measured(self, rows: int) -> int:
        """How often."""
        return sum(known[rows].count // n for known, n in ((self._runs, 1), (self._rough, 2)) if rows in known)

    def run(self, rows: int) -> float:
        """Of a step; between numbers of rows that were measured, and outside of them, on a line."""
        runs = self._runs if len(self._runs) > 1 else self._rough | self._runs
        known = sorted(runs)
        if rows in known or len(known) < 2:
            return runs[rows if rows in known else known[0]].value if known else 0.0
        low = max((r for r in known[:-1] if r < rows), default=known[0])
        high = min(r for r in known if r > low)
        a, b = runs[low].value, runs[high].value
        return a + (b - a) * (rows - low) / (high - low)

    def draft(self, heads: int, missing: int = 0) -> float:
        each = self._draft if self._draft.count else self._first_draft
        return heads * (each.value + missing * self._missing.value)


class Acceptance:
    """Of drafts by position, older steps counting less: of `tries` of draft i, `hits` held.

    As long as little is known of draft i > 0, it is believed to hold about as often as the draft before it, which says
    most about the kind of text that this is. What was learned of it fades while it is not made.
    """

    def __init__(self, memory: float, usual: Sequence[float] = (_FIRST,) * MAX_DRAFTS):
        """`memory` in steps; `usual` shares to begin with."""
        self._memory = memory
        self._ratio = [1.0, *(b / max(a, 1e-9) for a, b in pairwise(usual))]
        self._hits, self._tries = [0.0] * MAX_DRAFTS, [0.0] * MAX_DRAFTS
        self._hits[0], self._tries[0] = usual[0] * _TRUST, _TRUST

    def add(self, accepted: int, tested: int) -> None:
        """Of a step's drafts the first `tested` were compared, of which the first `accepted` held."""
        for i, tries in enumerate(self._tries):
            least = min(tries, _TRUST) if i == 0 else 0.0
            kept = max(least, tries * (1 - 1 / self._memory)) / tries if tries else 0.0
            self._hits[i] = self._hits[i] * kept + (i < accepted)
            self._tries[i] = tries * kept + (i < tested)

    def shares(self) -> list[float]:
        """p_1, p_2, .."""
        out = [self._hits[0] / self._tries[0]]
        for i in range(1, MAX_DRAFTS):
            guess = min(1.0, out[-1] * self._ratio[i])
            out.append((guess * _TRUST + self._hits[i]) / (_TRUST + self._tries[i]))
        return out

    def tokens(self, drafts: int) -> float:
        """That a step is expected to yield."""
        total = share = 1.0
        for p in self.shares()[:drafts]:
            share *= p
            total += share
        return total

    def begin(self, memory: float) -> Acceptance:
        """Of a new reply, that begins with what is usual."""
        return Acceptance(memory, self.shares())


class Chooser:
    """Chooses for one reply; `costs` and `usual` are the engine's, which go on learning."""

    def __init__(self, costs: Costs, usual: Acceptance, most: int):
        self.costs, self._usual, self.acceptance, self._most = costs, usual, usual.begin(64), most
        self._now = most
        self._burst = self._since = self._turn = 0
        self._every = PROBE_EVERY
        self._probing: int | None = None

    def choose(self, room: int, missing: int) -> int:
        """Drafts of the next step, at most `room`; heads have to catch up `missing` rows."""
        best = self._best(missing)
        if best != self._now:
            self._now, self._every = best, PROBE_EVERY
        for k in (self._most, 0):
            if self.costs.measured(min(k, room) + 1) < _SURE:
                return min(k, room)
        self._since += 1
        if self._burst == 0:
            self._probing = self._probe(best, missing)
        if self._probing is not None:
            self._burst -= 1
            return min(self._probing, room)
        return min(best, room)

    @property
    def in_use(self) -> bool:
        """Whether the step is no probe."""
        return self._probing is None

    def seconds(self, drafts: int, missing: int = 0) -> float:
        """Of a step. What heads have to catch up is shared out over the steps between probes.

        More than a step a row and draft is not believed: it was disturbed, and does not pay either way.
        """
        one = self.costs.run(1)
        draft = self.costs.draft(drafts)
        catching_up = self.costs.draft(drafts, missing) - draft
        usual = min(draft, drafts * one) + min(self.costs.run(drafts + 1), (drafts + 1) * one)
        return usual + catching_up / PROBE_EVERY

    def rate(self, drafts: int, missing: int = 0) -> float:
        """Tokens a second."""
        return self.acceptance.tokens(drafts) / max(self.seconds(drafts, missing), 1e-9)

    def _best(self, missing: int) -> int:
        rates = [self.rate(k, missing) for k in range(self._most + 1)]
        best = rates.index(max(rates))
        return best if rates[best] > HYSTERESIS * rates[self._now] else self._now

    def _probe(self, best: int, missing: int) -> int | None:
        """Another k, once so many steps have passed that it can be afforded. With none in use, one draft shows whether
        the text has become predictable; otherwise all drafts and none take turns."""
        others = [k for k in (self._most, 0) if k != best] if best else [1]
        k = others[self._turn % len(others)]
        lost = self._lost(k, self.seconds(k), self.acceptance.tokens(k), best)
        lost += self.costs.draft(k, missing) - self.costs.draft(k)
        if self._since < self._every or lost > (self.costs.credit or 0):
            return None
        self._turn, self._since, self._burst = self._turn + 1, 0, BURST if k else CHECK
        self._every = min(2 * self._every, PROBE_RAREST)
        return k

    def _lost(self, drafts: int, seconds: float, tokens: float, best: int) -> float:
        return max(0.0, seconds - tokens / self.rate(best)) if drafts != best else 0.0

    def learn(self, drafts: int, tested: int, accepted: int, seconds: float) -> None:
        """A step took `seconds`, draft included."""
        seconds /= self.costs.pace
        most = _CREDIT * self.seconds(0)
        if self.costs.credit is not None and self._probing is not None:
            self.costs.credit -= self._lost(drafts, seconds, accepted + 1, self._now)
        if most:
            credit = most / 2 if self.costs.credit is None else self.costs.credit
            self.costs.credit = min(credit + PROBE_SHARE * seconds, most)
        if accepted < drafts:
            self._burst = 0
        if self._burst == 0:
            self._probing = None
        self.acceptance.add(accepted, tested)
        self._usual.add(accepted, tested)

    def why(self) -> str:
        """What the choice rests on now."""
        drafting = max(range(1, self._most + 1), key=lambda k: self.rate(k))
        ms = [1e3 * self.costs.pace * self.seconds(k) for k in (drafting, 0)]
        with_drafts = f"{self.acceptance.tokens(drafting):.2f} tokens in {ms[0]:.1f} ms"
        without = f"1 in {ms[1]:.1f} ms"
        return f"{with_drafts} with {drafting} draft{'s' * (drafting > 1)}, {without} without"
