"""Sessions: what is reused between replies, sessions beside each other, conversations."""

import threading

import pytest
from fakes import BOS, EOS, assert_nothing_is_taken, fake_engine, reply, script

from mimo_edge.errors import BadInputError, MimoEdgeError


def test_a_session_evaluates_only_what_is_new():
    engine = fake_engine(window=5)
    with engine.session() as session:
        first = reply(session, "hello", max_tokens=6)
        longer = [BOS, *b"hello", *first.tokens, *b" and"]
        second = reply(session, longer, max_tokens=6)
        assert second.cache.prompt_tokens == len(longer)
        assert second.cache.reused_tokens == 6 + 6 - 1  # the last token was sampled, not evaluated
        assert second.tokens == reply(fake_engine(), longer, max_tokens=6).tokens
        assert sum(rows for [rows] in engine.backend.runs) == 11 + (len(longer) - 11) + 5
    assert_nothing_is_taken(engine)


def test_the_same_prompt_again_evaluates_one_row():
    engine = fake_engine(window=5)
    with engine.session() as session:
        first = reply(session, "hello there", max_tokens=1)
        again = reply(session, "hello there", max_tokens=1)
        assert (first.cache.reused_tokens, again.cache.reused_tokens) == (0, 11)
        assert again.tokens == first.tokens


@pytest.mark.parametrize("back", range(12))
def test_going_back_reuses_rows_only_while_the_window_is_still_there(back):
    """Window 5 has a ring of 8 slots: it can go back 4 rows (8 - 5 + 1), unless it never wrapped."""
    engine = fake_engine(window=5)
    with engine.session() as session:
        reply(session, list(range(20)), max_tokens=1)
        other = [*range(20 - back), 200, 201]
        result = reply(session, other, max_tokens=9)
        assert result.cache.reused_tokens == (20 - back if back <= 4 else 0)
        assert result.tokens == reply(fake_engine(), other, max_tokens=9).tokens


def test_going_back_twice_remembers_the_rows_that_were_overwritten():
    engine = fake_engine(window=5)
    with engine.session() as session:
        reply(session, list(range(20)), max_tokens=1)
        assert reply(session, [*range(17), 100], max_tokens=1).cache.reused_tokens == 17
        assert reply(session, [*range(15), 100], max_tokens=1).cache.reused_tokens == 0  # 16 is the limit, as above


def test_an_earlier_reply_of_the_session_ends_when_the_next_begins():
    with fake_engine().session() as session:
        first = session.generate("abc", max_tokens=30)
        next(first)
        second = reply(session, "abc", max_tokens=5)
        assert list(first) == [] and first.result.finish_reason == "cancelled"
        assert second.tokens == reply(fake_engine(), "abc", max_tokens=5).tokens
    with pytest.raises(MimoEdgeError, match="session is closed"):
        session.generate("abc")


def test_interleaved_sessions_give_what_each_gives_alone():
    engine = fake_engine(sessions=2, chunk=4)
    prompts = ["first of two", "another"]
    alone = [reply(fake_engine(), p, max_tokens=20).tokens for p in prompts]
    with engine.session() as a, engine.session() as b:
        running = [s.generate(p, max_tokens=20) for s, p in zip((a, b), prompts, strict=True)]
        while any(g.finish_reason is None for g in running):
            for g in running:
                next(g, None)
        assert [g.result.tokens for g in running] == alone
    assert_nothing_is_taken(engine)


def test_two_threads_on_two_sessions_give_what_each_gives_alone():
    engine = fake_engine(sessions=2, chunk=3)
    prompts, results = ["thread one", "and thread two"], {}

    def work(prompt):
        with engine.session() as session:
            results[prompt] = [reply(session, prompt, max_tokens=15).tokens for _ in range(10)]

    threads = [threading.Thread(target=work, args=(p,)) for p in prompts]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for p in prompts:
        assert results[p] == [reply(fake_engine(), p, max_tokens=15).tokens] * 10
    assert_nothing_is_taken(engine)


def test_a_full_engine_says_so_and_has_room_again_later():
    engine = fake_engine(sessions=1)
    session = engine.session()
    with pytest.raises(MimoEdgeError, match="1 of 1 rings are in use"):
        engine.generate("abc")
    session.close()
    assert len(reply(engine, "abc", max_tokens=2).tokens) == 2


def test_a_conversation_remembers_both_sides_and_reuses_its_rows():
    said = iter(["hi", "fine"])
    answers = {}

    def rule(tokens):
        text = bytes(t for t in tokens if t < 256).decode()
        turn = text.count("assistant: ")
        answer = answers.setdefault(turn, None) or answers.update({turn: next(said)}) or answers[turn]
        done = text.rsplit("assistant: ", 1)[1]
        return EOS if done == answer else ord(answer[len(done)])

    engine = fake_engine(rule, context=128)
    with engine.session() as session:
        first = session.chat("hello")
        assert "".join(first) == "hi"
        second = session.chat("how are you?")
        assert "".join(second) == "fine"
        expected = "user: hello\nassistant: hi\nuser: how are you?\nassistant: "
        assert second.result.cache.prompt_tokens == 1 + len(expected)
        assert second.result.cache.reused_tokens == 1 + len("user: hello\nassistant: hi")


def test_a_chat_turn_that_is_refused_leaves_the_conversation_as_it_was():
    engine = fake_engine(script("ok", 1 + len("user: hello\nassistant: ")), context=64)
    with engine.session() as session:
        list(session.chat("hello"))
        with pytest.raises(BadInputError, match=r"prompt has \d+ tokens and the context 64"):
            session.chat("x" * 60)
        with pytest.raises(BadInputError, match="prompt is empty"):
            session.chat("")
        list(session.chat("y", max_tokens=1))
        assert [m["content"] for m in session._messages] == ["hello", "ok"]


def test_without_a_chat_template_the_error_says_what_to_do():
    with (
        fake_engine(template=None).session() as session,
        pytest.raises(BadInputError, match=r"no chat template.*--prompt"),
    ):
        session.chat("hello")
