"""`Relay`: stands on loopback between heads and a worker; a subclass says what is wrong with it.

Used as a context manager. Its threads end with it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TypeVar

_CHUNK = 64 << 10

_R = TypeVar("_R", bound="Relay")


class Relay:
    """See the module. A subclass is ready before it calls `__init__`.

    Args:
        target: `host:port` of the worker.

    Attributes:
        endpoint: where heads connect.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self: _R) -> _R:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def passing(self, data: bytes, out: bool) -> bytes | None:
        """What arrives of what was sent, towards the worker if `out`; None: nothing, and the end.

        Of an end it is asked too, with no data. May wait until `close`.
        """
        return data

    def cut(self) -> None:
        """End all connections; new ones pass."""
        for end in list(self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in (self._server, *self._sockets):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                self._sockets.append(near)
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.shutdown(socket.SHUT_RDWR)
                    continue
                self._sockets.append(far)
                for one, other, out in ((near, far, True), (far, near, False)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    thread = threading.Thread(target=self._carry, args=(one, other, out))
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, sink: socket.socket, out: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                arrives = self.passing(data, out)
                if arrives is None:
                    break
                sink.sendall(arrives)
        if self.passing(b"", out) is None:
            return
        for end in (source, sink):
            # a lost end is the loss of both
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
