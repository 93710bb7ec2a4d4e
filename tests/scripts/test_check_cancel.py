"""Replies that end at random moments, a few of them on a model without weights; 1,000 are run by hand."""

from fakes import fake_engine
from slow_model import slow_engine

from mimo_edge.generation import Generation
from scripts.check_cancel import Check, report


def check(engine, trials):
    prompts = [list(range(97, 97 + n)) for n in (3, 40, 120)]
    made = Check(engine, lambda: fake_engine(context=256), prompts, seed=2)
    made.seconds = [[0.01, 0.03]] * 3  # the fresh engine is faster than the one under test
    while made.interrupted < trials:
        made.trial()
    return made


def test_replies_end_with_the_running_step_and_leave_everything_whole():
    made = check(slow_engine(0.001, context=256, sessions=3, chunk=16), trials=25)
    assert (made.late, made.wrong) == (0, 0), report(made)
    assert set(made.ends) <= {"cancelled", "deadline", "length"}


def test_a_reply_that_goes_on_is_noticed(monkeypatch):
    """Of an engine that hears it a few steps too late."""
    interrupted = Generation.interrupted

    def too_late(generation):
        generation.heard = getattr(generation, "heard", 0) + bool(reason := interrupted(generation))
        return reason if generation.heard > 9 else None

    monkeypatch.setattr(Generation, "interrupted", too_late)
    assert check(slow_engine(0.001, context=256, sessions=3, chunk=16), trials=8).late
