"""Answers of a batcher as iterators, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from caravan.batching.job import Job, Sink
from caravan.batching.request import Chunk, Request


class Submits(Protocol):
    """A Batcher, or what stands for one."""

    def submit(self, request: Request, sink: Sink) -> Job: ...


def iterate(batcher: Submits, request: Request) -> Iterator[Chunk]:
    """The parts of an answer; submits at once. Closing the iterator cancels the request.

    Raises what `submit` raises, and the error of the last chunk.
    """
    chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    job = batcher.submit(request, chunks.put)
    return _iterate(job, chunks)


def _iterate(job: Job, chunks: queue.SimpleQueue[Chunk]) -> Iterator[Chunk]:
    try:
        while True:
            chunk = chunks.get()
            if chunk.error is not None:
                raise chunk.error
            yield chunk
            if chunk.finish:
                return
    finally:
        job.cancel()


def stream(batcher: Submits, request: Request) -> AsyncIterator[Chunk]:
    """The same for a running event loop; submits at once. Closing it, or cancelling the task that
    waits for it, cancels the request."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[Chunk] = asyncio.Queue()

    def sink(chunk: Chunk) -> None:
        # raises once the loop is closed, which ends the job
        loop.call_soon_threadsafe(chunks.put_nowait, chunk)

    return _stream(batcher.submit(request, sink), chunks)


async def _stream(job: Job, chunks: asyncio.Queue[Chunk]) -> AsyncIterator[Chunk]:
    try:
        while True:
            chunk = await chunks.get()
            if chunk.error is not None:
                raise chunk.error
            yield chunk
            if chunk.finish:
                return
    finally:
        job.cancel()
