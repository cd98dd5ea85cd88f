"""`agenerate`: the same text as `generate`; cancelled, it ends at the next step."""

from __future__ import annotations

import asyncio
import threading

import pytest

from caravan.errors import UsageError
from caravan.llm import GenerationStats, SamplingParams, agenerate, generate
from caravan.llm.asynchronous import on_thread

GREEDY = SamplingParams(temp=0)
PROMPT = "Once upon a time, there was a"


def workers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("caravan-generate")]


def test_the_same_text(context):
    expected = list(generate(context, PROMPT, max_tokens=6, sampling=GREEDY))
    context.clear()

    async def run() -> list[str]:
        return [p async for p in agenerate(context, PROMPT, max_tokens=6, sampling=GREEDY)]

    assert asyncio.run(run()) == expected
    assert workers() == []


def test_what_is_wrong_is_raised_at_the_call(context):
    with pytest.raises(UsageError, match="the prompt is empty"):
        agenerate(context, [])


def test_one_that_nobody_listens_to_costs_nothing(context):
    agenerate(context, PROMPT)
    assert workers() == []
    assert context.n_past == 0


def test_closing_it(context):
    stats = GenerationStats()

    async def run() -> None:
        pieces = agenerate(context, PROMPT, sampling=GREEDY, stats=stats)
        await anext(pieces)
        await pieces.aclose()

    asyncio.run(run())
    assert workers() == []
    assert stats.n_gen == 1


def test_cancelling_the_task(context):
    async def run() -> int:
        begun = asyncio.Event()

        async def listen() -> None:
            async for _ in agenerate(context, PROMPT, sampling=GREEDY):
                begun.set()

        task = asyncio.create_task(listen())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return context.n_past

    held = asyncio.run(run())
    assert workers() == []
    # it is of use for what comes next
    assert context.n_past == held < 250
    context.decode_one(1)


def test_cancelling_twice_while_a_step_runs():
    """The thread is waited for all the same."""
    running, go_on = threading.Event(), threading.Event()
    closed = []

    def pieces():
        try:
            running.set()
            assert go_on.wait(30)
            yield 1
        finally:
            closed.append(threading.current_thread().name)

    async def run() -> None:
        task = asyncio.create_task(anext(on_thread(pieces())))
        await asyncio.to_thread(running.wait, 30)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert len(closed) == 1
    assert closed[0].startswith("caravan-generate")
    assert workers() == []


def test_an_error_comes_through():
    def pieces():
        yield 1
        raise UsageError("so")

    async def run() -> None:
        found = []
        with pytest.raises(UsageError, match="so"):
            async for piece in on_thread(pieces()):
                found.append(piece)
        assert found == [1]

    asyncio.run(run())
    assert workers() == []
