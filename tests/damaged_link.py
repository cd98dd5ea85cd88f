"""A relay on loopback that flips a bit of one byte when it is told to, and tells that it has."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_CHUNK = 64 << 10

TO_WORKER, TO_HEAD = 0, 1


class DamagedLink:
    """See the module.

    Args:
        target: `host:port` of the worker.

    Attributes:
        endpoint: where heads connect.
        passed: bytes that have passed each way, on all connections together.
        damaged: how many bytes were changed.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._lock = threading.Lock()
        self.passed = [0, 0]
        self.damaged = 0
        self._at: list[int | None] = [None, None]
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def damage(self, way: int, after: int = 0) -> None:
        """Change the byte that comes after so many more bytes that go this way."""
        with self._lock:
            self._at[way] = self.passed[way] + after

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._server, *self._sockets):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for way, one, other in ((TO_WORKER, near, far), (TO_HEAD, far, near)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    thread = threading.Thread(target=self._carry, args=(way, one, other))
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, way: int, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                sink.sendall(self._passing(way, data))
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _passing(self, way: int, data: bytes) -> bytes:
        with self._lock:
            at, start = self._at[way], self.passed[way]
            self.passed[way] += len(data)
            if at is None or at >= self.passed[way]:
                return data
            self._at[way] = None
            self.damaged += 1
            changed = bytearray(data)
            changed[at - start] ^= 1
            return bytes(changed)


@contextmanager
def damaged_link(target: str) -> Iterator[DamagedLink]:
    link = DamagedLink(target)
    try:
        yield link
    finally:
        link.close()
