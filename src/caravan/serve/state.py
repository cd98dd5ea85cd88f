"""`State`: what all handlers of an app share, and how they come by it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakSet

from fastapi import Request

from caravan.batching import Request as BatchRequest
from caravan.errors import UsageError
from caravan.serve.errors import ApiError, of_error, shutting_down
from caravan.serve.fields import named
from caravan.serve.metrics import Metrics
from caravan.serve.running import Running
from caravan.serve.service import Service

_T = TypeVar("_T")
# Characters for each token of a slot: fewer are tokenized without further thought.
_LONG = 16


@dataclass(slots=True)
class State:
    """See the module.

    Attributes:
        embedding: held while embeddings are computed, which is done for one request at a time.
        n_embedding: requests that have it or wait for it.
        closing: nothing is begun any more.
    """

    service: Service
    metrics: Metrics
    embedding: asyncio.Lock = field(default_factory=asyncio.Lock)
    n_embedding: int = 0
    closing: bool = False
    _running: WeakSet[Running] = field(default_factory=WeakSet)

    def running(self) -> Running:
        """What is to have the requests of a client. Raises ApiError."""
        self.check_open()
        running = Running(self.metrics.ended)
        self._running.add(running)
        return running

    def check_open(self) -> None:
        """Raises ApiError once the server ends."""
        if self.closing:
            raise shutting_down()

    def cut(self) -> None:
        """End what runs, with an error; on the loop's thread."""
        self.closing = True
        self.service.give_up()
        for running in list(self._running):
            running.cut()


async def aside(function: Callable[..., _T], *arguments: Any) -> _T:
    """The result of what may take longer than the loop has time, from another thread.

    Raises what it raises; ApiError for a request that is nested too deeply for it.
    """
    try:
        return await asyncio.to_thread(function, *arguments)
    except RecursionError as exc:
        raise ApiError("the request is nested too deeply") from exc


def state_of(request: Request) -> State:
    state = request.app.state.caravan
    assert isinstance(state, State)
    return state


def submit(running: Running, service: Service, requests: Sequence[BatchRequest]) -> None:
    """All of them or none. Raises ApiError."""
    most = service.batcher.capacity
    if len(requests) > most:
        raise ApiError(f"{len(requests)} answers at once: there is room for {most}", param="n")
    try:
        running.submit(service.batcher, requests)
    except UsageError as exc:
        raise of_error(exc, named(exc)) from exc


def tokens_of(service: Service, text: str, param: str) -> list[int]:
    """Of a prompt. Raises ApiError for one that no slot can hold, or that is none.

    A text of megabytes takes seconds, and is too long in any case: so only as much of it is looked
    at as is needed to know that.
    """
    size = _LONG * service.n_ctx
    while size < len(text):
        found = len(service.tokenize(text[:size]))
        # far enough from the end of the part, where others may stand in the whole
        if found > 2 * service.n_ctx:
            raise _too_long(service, f"more than {found}", param)
        size *= 2
    tokens = service.tokenize(text)
    check_length(service, tokens, param)
    return tokens


def check_length(service: Service, tokens: Sequence[int], param: str) -> None:
    """Raises ApiError for a prompt that no slot can hold, or that is none."""
    if not tokens:
        raise ApiError(f"{param} is empty", param=param)
    if len(tokens) > service.n_ctx:
        raise _too_long(service, str(len(tokens)), param)


def _too_long(service: Service, count: str, param: str) -> ApiError:
    return ApiError(
        f"This model's maximum context length is {service.n_ctx} tokens. However, {param} is"
        f" {count} tokens long.",
        code="context_length_exceeded",
        param=param,
    )
