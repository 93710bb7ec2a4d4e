"""Drafts in the engine's loop, with a backend that knows what every row of every head must be made of."""

import random

import pytest
from fakes import EOS, assert_nothing_is_taken, reply, script
from fakes_mtp import FakeHeads, WritingHeads, heads_engine, some

from mimo_edge.cache import CacheOptions
from mimo_edge.errors import BadInputError, UnsupportedError
from mimo_edge.kv.heads import HeadRows
from mimo_edge.request import SamplingParams

DRAFTS = [0, 1, 2, 3, "auto"]
KINDS = pytest.mark.parametrize("full", [False, True], ids=["window", "full"])


@KINDS
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(1.5, seed=5), SamplingParams(repetition_penalty=2)]
)
def test_any_number_of_drafts_gives_the_same_tokens_and_rows(full, drafts, sampling):
    for length in (1, 2, 3, 5, 17, 40):
        for chunk in (4, 7, 256):
            options = {"max_tokens": 30, "sampling": sampling}
            prompt = [97 + length + i % 7 for i in range(length)]
            engines = [heads_engine(full=full, drafts=d, chunk=chunk) for d in (0, drafts)]
            sessions = [e.session() for e in engines]
            want, got = (reply(s, prompt, **options) for s in sessions)
            assert (got.tokens, got.text, got.finish_reason) == (want.tokens, want.text, want.finish_reason)
            assert sessions[0].sequence.tokens == sessions[1].sequence.tokens
            if drafts and drafts != "auto":
                assert len(engines[1].backend.runs) < len(engines[0].backend.runs)


@KINDS
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_accepted_drafts_save_steps_and_are_counted(full, drafts):
    engine = heads_engine(full=full, drafts=drafts, misses=lambda p, h: False)
    result = reply(engine, "abc", max_tokens=1 + 4 * (drafts + 1))
    assert result.mtp.steps == 4 and result.mtp.accepted == result.mtp.drafted == 4 * drafts
    assert result.mtp.accepted_by_position == tuple([4] * drafts + [0] * (3 - drafts))
    assert sum((result.mtp.draft_share, result.mtp.verify_share, result.mtp.accept_share)) == pytest.approx(1)
    assert result.mtp.reason == f"{drafts} drafts, as asked"


def test_wrong_drafts_cost_no_token():
    engine = heads_engine(drafts=3, misses=lambda p, h: True)
    assert reply(engine, "abc", max_tokens=9).mtp.accepted == 0
    assert [rows for [rows] in engine.backend.runs[1:]] == [4] * 5 + [3, 2, 1]  # no more than are left


@KINDS
@pytest.mark.parametrize("end", range(12))
def test_nothing_behind_an_end_inside_drafts_is_kept(full, end):
    """End of text, stop strings, the longest reply and the context's end, at every place of a step."""
    said = "a reply that goes on and on"[: end + 6]
    for options in ({}, {"stop": said[end : end + 4]}, {"max_tokens": end + 1}, {"context": 8 + end}):
        rows = []
        for drafts in (0, 3):
            engine = heads_engine(
                script(said, 4), full=full, context=options.get("context", 64), drafts=drafts, misses=lambda p, h: False
            )
            with engine.session() as session:
                asked = {k: v for k, v in options.items() if k != "context"}
                pieces = list(generation := session.generate("abc", **asked))
                rows.append((pieces, generation.result.tokens, generation.finish_reason, session.sequence.tokens))
            assert_nothing_is_taken(engine)
        assert rows[0] == rows[1]


