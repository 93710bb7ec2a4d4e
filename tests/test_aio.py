"""Replies in asyncio: pieces without blocking the loop, and tasks whose end is the reply's."""

import asyncio
import gc
import threading
import time

import pytest
from fakes import assert_nothing_is_taken, fake_engine, reply
from slow_model import Gate, slow_engine

from mimo_edge.aio import AsyncGeneration
from mimo_edge.errors import BadInputError, MimoEdgeError

PATIENT = 30


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENT))


async def pieces_of(generation):
    return [piece async for piece in generation]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def nothing_is_taken(engine):
    await until(lambda: engine.pools.rings.used == 0)
    assert_nothing_is_taken(engine)


def test_the_pieces_are_those_of_generate():
    async def main():
        engine = fake_engine()
        generation = engine.agenerate("abc", max_tokens=9)
        with pytest.raises(MimoEdgeError, match="not begun"):
            _ = generation.result
        pieces = await pieces_of(generation)
        assert await pieces_of(generation) == []  # it stays ended
        assert "".join(pieces) == generation.result.text and generation.result.finish_reason == "length"
        await nothing_is_taken(engine)
        return pieces

    assert run(main()) == list(fake_engine().generate("abc", max_tokens=9))


def test_the_loop_goes_on_while_the_model_runs():
    async def main():
        engine = fake_engine()
        gate = Gate(engine)
        task = asyncio.create_task(pieces_of(engine.agenerate("abc", max_tokens=3)))
        await until(gate.entered.is_set)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not task.done()
        gate.opened.set()
        assert len(await task) == 3

    run(main())


def test_many_replies_at_once_are_each_their_own():
    async def main():
        engine = fake_engine(context=128, sessions=2, queue=20)
        prompts = [f"prompt {i}" for i in range(20)]
        replies = await asyncio.gather(*(pieces_of(engine.agenerate(p, max_tokens=7)) for p in prompts))
        await nothing_is_taken(engine)
        return ["".join(r) for r in replies]

    plain = fake_engine(context=128)
    assert run(main()) == [reply(plain, f"prompt {i}", max_tokens=7).text for i in range(20)]


@pytest.mark.parametrize("wait", [0, 0.005, 0.02])
def test_cancelling_the_task_ends_the_reply_within_a_step(wait):
    async def main():
        engine = slow_engine(0.005, context=4096)
        generation = engine.agenerate("abc", max_tokens=4000)
        task = asyncio.create_task(pieces_of(generation))
        await asyncio.sleep(wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await nothing_is_taken(engine)
        assert len(engine.backend.runs) < 1000

    run(main())


@pytest.mark.parametrize("how", ["aclose", "async with", "drop", "cancel"])
def test_a_reply_that_is_left_ends(how):
    async def main():
        engine = slow_engine(0.002, context=4096)
        generation = engine.agenerate("abc", max_tokens=4000)
        first = await anext_of(generation)
        if how == "aclose":
            await generation.aclose()
        elif how == "async with":
            async with generation:
                pass
        elif how == "cancel":
            generation.cancel()
            rest = await pieces_of(generation)
            assert generation.result.text == "".join([first, *rest])
        if how == "drop":
            del generation
            gc.collect()
        else:
            assert engine.pools.rings.used == 0  # at once
            assert generation.result.finish_reason == "cancelled" and generation.result.text.startswith(first)
        await nothing_is_taken(engine)

    async def anext_of(generation):
        return await generation.__anext__()

    run(main())


def test_cancelled_before_it_begins_it_does_nothing():
    async def main():
        engine = fake_engine()
        generation = engine.agenerate("abc")
        generation.cancel()
        assert await pieces_of(generation) == [] and engine.backend.runs == []
        untouched = engine.agenerate("abc")
        await untouched.aclose()

    run(main())


def test_errors_come_where_the_pieces_are_awaited():
    async def main():
        engine = fake_engine()
        with pytest.raises(BadInputError, match="prompt is empty"):
            await pieces_of(engine.agenerate(""))
        with pytest.raises(BadInputError, match="unclosed group"):
            await pieces_of(engine.agenerate("abc", regex="a("))
        generation = engine.agenerate("abc")
        engine.backend.run = lambda steps: 1 / 0
        with pytest.raises(ZeroDivisionError):
            await pieces_of(generation)
        assert await pieces_of(generation) == [] and generation.result.finish_reason == "error"
        await nothing_is_taken(engine)

    run(main())


def test_a_full_queue_is_refused():
    async def main():
        engine = fake_engine(queue=1)
        gate = Gate(engine)
        tasks = [asyncio.create_task(pieces_of(engine.agenerate("abc", max_tokens=2))) for _ in range(5)]
        await until(lambda: sum(t.done() for t in tasks) == 3)
        gate.opened.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(type(o).__name__ for o in outcomes) == ["MimoEdgeError"] * 3 + ["list"] * 2

    run(main())


def test_a_conversation_can_be_awaited():
    async def main():
        with fake_engine().session() as session:
            assert "".join(await pieces_of(AsyncGeneration(lambda: session.chat("hi", max_tokens=3)))) != ""
            assert len(session.messages) == 2

    run(main())


def test_a_loop_that_ends_ends_its_replies():
    engine = slow_engine(0.002, context=4096)

    async def main():
        generation = engine.agenerate("abc", max_tokens=4000)
        await generation.__anext__()
        return generation  # and so it is not dropped

    kept = asyncio.run(main())
    end = time.monotonic() + PATIENT
    while any(t.name == "mimo-edge reply" for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.001)
    assert kept.result.finish_reason == "cancelled" and len(kept.result.tokens) < 3000
    assert_nothing_is_taken(engine)
