"""Rounds in the engine's loop: a backend that drafts, verifies and accepts in one call gives the same replies."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import assert_nothing_is_taken, fake_spec, fake_text, reply, scramble, script
from fakes_mtp import FakeHeads, heads_engine, some, state

from mimo_edge.backends.base import DraftRounds, Step
from mimo_edge.bench import Bench
from mimo_edge.cache import CacheOptions
from mimo_edge.engine import Engine
from mimo_edge.kv.layout import HEAD_ROWS, HIDDEN_ROWS, plan_layout
from mimo_edge.request import SamplingParams
from mimo_edge.spec import MAX_DRAFTS, MtpSpec


class FakeRounds(FakeHeads):
    """Its parts are those of FakeHeads, which checks every row that they read."""

    def __init__(self, rule=scramble, misses=some):
        super().__init__(rule, misses)
        self.rounds = []  # drafts of each

    def catch_up(self, slots, head, held, start, tokens):
        text = self._text(slots, start + len(tokens))
        for p, token in enumerate(tokens.tolist(), start):
            assert token == text[p + 1 + head] if p + 1 + head < len(text) else True
            hidden = int(self._rings[HIDDEN_ROWS][self._at(slots, HIDDEN_ROWS, p)])
            assert hidden == state(text[: p + 1]), f"the hidden state of row {p} is lost"
            self._head_rows[head][self._at(slots, HEAD_ROWS, p)] = p, hidden, token

    def round(self, asked):
        n, drafts = asked.length, []
        text = [*self._text(asked.slots, n), int(asked.tokens[-1])]
        assert asked.tokens.tolist() == text[max(0, n - MAX_DRAFTS) :] and 1 <= asked.drafts <= self.layout.heads
        start = max(0, n - MAX_DRAFTS - 1)
        for head in range(asked.drafts):
            ahead = np.array([*text, *drafts][start + 1 + head :])
            drafts.append(int(self.draft(asked.slots, head, asked.held, start, ahead).argmax()))
        step = Step(asked.slots, n, np.array([text[-1], *drafts]), np.arange(1 + len(drafts)))
        sampled = self.run([step])[0].logits.argmax(1).tolist()
        self.rounds.append(len(drafts))
        count = next((i for i, d in enumerate(drafts) if d != sampled[i]), len(drafts))
        return np.array([*drafts[:count], sampled[count]])


def rounds_engine(rule=scramble, misses=some, context=64, full=False, **options):
    spec = replace(fake_spec(context, 5), mtp=MtpSpec(3, "full" if full else "window", "dense"))
    return Engine(spec, fake_text(spec), FakeRounds(rule, misses), **options)


@pytest.mark.parametrize("full", [False, True], ids=["window", "full"])
@pytest.mark.parametrize("drafts", [1, 2, 3, "auto"])
def test_replies_and_counts_are_those_of_drafts_in_pieces(full, drafts):
    """Prompts of all lengths, in chunks, so that heads have to catch up by anything."""
    for length in (1, 2, 3, 4, 5, 8, 17, 40):
        for chunk in (5, 256):
            prompt = [97 + length + i % 7 for i in range(length)]
            ours = rounds_engine(full=full, drafts=drafts, chunk=chunk)
            theirs = heads_engine(full=full, drafts=drafts, chunk=chunk)
            assert isinstance(ours.backend, DraftRounds) and not isinstance(theirs.backend, DraftRounds)
            got, want = (reply(e, prompt, max_tokens=20) for e in (ours, theirs))
            assert got.tokens == want.tokens
            if drafts != "auto":  # which depends on the time that steps take
                assert ours.backend.rounds and ours.backend.runs[-4:] == theirs.backend.runs[-4:]
                assert replace(got.mtp, draft_share=0, verify_share=0, accept_share=0) == replace(
                    want.mtp, draft_share=0, verify_share=0, accept_share=0
                )


@pytest.mark.parametrize("end", range(6))
def test_nothing_behind_an_end_inside_drafts_is_kept(end):
    said = "a reply that goes on"[: end + 6]
    for options in ({}, {"stop": said[end : end + 4]}, {"max_tokens": end + 1}):
        rows = []
        for make in (rounds_engine, heads_engine):
            engine = make(script(said, 4), misses=lambda p, h: False, drafts=3)
            with engine.session() as session:
                pieces = list(generation := session.generate("abc", **options))
                rows.append((pieces, generation.result.tokens, generation.finish_reason, session.sequence.tokens))
            assert_nothing_is_taken(engine)
        assert rows[0] == rows[1]


def test_conversations_and_cached_prefixes():
    engine = rounds_engine(drafts=3, chunk=9, cache=CacheOptions(bytes=1 << 20), sessions=2)
    plain = heads_engine(drafts=0)
    prompt = list(b"a conversation")
    for turn in range(4):
        got, want = (reply(e, prompt, max_tokens=8) for e in (engine, plain))
        assert got.tokens == want.tokens and (got.cache.reused_tokens > 0) == (turn > 0)
        prompt = [*prompt, *got.tokens[:-1], 97 + turn] if turn != 2 else prompt[:-3]


@pytest.mark.parametrize(
    "options", [{"sampling": SamplingParams(repetition_penalty=2)}, {"logprobs": True}], ids=["penalty", "logprobs"]
)
def test_what_needs_logits_is_drafted_in_pieces(options):
    engine, plain = rounds_engine(drafts=3), heads_engine(drafts=0)
    assert reply(engine, "abc", max_tokens=9, **options).tokens == reply(plain, "abc", max_tokens=9, **options).tokens
    assert engine.backend.drafts and not engine.backend.rounds


def test_bench_times_rounds():
    spec = replace(fake_spec(64, 5), mtp=MtpSpec(3, "window", "dense"))
    layout, seen = plan_layout(spec, 64, heads=3), []
    meter = Bench(spec, SimpleNamespace(round=seen.append), layout)
    assert len(meter.rounds(2, 20, steps=3, repeats=2)) == 2 and len(seen) == 6
    asked = seen[0]
    assert (asked.length, asked.drafts, len(asked.tokens)) == (20, 2, MAX_DRAFTS + 1)
    assert 20 - layout.rings[HIDDEN_ROWS] <= asked.held <= 20 - MAX_DRAFTS - 5
