"""What structured output costs beside the model's steps: once, for a grammar, and for every token.

    python scripts/bench_guided.py [BUNDLE]

Only the bundle's tokenizer is loaded. Tokens are random ones that the schema allows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from mimo_edge.bundle import BUILT_IN, TOKENIZER, Bundle
from mimo_edge.decoding.guided import Guides
from mimo_edge.decoding.sampling import Sampler
from mimo_edge.options import grammar_of
from mimo_edge.request import SamplingParams
from mimo_edge.text import Text

POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x", "y"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "action": {"enum": ["pick_up", "place", "move_to", "look_at", "say", "stop"]},
        "object": {"type": "string", "maxLength": 60},
        "path": {"type": "array", "items": POINT, "maxItems": 8},
        "why": {"type": "string"},
    },
    "required": ["action", "object", "path", "why"],
    "additionalProperties": False,
}
REPLIES, LONGEST = 40, 120


class Times:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}

    def of(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        value = function(*arguments)
        self.spent.setdefault(what, []).append(time.perf_counter() - began)
        return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?", default=BUILT_IN)
    bundle = Bundle.open(parser.parse_args().bundle, verify=False)
    text, times = Text.open(bundle.file(TOKENIZER), bundle.spec, None), Times()
    guides, rng = Guides(text), np.random.default_rng(0)
    times.of("first grammar, the tokenizer included", guides.start, grammar_of(schema={"type": "integer"}))
    grammar = grammar_of(schema=SCHEMA)
    assert grammar is not None
    times.of("another grammar", guides.start, grammar)
    logits = rng.standard_normal(bundle.spec.vocab_size).astype(np.float32)
    sampler, forced, chosen = Sampler(SamplingParams(), ()), 0, 0
    for _ in range(REPLIES):
        guide = times.of("a grammar again", guides.start, grammar)
        for position in range(LONGEST):
            if guide.finished:
                break
            mask = times.of("mask", guide.mask)
            times.of("choosing without a mask", sampler.sample, logits, position)
            times.of("choosing with a mask", sampler.sample, logits, position, mask)
            token = int(rng.choice(np.flatnonzero(mask)))
            if token in bundle.spec.eos_ids:
                break
            times.of("advance", guide.advance, token)
            run = times.of("forced", guide.forced)
            for other in run:
                guide.advance(other)
            forced, chosen = forced + len(run), chosen + 1
    print(f"{bundle.spec.vocab_size} tokens; {chosen} chosen, {forced} forced without a choice; microseconds:")
    for what, seconds in times.spent.items():
        ordered = sorted(1e6 * s for s in seconds)
        print(f"  {what}: median {median(ordered):.0f}, 99 % {ordered[int(0.99 * len(ordered))]:.0f}, n {len(ordered)}")


if __name__ == "__main__":
    main()
