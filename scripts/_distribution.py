"""Whether what drafts lead to is distributed as the model says: a model of few tokens whose distribution is known.

The next token's logits depend on the last token alone, by a table; heads draft from tables that are like it but differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from mimo_edge.backends.base import Step, StepOutput
from mimo_edge.decoding.sampling import candidates, penalise
from mimo_edge.engine import Engine
from mimo_edge.generation import Generation
from mimo_edge.request import SamplingParams
from mimo_edge.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, MtpSpec
from mimo_edge.text import Text

VOCABULARY, HEADS = 6, 3
SETTINGS = (
    SamplingParams(1.0),
    SamplingParams(0.8, top_k=4, top_p=0.9),
    SamplingParams(1.3, min_p=0.1, repetition_penalty=1.3),
)
PROMPT = (1, 4)
CERTAIN = 0.25  # of the biased rule


class TableBackend:
    """Implements backends/base.py, without rows: the tokens of a step are all that it needs."""

    name, heads = "table", HEADS

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.table = rng.normal(0, 1.5, (VOCABULARY, VOCABULARY)).astype(np.float32)
        self.drafts = self.table + rng.normal(0, 0.7, (HEADS, VOCABULARY, VOCABULARY)).astype(np.float32)

    def allocate(self, layout: Any) -> None:
        pass

    def run(self, steps: Sequence[Step]) -> list[StepOutput]:
        return [StepOutput(self.table[s.tokens[s.logit_rows]]) for s in steps]

    def commit(self, accepted: Sequence[int]) -> None:
        pass

    def draft(self, slots: Any, head: int, held: int, start: int, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.drafts[head, tokens[-1]]

    def close(self) -> None:
        pass


def table_engine(drafts: int | str, seed: int = 0) -> Engine:
    a = AttentionSpec(1, 1, 2, 2, 2, 1e4, 1.0, window=8)
    spec = ModelSpec(
        family="table",
        vocab_size=VOCABULARY,
        hidden_size=8,
        max_context=64,
        norm_eps=1e-6,
        attention={"window": a},
        ffn={"dense": FeedForwardSpec(8)},
        layers=(LayerSpec("window", "dense"),),
        mtp=MtpSpec(HEADS, "window", "dense"),
    )
    words = {chr(97 + i): i for i in range(VOCABULARY)}
    text = Text(Tokenizer(models.WordLevel(words, unk_token="a")), spec)
    return Engine(spec, text, TableBackend(seed), drafts=drafts)  # type: ignore[arg-type]


def expected(engine: Engine, params: SamplingParams, length: int) -> NDArray[np.float64]:
    """Probability of every continuation of `length` tokens, float64 [VOCABULARY ** length]."""
    table = engine.backend.table  # type: ignore[attr-defined]
    out = np.zeros((VOCABULARY,) * length)
    for text in itertools.product(range(VOCABULARY), repeat=length):
        known, share = list(PROMPT), 1.0
        for token in text:
            logits = table[known[-1]]
            if params.repetition_penalty != 1:
                logits = penalise(logits, np.array(sorted(set(known))), params.repetition_penalty)
            ids, scores = candidates(logits, params)
            weights = np.exp(scores)
            share *= float((weights[ids == token] / weights.sum()).sum())
            known.append(token)
        out[text] = share
    return out.ravel()


def observed(engine: Engine, params: SamplingParams, length: int, count: int) -> tuple[NDArray[np.float64], int]:
    """(how often each continuation came up among seeds 0 to count-1, how many drafts were accepted)."""
    out, accepted = np.zeros((VOCABULARY,) * length), 0
    for seed in range(count):
        sampling = SamplingParams(**(vars(params) | {"seed": seed}))
        generation = engine.generate(PROMPT, max_tokens=length + HEADS, sampling=sampling)
        for _ in generation:
            if len(generation.tokens) == length:
                break
        generation.close()
        out[tuple(generation.tokens)] += 1
        accepted += generation.speculation.use().accepted or 0
    return out.ravel(), accepted


def excess(counts: NDArray[np.float64], shares: NDArray[np.float64]) -> float:
    """Pearson's chi-square over cells of 5 or more expected draws, the others joined, as a normal deviate
    (Wilson-Hilferty): above 4.5 in 3 of a million fair experiments. Infinite where the impossible came up."""
    means = shares * counts.sum()
    if counts[means == 0].any():
        return float("inf")
    big = means >= 5
    counts, means = np.append(counts[big], counts[~big].sum()), np.append(means[big], means[~big].sum())
    counts, means = counts[means > 0], means[means > 0]
    freedom = len(means) - 1
    statistic = float(((counts - means) ** 2 / means).sum())
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def accept_what_is_likely(generation: Generation, logits: NDArray[np.float32]) -> int:
    """A biased rule in the place of Generation.choose: a draft also holds when the model finds it likely."""
    drafts, position = generation.speculation.drafts, len(generation.sequence.tokens) + generation._planned

    def token(i: int) -> int:
        sampled = generation._sampler.sample(logits[i], position + i)
        if i < len(drafts):
            shares = np.exp(logits[i] - logits[i].max())
            if shares[drafts[i]] / shares.sum() > CERTAIN:
                return drafts[i]
        return sampled

    return generation._take(token, len(logits))
