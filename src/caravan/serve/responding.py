"""How an answer leaves: as server-sent events, or as a whole; and that a client which hangs up
costs nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from caravan.serve.answer import Answer, dumps
from caravan.serve.errors import ApiError
from caravan.serve.running import Running

# Seconds without a token after which a stream says that it is alive: proxies cut silent ones.
ALIVE_SECONDS = 10.0
# Until then what fails has a status of its own.
_FIRST_SECONDS = 1.0
_ALIVE = b": waiting\n\n"
# Nobody reads that one; it is for the log and the metrics.
HUNG_UP = 499
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx would hold it back
    "x-accel-buffering": "no",
}


class Json(JSONResponse):
    """Escapes all but ASCII: texts of clients may have half characters, which no encoding has."""

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()


@contextmanager
def watched(receive: Receive, running: Running) -> Iterator[None]:
    """While something runs for a client: it is cancelled when the client hangs up, or when this is
    left."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        running.cancel()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        running.cancel()


async def respond(request: Request, running: Running, answer: Answer, stream: bool) -> Response:
    """The response, which for a stream goes on by itself. Raises ApiError."""
    if stream:
        return EventStream(running, answer)
    with watched(request.receive, running):
        while running.more:
            for index, chunk in await running.chunks():
                answer.add(index, chunk)
        if running.gone:
            return Response(status_code=HUNG_UP)
    return Json(answer.whole())


class EventStream(Response):
    """An answer as server-sent events. What fails before the first of them has a status."""

    def __init__(self, running: Running, answer: Answer) -> None:
        super().__init__(headers=_STREAM_HEADERS)
        # it has no length
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._running = running
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with watched(receive, self._running):
            try:
                data = self._answer.begin() + await self._next(_FIRST_SECONDS)
            except ApiError as exc:
                await exc.response()(scope, receive, send)
                return
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await self._send_all(send, data)

    async def _send_all(self, send: Send, data: bytes) -> None:
        running = self._running
        while running.more:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            try:
                data = await self._next(ALIVE_SECONDS)
            except ApiError as exc:
                data = exc.event()
                break
        else:
            if running.gone:
                return
            data += self._answer.end()
        await send({"type": "http.response.body", "body": data})

    async def _next(self, seconds: float) -> bytes:
        """The events of all that has come, or after so long a sign of life."""
        until = asyncio.get_running_loop().time() + seconds
        found = await self._running.chunks(until)
        return b"".join(self._answer.event(*part) for part in found) or _ALIVE
