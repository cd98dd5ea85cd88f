"""`agenerate`: `generate` for programs that run on an event loop.

The engine is called on a thread of its own, which is there as long as the iterator.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from typing import TYPE_CHECKING, TypeVar

from caravan.llm.context import Context
from caravan.llm.generation import GenerationStats, generate
from caravan.llm.resume import Resume
from caravan.llm.sampling import SamplingParams

if TYPE_CHECKING:
    import asyncio

_T = TypeVar("_T")


def agenerate(
    context: Context,
    prompt: str | Sequence[int],
    *,
    max_tokens: int = -1,
    sampling: SamplingParams | None = None,
    stop: Sequence[str] = (),
    stats: GenerationStats | None = None,
    resume: bool | Resume | None = None,
) -> AsyncGenerator[str, None]:
    """Continue `prompt` and yield the text as it comes; see `generate`.

    Cancelling the task that waits for it, or closing it, ends it when the step that is computed
    then is done: a token, or the prompt. The context belongs to it meanwhile.

    Raises what `generate` raises: for a prompt that is none at once.
    """
    pieces = generate(
        context,
        prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=stop,
        stats=stats,
        resume=resume,
    )
    return on_thread(pieces)


async def on_thread(pieces: Generator[_T, None, None]) -> AsyncGenerator[_T, None]:
    """What a generator yields, which runs on a thread of its own until its end."""
    # imported with the first of them: most commands need none
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    loop = asyncio.get_running_loop()
    executor = ThreadPoolExecutor(1, thread_name_prefix="caravan-generate")
    ended = object()
    try:
        while True:
            piece = await loop.run_in_executor(executor, next, pieces, ended)
            if piece is ended:
                return
            yield piece  # type: ignore[misc]
    finally:
        # after the step that may be running, and whoever cancels this once more
        try:
            await _in_any_case(loop.run_in_executor(executor, pieces.close))
        finally:
            executor.shutdown()


async def _in_any_case(future: asyncio.Future[None]) -> None:
    """Wait for it; a cancellation meanwhile is raised afterwards."""
    import asyncio

    cancelled = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as exc:
            cancelled = exc
    future.result()
    if cancelled is not None:
        raise cancelled
