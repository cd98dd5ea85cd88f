"""`Running`: the requests of one client that a batcher computes at the same time, on asyncio.

The way of every token leads through here, so it is short: one call of the loop for all that has
come meanwhile, no task, no thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from caravan.batching import BatcherState, Chunk, Job, Request, Usage, streams
from caravan.batching.job import Sink
from caravan.serve.errors import ApiError, of_error, shutting_down


class Submits(streams.Submits, Protocol):
    """A Batcher, or what stands for one, as the server knows it."""

    @property
    def capacity(self) -> int: ...

    def state(self) -> BatcherState: ...


class Running:
    """See the module. Made on a running loop; `submit` may be called on another thread.

    Args:
        on_end: told of each request that has ended.

    Attributes:
        gone: nobody wants the rest.
        left: requests that have not ended.
    """

    def __init__(self, on_end: Callable[[str, Usage], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[int, Chunk]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._told = False
        self._jobs: list[Job] = []
        self._on_end = on_end
        self.gone = False
        self._failure: ApiError | None = None
        self.left = 0

    def submit(self, batcher: Submits, requests: Sequence[Request]) -> None:
        """All of them or none; may take a while for a grammar. Raises what `submit` raises."""
        self.left = len(requests)
        try:
            for index, request in enumerate(requests):
                self._jobs.append(batcher.submit(request, self._sink(index)))
        except BaseException:
            self._stop()
            raise
        if self.gone or self._failure is not None:
            self._stop()

    def _sink(self, index: int) -> Sink:
        def sink(chunk: Chunk) -> None:
            self._arrived.append((index, chunk))
            # one call is enough for all that come until it is there
            if not self._told:
                self._told = True
                self._loop.call_soon_threadsafe(self._wake)

        return sink

    def _wake(self) -> None:
        self._told = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """Nobody wants the rest. Idempotent."""
        self.gone = True
        self._stop()

    def cut(self) -> None:
        """The server ends, and does not wait for the rest."""
        self._failure = shutting_down()
        self._stop()

    def _stop(self) -> None:
        for job in self._jobs:
            job.cancel()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def more(self) -> bool:
        """Whether `chunks` has something to say yet."""
        return not self.gone and (self.left > 0 or self._failure is not None)

    async def chunks(self, until: float | None = None) -> list[tuple[int, Chunk]]:
        """What has come of which request: waits for something, at most until that time of the loop.

        Nothing: the time is over, or nobody wants the rest.
        Raises ApiError for a request that has failed; the others are cancelled then.
        """
        # a call of the loop may come late, for what has been taken already
        while not (self._arrived or self.gone or self._failure):
            if until is not None and self._loop.time() >= until:
                return []
            await self._wait(until)
        if self.gone:
            return []
        if self._failure is not None:
            raise self._failure
        return self._taken()

    def _taken(self) -> list[tuple[int, Chunk]]:
        """What has come. A failure is raised if nothing came before it, else the next time."""
        found: list[tuple[int, Chunk]] = []
        while self._arrived:
            index, chunk = self._arrived.popleft()
            if chunk.finish:
                self._ended(chunk)
            if self._failure is not None:
                self._stop()
                break
            found.append((index, chunk))
        if self._failure is not None and not found:
            raise self._failure
        return found

    async def _wait(self, until: float | None) -> None:
        waiter = self._waiter = self._loop.create_future()
        timer = None
        if until is not None:
            timer = self._loop.call_at(until, self._wake)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()

    def _ended(self, chunk: Chunk) -> None:
        self.left -= 1
        if self._on_end is not None and chunk.usage is not None:
            self._on_end(chunk.finish, chunk.usage)
        if chunk.error is not None:
            self._failure = of_error(chunk.error)
        elif chunk.finish in ("error", "cancelled"):
            # not by us
            self._failure = shutting_down()
