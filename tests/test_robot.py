"""Deadlines, cancelling from other threads, callbacks, log-probabilities, and requests that wait for room."""

import gc
import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import EOS, assert_nothing_is_taken, fake_engine, reply, script
from slow_model import Gate

from mimo_edge.backends.base import StepOutput
from mimo_edge.errors import BadInputError, MimoEdgeError
from mimo_edge.request import SamplingParams

PATIENT = 30  # seconds: no outcome depends on it, a hanging test ends


def in_thread(function, *arguments, **options):
    """Starts it; a function that waits for what it returned or raised."""
    outcome = []

    def work():
        try:
            outcome.append((function(*arguments, **options), None))
        except BaseException as e:
            outcome.append((None, e))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def wait():
        thread.join(PATIENT)
        assert outcome, "it hangs"
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    return wait


def until(condition):
    end = time.monotonic() + PATIENT
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


# deadlines


@pytest.mark.parametrize("deadline", [0, -1, -0.001, math.nan, math.inf])
def test_a_deadline_that_is_not_ahead_is_refused(deadline):
    engine = fake_engine()
    with pytest.raises(BadInputError, match=r"deadline .* seconds above 0"):
        engine.generate("abc", deadline=deadline)
    assert_nothing_is_taken(engine)


class Clock:
    """The time of generations, which only steps let pass."""

    def __init__(self, monkeypatch, engine, seconds):
        self.now = 0.0
        monkeypatch.setattr("mimo_edge.generation.time", SimpleNamespace(perf_counter=lambda: self.now))
        run = engine.backend.run

        def timed(steps):
            self.now += seconds
            return run(steps)

        engine.backend.run = timed


@pytest.mark.parametrize(("deadline", "steps"), [(0.1, 2), (0.001, 1), (0.125, 2), (0.126, 3), (1.0, 16)])
def test_a_deadline_ends_a_reply_with_what_there_is_behind_the_step_that_runs(monkeypatch, deadline, steps):
    expected = reply(fake_engine(), "abc", max_tokens=steps)
    engine = fake_engine(context=512)
    clock = Clock(monkeypatch, engine, 0.0625)
    result = reply(engine, "abc", max_tokens=300, deadline=deadline)
    assert (result.finish_reason, len(result.tokens), len(engine.backend.runs)) == ("deadline", steps, steps)
    assert deadline <= clock.now <= deadline + 0.0625
    assert (result.text, result.tokens) == (expected.text, expected.tokens)
    assert_nothing_is_taken(engine)


def test_a_deadline_ends_a_prompt_between_two_chunks_and_its_rows_are_reused(monkeypatch):
    expected = reply(fake_engine(context=512), [97] * 100, max_tokens=3)
    engine = fake_engine(context=512, chunk=4)
    Clock(monkeypatch, engine, 0.125)
    with engine.session() as session:
        first = reply(session, [97] * 400, deadline=0.5)
        assert (first.finish_reason, first.text, first.tokens) == ("deadline", "", ())
        assert first.timings.ttft_s is None and first.timings.prefill_tok_s is None
        assert engine.backend.runs == [[4]] * 4
        second = reply(session, [97] * 100, max_tokens=3)
    assert second.cache.reused_tokens == 16 and second.tokens == expected.tokens


def test_a_deadline_far_away_changes_nothing():
    plain = reply(fake_engine(), "abc", max_tokens=9)
    assert reply(fake_engine(), "abc", max_tokens=9, deadline=1000).tokens == plain.tokens


def test_a_deadline_holds_while_others_take_their_turns():
    """The turn of a reply comes late: it ends without it."""
    engine = fake_engine(context=512, sessions=2)
    gate = Gate(engine)
    busy = in_thread(reply, engine, "abc", max_tokens=2)
    assert gate.entered.wait(PATIENT)
    result = reply(engine, "abc", deadline=0.02)
    assert (result.finish_reason, result.tokens) == ("deadline", ())
    gate.opened.set()
    assert len(busy().tokens) == 2
    assert_nothing_is_taken(engine)


# cancelling


@pytest.mark.parametrize("rows", [3, 400])
def test_cancelling_from_another_thread_lets_the_running_step_be_the_last(rows):
    engine = fake_engine(context=512, chunk=8)
    gate = Gate(engine)
    generation = engine.generate([97] * rows, max_tokens=100)
    result = in_thread(lambda: (list(generation), generation.result)[1])
    assert gate.entered.wait(PATIENT)
    generation.cancel()
    gate.opened.set()
    assert result().finish_reason == "cancelled"
    assert len(engine.backend.runs) == 1
    assert_nothing_is_taken(engine)


def test_cancelling_does_not_wait_for_anybody():
    """Neither does the reply that waits for its turn behind a long step of another."""
    engine = fake_engine(sessions=2)
    gate = Gate(engine)
    first, second = engine.generate("abc", max_tokens=2), engine.generate("abd")
    busy = in_thread(list, first)
    assert gate.entered.wait(PATIENT)
    waiting = in_thread(list, second)
    until(lambda: len(engine._turns._queue) == 1)
    in_thread(second.cancel)()
    assert waiting() == [] and second.result.finish_reason == "cancelled"
    gate.opened.set()
    busy()
    assert_nothing_is_taken(engine)


def test_a_callback_may_cancel():
    engine = fake_engine()
    generation = engine.generate("abc", on_token=lambda token, piece, seconds: generation.cancel())
    list(generation)
    assert generation.result.finish_reason == "cancelled" and len(generation.result.tokens) == 1


# callbacks


