"""A relay on loopback that carries so many bytes to a worker and then holds all that follow."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_CHUNK = 64 << 10


class HeldLink:
    """See the module.

    Args:
        target: `host:port` of the worker.
        most: bytes of all connections together that pass before it holds.

    Attributes:
        endpoint: where heads connect.
        held: whether there is more that waits to pass.
        passed: bytes that have passed towards the worker.
    """

    def __init__(self, target: str, most: int) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._room = most
        self.passed = 0
        self.held = False
        self._changed = threading.Condition()
        self._ended = False
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def release(self) -> None:
        """Let everything pass from now on."""
        with self._changed:
            self._room = 1 << 60
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
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
                for one, other, counted in ((near, far, True), (far, near, False)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    thread = threading.Thread(target=self._carry, args=(one, other, counted))
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if counted and not self._may_pass(len(data)):
                    break
                sink.sendall(data)
        for end in (source, sink):
            # a lost end is the loss of both
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _may_pass(self, size: int) -> bool:
        with self._changed:
            self.held = self._room < size
            self._changed.wait_for(lambda: self._room >= size or self._ended)
            self.held = False
            self._room -= size
            self.passed += size
            return not self._ended


@contextmanager
def held_link(target: str, most: int) -> Iterator[HeldLink]:
    link = HeldLink(target, most)
    try:
        yield link
    finally:
        link.close()
