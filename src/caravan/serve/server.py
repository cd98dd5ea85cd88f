"""`HttpServer`: an app behind a socket: uvicorn, with an end that waits for clients.

SIGINT and SIGTERM let those who are being answered have the rest, for a while; a second signal ends
the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from caravan.errors import CaravanError, ServerStartError
from caravan.serve.state import State

# That clients have to take the error that tells them of the end.
_LAST_SECONDS = 2.0
# That a connection may be there without a whole request.
_PATIENCE_SECONDS = 60.0
# That a client may read nothing of what it was answered.
_UNREAD_SECONDS = 300.0
# Requests that are made ready at the same time, each on a thread.
_ASIDE = 64
# How often the header with the date changes.
_TICK_SECONDS = 1.0


def listener(host: str, port: int) -> socket.socket:
    """A socket at that address; who connects waits until the server runs.

    Raises ServerStartError.
    """
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise ServerStartError(f"cannot listen on {where}: {exc.strerror or exc}") from exc
    try:
        if os.name == "posix":
            # a port that connections of an earlier server still remember is no other server's
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # two could be bound, but only one can listen; better told before a model is loaded
        sock.listen()
    except OSError as exc:
        sock.close()
        raise ServerStartError(f"cannot listen on {where}: {exc.strerror or exc}") from exc
    return sock


class HttpServer(uvicorn.Server):
    """See the module.

    Args:
        app: from `create_app`.
        on_ready: called once it accepts connections.
        drain_seconds: that requests have after the server was told to end.
        failed: asked each second for what makes it useless to go on.

    Attributes:
        failure: what it has ended for, if nobody told it to.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        on_ready: Callable[[], None] = lambda: None,
        drain_seconds: float = 30.0,
        failed: Callable[[], CaravanError | None] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            # errors are told by the app, and strangers' nonsense by nobody
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            # it believes what a proxy says only if it is told to
            proxy_headers=False,
        )
        super().__init__(config)
        state = app.state.caravan
        assert isinstance(state, State)
        self._state = state
        self._on_ready = on_ready
        self._drain_seconds = drain_seconds
        self._failed = failed
        self.failure: CaravanError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told = asyncio.Event()
        # connections on which the client is awaited: for what, and since when
        self._awaited: dict[Any, tuple[Any, float]] = {}

    def run_on(self, sock: socket.socket) -> None:
        """Until it is told to end; blocks. On the main thread it hears the signals.

        Raises what `failed` has said.
        """
        asyncio.run(self.serve([sock]))
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def stop(self) -> None:
        """As the first signal does; from any thread."""
        self.should_exit = True
        loop = self._loop
        if loop is not None:
            # one that is closed has ended already
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._told.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        # some templates and grammars take seconds, and are not to be in the way of others
        self._loop.set_default_executor(ThreadPoolExecutor(_ASIDE, "caravan-aside"))
        await super().startup(sockets)
        self._on_ready()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            self._close_silent()
            self.failure = self._failed()
            if self.failure is not None:
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._told.wait(), _TICK_SECONDS)

    def _close_silent(self) -> None:
        """Strangers could take all descriptors by connections that never ask anything, or whose
        answers they do not read."""
        now = time.monotonic()
        before, self._awaited = self._awaited, {}
        for one in self.server_state.connections:
            for_what = _awaited_for(one)
            if for_what is None:
                continue
            known, since = before.get(one, (None, now))
            self._awaited[one] = for_what, since if known == for_what else now
        for one, (for_what, since) in self._awaited.items():
            unread = isinstance(for_what, int)
            if now - since >= (_UNREAD_SECONDS if unread else _PATIENCE_SECONDS):
                one.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        timers = [
            loop.call_later(self._drain_seconds, self._state.cut),
            loop.call_later(self._drain_seconds + _LAST_SECONDS, self._force),
        ]
        try:
            await super().shutdown(sockets)
        finally:
            for timer in timers:
                timer.cancel()
            self._state.cut()

    def _force(self) -> None:
        """Of those who do not take their answers, or never end their questions."""
        self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            # threads may be inside of the engine for seconds
            os._exit(128 + sig)
        self.stop()


def _awaited_for(connection: Any) -> Any:
    """What a protocol of uvicorn waits for its client to do: to read so many bytes; to ask, where
    it is what came before; None: nothing."""
    cycle = connection.cycle
    if cycle is None or cycle.response_complete:
        return cycle or connection
    if cycle.more_body and not cycle.response_started:
        return cycle
    return connection.transport.get_write_buffer_size() if connection.flow.write_paused else None
