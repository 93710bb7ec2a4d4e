"""Which rows of an MTP head are there, and which ones a draft evaluates. Integers only.

n rows of the model are committed and token t_n is known. Row p of head i is f(h_p, t_{p+1+i}), and what it says behind
row n-1 is draft d_{n+1+i}. With n = 10, head 2 and the drafts of heads 0 and 1 before it:

    row of head 2      5      6      7   |   8      9
    hidden state       h5     h6     h7  |   h8     h9
    token              t8     t9     t10 |   d11    d12   ->  d13
                       final             |   provisional

If `a` of the drafts hold, what was paired up to position n+a was right: rows below n+a-i are final. The next draft is
made behind n' = n+1+a rows, so that at most 1 + max(a, i) <= K+1 rows in front of it are not final or not there: every
draft evaluates the last K+1 rows anew, whatever was accepted, and no others unless the head has to catch up.
"""

from __future__ import annotations

from dataclasses import dataclass

from mimo_edge.spec import MAX_DRAFTS


@dataclass
class HeadRows:
    """Of head `index` of one sequence: rows [held, done) were evaluated with the text's tokens."""

    index: int
    window: int | None
    held: int = 0
    done: int = 0
    _end: int = 0  # rows [done, _end) were evaluated with drafts

    def start(self, n: int) -> int:
        """First row that a draft behind n rows evaluates; what no window of these reaches is left out."""
        oldest = 0 if self.window is None else n - MAX_DRAFTS - self.window
        return max(0, min(max(self.done, oldest), n - MAX_DRAFTS - 1))

    def missing(self, n: int) -> int:
        """How many rows a draft behind n rows evaluates beyond the usual ones."""
        return max(0, n - MAX_DRAFTS - 1 - self.start(n))

    def evaluated(self, start: int, end: int, last: int) -> None:
        """Rows [start, end) were; `last` is the position of the last token that is the text's."""
        if start > self.done:  # what lies between is not there
            self.held = start
        self.held = min(self.held, start)
        self._end = end
        self.done = max(start, min(end, last - self.index))

    def agreed(self, last: int) -> None:
        """Of the drafts that rows were paired with, those up to position `last` became the text's tokens."""
        self.done = max(self.done, min(self._end, last - self.index))

    def back_to(self, n: int) -> None:
        """n rows of the model are left. A head with a window starts again: hidden states alone bring it back."""
        if self.window is None:
            self.done = min(self.done, max(0, n - MAX_DRAFTS - 1))
        else:
            self.held = self.done = 0
        self._end = self.done

    def restored(self, n: int) -> None:
        """n rows of the model were copied in; of a head that sees everything also rows below n-K-1, which need none of
        the tokens behind them."""
        self.held, self.done = 0, n
        self.back_to(n)