@KINDS
@pytest.mark.parametrize("cache", [None, CacheOptions(bytes=1 << 20)], ids=["", "cache"])
@pytest.mark.parametrize("backend", [FakeHeads, WritingHeads])
@pytest.mark.parametrize("seed", range(5))
def test_conversations_that_go_back_and_on(full, cache, backend, seed):
    """Prompts that continue, repeat, cut or change earlier ones, with another number of drafts each time."""
    r = random.Random(seed)
    plain = heads_engine(full=full, drafts=0)
    engine = heads_engine(full=full, chunk=9, cache=cache, sessions=2, backend=backend)
    with engine.session() as session:
        known = [97]
        for _ in range(25):
            kept = r.choice([len(known), len(known) - 1, len(known) - 3, r.randint(1, len(known))])
            prompt = [*known[: max(1, kept)], *(97 + r.randrange(26) for _ in range(r.randrange(9)))][:50]
            asked = {"max_tokens": r.randint(1, 14), "drafts": r.choice([None, 3, *DRAFTS])}
            got = reply(r.choice([engine, session, session]), prompt, **asked)
            assert got.tokens == reply(plain, prompt, max_tokens=asked["max_tokens"]).tokens
            known = [*prompt, *got.tokens]
    assert_nothing_is_taken(engine)
    assert len(engine.backend.drafts) > 10


@KINDS
def test_replies_of_different_draft_counts_take_turns(full):
    engine = heads_engine(full=full, sessions=4, chunk=5)
    prompts = [[97 + i] * (1 + 6 * i) for i in range(4)]
    generations = [engine.generate(p, max_tokens=20, drafts=d) for p, d in zip(prompts, (0, 1, 3, "auto"), strict=True)]
    open_ones = list(generations)
    while open_ones:
        open_ones = [g for g in open_ones if next(g, None) is not None]
    plain = heads_engine(drafts=0)
    for g, prompt in zip(generations, prompts, strict=True):
        assert g.result.tokens == reply(plain, prompt, max_tokens=20).tokens


@pytest.mark.parametrize("how", ["cancel", "close"])
@pytest.mark.parametrize("pieces", range(1, 9))
def test_an_end_between_pieces_leaves_a_whole_sequence(how, pieces):
    engine = heads_engine(drafts=3)
    plain = heads_engine(drafts=0)
    with engine.session() as session:
        generation = session.generate("abc", max_tokens=30)
        shown = [next(generation) for _ in range(pieces)]
        getattr(generation, how)()
        shown += list(generation)
        result = generation.result
        assert result.finish_reason == "cancelled" and result.text == "".join(shown)
        assert result.tokens == reply(plain, "abc", max_tokens=30).tokens[: len(result.tokens)]
        assert len(shown) == pieces if how == "close" else len(shown) < pieces + 4
        prompt = [256, *b"abc", *result.tokens, 97]
        again = reply(session, prompt, max_tokens=20)
        assert again.tokens == reply(plain, prompt, max_tokens=20).tokens
        assert again.cache.reused_tokens >= 3 + len(result.tokens)


@pytest.mark.parametrize("backend", [FakeHeads, WritingHeads])
@pytest.mark.parametrize("cache", [None, CacheOptions(bytes=1 << 20)], ids=["", "cache"])
def test_going_back_after_rejected_drafts_reads_no_row_that_they_overwrote(backend, cache):
    plain = heads_engine(drafts=0)
    for pieces in range(1, 9):
        for back in range(5):
            engine = heads_engine(drafts=3, misses=lambda p, h: p % 3 == 0, backend=backend, cache=cache, sessions=2)
            with engine.session() as session:
                generation = session.generate("abcdefghij", max_tokens=30)
                for _ in range(pieces):
                    next(generation)
                generation.cancel()  # what is cached ends here
                list(generation)
                known = [256, *b"abcdefghij", *generation.tokens]
                prompt = [*known[: len(known) - back], 97]
                asked = engine if back % 2 and cache else session
                assert reply(asked, prompt, max_tokens=9).tokens == reply(plain, prompt, max_tokens=9).tokens


def test_pieces_come_token_by_token():
    engine = heads_engine(script("häuser 🦙", 4), drafts=3, misses=lambda p, h: False)
    assert list(engine.generate("abc")) == ["h", "ä", "u", "s", "e", "r", " ", "🦙"]


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("method", ["run", "commit", "draft"])
def test_an_exception_anywhere_leaves_the_session_usable(method, n):
    engine, plain = heads_engine(drafts=3), heads_engine(drafts=0)
    with engine.session() as session:
        inner, calls = getattr(engine.backend, method), []

        def failing(*arguments):
            calls.append(1)
            value = inner(*arguments)
            if len(calls) == n:
                raise KeyboardInterrupt
            return value

        setattr(engine.backend, method, failing)
        with pytest.raises(KeyboardInterrupt):
            list(session.generate("abcdefg", max_tokens=40))
        if method == "run":
            engine.backend._rows = []  # a run that was dropped is an abort
        assert reply(session, "abcdefg", max_tokens=20).tokens == reply(plain, "abcdefg", max_tokens=20).tokens