@pytest.mark.parametrize("said", ["fine, 🦙 and more", "xsto"])
def test_callbacks_hear_every_token_and_all_of_the_text_in_order(said):
    heard = []
    engine = fake_engine(script(said, 4))
    result = reply(engine, "abc", stop="stop", on_token=lambda *heard_now: heard.append(heard_now))
    tokens, pieces, seconds = zip(*heard, strict=True)
    assert tokens == result.tokens == (*said.encode(), EOS) and "".join(pieces) == result.text == said
    assert list(seconds) == sorted(seconds) and seconds[0] >= result.timings.ttft_s > 0


def test_a_callback_that_fails_ends_the_reply():
    def fail(*_):
        raise ValueError("mine")

    engine = fake_engine()
    generation = engine.generate("abc", on_token=fail)
    with pytest.raises(ValueError, match="mine"):
        list(generation)
    assert generation.result.finish_reason == "error"
    assert_nothing_is_taken(engine)


# log-probabilities


def test_log_probabilities_are_the_models_before_anything_is_done_to_them():
    engine = fake_engine()
    run, rule = engine.backend.run, engine.backend.rule
    engine.backend.run = lambda steps: [StepOutput(o.logits * np.float32(6)) for o in run(steps)]
    params = SamplingParams(temperature=2.0, top_k=50, repetition_penalty=1.5, seed=1)
    result = reply(engine, "abc", max_tokens=20, sampling=params, logprobs=True)
    expected, tokens = [], [256, *b"abc"]
    for token in result.tokens:  # the rule's token has logit 6, the other 257 have 0
        expected.append(6 * (token == rule(tokens)) - math.log(math.exp(6) + 257))
        tokens.append(token)
    np.testing.assert_allclose(result.logprobs, expected, rtol=1e-6)
    assert len(set(result.logprobs)) == 2
    assert reply(engine, "abc", max_tokens=20, sampling=params).logprobs is None


def test_forced_tokens_have_no_log_probability():
    result = reply(fake_engine(script("xab1", 4)), "abc", regex="xab[0-9]", logprobs=True)
    assert [p is None for p in result.logprobs] == [True, True, True, False]


# waiting for room


def test_requests_wait_in_order_and_the_rest_is_refused_at_once():
    engine = fake_engine(queue=2)
    first = engine.generate("abc", max_tokens=3)
    next(first)
    waiting = [engine.generate("abd", max_tokens=3), engine.generate("abe", max_tokens=3)]
    with pytest.raises(MimoEdgeError, match="2 requests wait for room, which is the whole queue"):
        engine.generate("abf")
    order, results = [], []
    for generation in reversed(waiting):  # whoever is iterated over first, the first come is first
        results.append(in_thread(lambda g=generation: (list(g), order.append(g), g.result)[2]))
    time.sleep(0.01)
    assert order == [] and len(engine.room.waiting) == 2
    list(first)
    texts = [wait().text for wait in results]
    assert order == waiting
    assert texts == [reply(fake_engine(), prompt, max_tokens=3).text for prompt in ("abe", "abd")]
    assert_nothing_is_taken(engine)
    assert reply(engine, "abf", max_tokens=1).tokens


def test_without_a_queue_a_request_without_room_is_refused_with_the_numbers():
    engine = fake_engine()
    first = engine.generate("abc")
    with pytest.raises(MimoEdgeError, match=r"no room for a sequence .* 1 of 1 rings"):
        engine.generate("abc")
    first.close()
    assert reply(engine, "abc", max_tokens=1).tokens


@pytest.mark.parametrize("queue", [-1, 1.5, 10**9, True, "2"])
def test_a_queue_out_of_range_is_refused(queue):
    with pytest.raises(BadInputError, match=r"queue .* 0 refuses at once"):
        fake_engine(queue=queue)


@pytest.mark.parametrize("how", ["cancel", "deadline", "close", "drop"])
def test_a_request_that_waits_can_leave(how):
    engine = fake_engine(queue=2)
    first = engine.generate("abc", max_tokens=2)
    second = engine.generate("abd", **({"deadline": 0.02} if how == "deadline" else {}))
    third = engine.generate("abe", max_tokens=2)
    if how == "cancel":
        waiting = in_thread(list, second)
        second.cancel()
        assert waiting() == []
    elif how == "deadline":
        assert list(second) == []
    elif how == "close":
        second.close()
    if how == "drop":
        del second
        gc.collect()
    else:
        result = second.result
        assert result.finish_reason == ("deadline" if how == "deadline" else "cancelled")
        assert (result.text, result.tokens, result.cache.reused_tokens) == ("", (), 0)
    assert len(engine.room.waiting) == 1
    list(first)
    assert len(reply_of(third).tokens) == 2
    assert_nothing_is_taken(engine)


def reply_of(generation):
    list(generation)
    return generation.result


def test_a_conversation_that_waits_finds_its_rows_warm():
    engine = fake_engine(queue=1, sessions=1)
    first = engine.generate("abc", session_id="kitchen", max_tokens=4)
    second = engine.generate("abcd", session_id="kitchen", max_tokens=4)
    waiting = in_thread(reply_of, second)
    told = reply_of(first)
    assert waiting().cache.reused_tokens == 4 and told.tokens
    assert waiting().tokens == reply(fake_engine(), "abcd", max_tokens=4).tokens


def test_closing_the_engine_ends_the_wait():
    engine = fake_engine(queue=1)
    first, second = engine.generate("abc"), engine.generate("abc")
    waiting = in_thread(list, second)
    engine.close()
    with pytest.raises(MimoEdgeError, match="engine is closed"):
        waiting()
    with pytest.raises(MimoEdgeError, match="engine is closed"):
        engine.generate("abc")
    first.close()
    assert_nothing_is_taken(engine)
