"""Where one request takes snapshots, and what they inherit.

    |---- reused ----|---- evaluated now ----|junction|-------|mark|-----|end of the prompt|---- reply ----|end

- a junction: stored prompts go on otherwise here, so it is where others will come back to;
- a mark: what follows it is likely to be replaced (the caller knows: a last message, a world state). Marks are used
  once a prompt was seen to part from what was stored, or continues a mark: a conversation that is only appended to
  comes back to its end;
- the ends of prompt and reply.
"""

from __future__ import annotations

from collections.abc import Sequence

from mimo_edge.kv.keys import Tokens
from mimo_edge.kv.prefix import Fill, Match, PrefixCache
from mimo_edge.kv.snapshots import Snapshot

LEAST_GAIN = 16  # tokens that a junction or mark must save; an extra step costs about as much


class Lineage:
    """Of a prompt of `prompt_tokens`, `reused` rows are there already; `marks` are token positions in it."""

    def __init__(
        self,
        cache: PrefixCache,
        root: bytes,
        match: Match,
        reused: int,
        prompt_tokens: int,
        marks: Sequence[int] = (),
    ):
        self._cache, self._root = cache, root
        self.reused = reused
        self._tip = match.snapshot
        rewrites = match.branches or (match.snapshot is not None and match.snapshot.mark)
        likely = {match.parts_at, *marks[-1:]} if rewrites else set()
        self._marks = set(marks)
        self._behind_mark = rewrites and any(m <= reused for m in marks)
        # positions behind which snapshots are due, ascending
        self.stops = sorted({p for p in likely if reused + LEAST_GAIN <= p < prompt_tokens} | {prompt_tokens})
        self._prompt_tokens = prompt_tokens

    def lasts(self, end: int) -> bool:
        """Whether a snapshot behind `end` rows is worth a file while the prompt is evaluated.

        The end of a prompt is soon superseded by that of its reply. It is worth a file, whose bytes are a window's
        rows, if the same prompt sent again would have to evaluate more than a window without it.
        """
        windows = [k.window for k in self._cache.geometry.kinds if k.window is not None]
        return end != self._prompt_tokens or end - self.reused > max(windows, default=0)

    def rows(self, start: int, most: int) -> int:
        """How many rows a step from `start` may have, so that it ends where the next snapshot is due."""
        return min(most, self.stops[0] - start) if self.stops else most

    def due(self, end: int) -> bool:
        """Whether a snapshot is due behind `end` rows; each is due once."""
        if end not in self.stops:
            return False
        self.stops.remove(end)
        return True

    def save(self, tokens: Tokens, firsts: tuple[int, ...], fill: Fill) -> Snapshot | None:
        """Stores a snapshot behind `tokens`; None when there is no room for it."""
        snapshot = self._cache.insert(self._root, tokens, firsts, fill, self._tip, expected=not self._behind_mark)
        if snapshot is not None:
            self._tip = snapshot
            snapshot.mark |= len(tokens) in self._marks
            self._behind_mark |= snapshot.mark
        return snapshot