def test_without_drafts_heads_do_nothing_and_catch_up_in_one_call():
    engine = heads_engine(context=256)
    with engine.session() as session:
        first = reply(session, "abc", max_tokens=100, drafts=0)
        assert not engine.backend.drafts and first.mtp.steps is None
        text = [*first.tokens[:-1]]
        reply(session, [256, *b"abc", *text], max_tokens=4, drafts=1)
    [(head, start, rows), *_] = engine.backend.drafts
    assert (head, rows) == (0, 5 + 3) and start + rows == len(text) + 4


def test_a_long_chunk_needs_no_longer_ring_where_heads_see_everything():
    engine = heads_engine(full=True, context=256, chunk=16, drafts=3)
    reply(engine, [97 + i % 5 for i in range(150)], max_tokens=60)
    reply(engine, [97 + i % 5 for i in range(150)], max_tokens=60, drafts=0)
    assert max(rows for _, _, rows in engine.backend.drafts) <= 16 + 8


@pytest.mark.parametrize("fewer", [1, 2])
def test_rewriting_fewer_rows_reads_rows_of_rejected_drafts(fewer, monkeypatch):
    def taken_for_final(self, start, end, last):
        self.done = end

    monkeypatch.setattr(HeadRows, "evaluated", taken_for_final)
    monkeypatch.setattr(HeadRows, "start", lambda self, n: max(0, min(self.done, n - fewer)))
    with pytest.raises(AssertionError, match="was paired with a wrong token"):
        reply(heads_engine(drafts=3), "abc", max_tokens=50)


def test_drafts_need_heads():
    from fakes import fake_engine

    engine = fake_engine()
    assert engine.layout.heads == 0
    assert reply(engine, "abc", max_tokens=3).mtp.reason == "the model has no MTP heads"
    with pytest.raises(BadInputError, match=r"drafts 1 is out of range .allowed: auto, 0 to 0"):
        engine.generate("abc", drafts=1)
    for drafts in (4, -1, True, "3", None):
        with pytest.raises(BadInputError, match=r"drafts .* is out of range .allowed: auto, 0 to 3"):
            heads_engine(drafts=drafts)
    engine = heads_engine(drafts=2)
    assert engine.layout.heads == 2
    with pytest.raises(BadInputError, match=r"drafts 3 .* 0 to 2"):
        engine.generate("abc", drafts=3)


def test_more_drafts_than_heads_are_refused(caplog):
    from dataclasses import replace

    from fakes import FakeBackend, fake_spec, fake_text
    from fakes_mtp import FakeHeads

    from mimo_edge.engine import Engine
    from mimo_edge.spec import MtpSpec

    one = replace(fake_spec(), mtp=MtpSpec(1, "full", "dense"))
    for spec, backend, why in (
        (fake_spec(), FakeHeads(), "the model has no MTP heads"),
        (one, FakeBackend(), "backend fake does not draft"),
        (one, FakeHeads(), "there is 1 MTP head .allowed: auto, 0 to 1"),
    ):
        with pytest.raises(UnsupportedError, match=f"drafts 3: {why}"):
            Engine(spec, fake_text(spec), backend, drafts=3)
        with caplog.at_level("INFO"):
            assert Engine(spec, fake_text(spec), backend).layout.heads == (why.startswith("there"))
    assert [r.getMessage() for r in caplog.records] == ["no drafts, as backend fake does not draft with this bundle"]


def test_an_end_token_is_the_last_draft():
    engine = heads_engine(script("ab", 4), drafts=3, misses=lambda p, h: False)
    result = reply(engine, "abc")
    assert result.tokens == (*b"ab", EOS) and result.mtp.drafted == 2 and some(0, 0)
