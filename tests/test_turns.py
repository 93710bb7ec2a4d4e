"""Whose step runs next, and that nobody starves."""

import threading
import time

import pytest
from fakes import fake_engine, reply

from mimo_edge.turns import PATIENCE, Turns


def order(lefts, first=10**6):
    """In which order waiting replies get their turn; they arrive in the order given, behind a turn that lasts."""
    turns, done, threads = Turns(), [], []

    def wait(left):
        with turns.turn(left):
            done.append(left)

    with turns.turn(first):
        for i, left in enumerate(lefts):
            threads.append(threading.Thread(target=wait, args=(left,)))
            threads[-1].start()
            while len(turns._queue) <= i:
                time.sleep(0.001)
    for t in threads:
        t.join()
    return done


def test_the_fewest_tokens_left_go_first_and_within_a_bucket_the_first_come():
    assert order([4096, 1, 300, 256, 290, 1]) == [1, 1, 300, 256, 290, 4096]


def test_whoever_waits_moves_up():
    """A long prompt behind decode steps that keep coming has its turn after PATIENCE of them a bucket."""
    turns, steps, stop = Turns(), [], threading.Event()

    def decode():
        while not stop.is_set():
            with turns.turn(1):
                if any(w.bucket > 1 for w in list(turns._queue)):  # the long prompt waits for this one
                    steps.append("decode")
                time.sleep(0.001)

    def prefill():
        for _ in range(3):
            with turns.turn(4096):
                steps.append("prefill")
        stop.set()

    threads = [threading.Thread(target=f) for f in (decode, decode, prefill)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    at = [i for i, s in enumerate(steps) if s == "prefill"]
    assert len(at) == 3 and max(b - a for a, b in zip([0, *at], at, strict=False)) <= PATIENCE * 13 + 3


def test_a_turn_that_fails_ends():
    turns = Turns()
    with pytest.raises(ValueError), turns.turn(1):
        raise ValueError
    assert order([2, 1]) == [1, 2]
    with turns.turn(5):
        pass


def test_a_long_prompt_does_not_hold_up_a_reply_that_decodes():
    engine = fake_engine(context=512, sessions=2, chunk=8)
    run, slow = engine.backend.run, []

    def timed(steps):
        slow.append(len(steps[0].tokens))
        time.sleep(0.002)
        return run(steps)

    engine.backend.run = timed
    short = engine.generate("abc", max_tokens=60)
    next(short)
    slow.clear()
    threads = [
        threading.Thread(target=reply, args=(engine, [1] * 400), kwargs={"max_tokens": 1}),
        threading.Thread(target=list, args=(short,)),
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    last = max(i for i, rows in enumerate(slow) if rows == 1 and i < len(slow) - 1)
    assert slow[: last + 1].count(8) < 25  # of the 50 chunks that a first come, first served would run meanwhile
