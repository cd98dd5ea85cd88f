"""A relay on loopback that is a cable: it can be cut, pulled, which nobody is told of, or bad."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_CHUNK = 64 << 10
_FOR_EVER = 1 << 60


class Cable:
    """See the module.

    Args:
        target: `host:port` of the worker.

    Attributes:
        endpoint: where heads connect.
        held: set once something waits to pass.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._changed = threading.Condition()
        self._room = _FOR_EVER
        self._pulled = self._ended = False
        self._good: int | None = None  # pieces that pass as they are before one that does not
        self.held = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def hold_after(self, size: int) -> None:
        """Let so many more bytes pass to the worker, and then pull it."""
        with self._changed:
            self._room = size

    def pull(self) -> None:
        """Let nothing pass any more, either way."""
        with self._changed:
            self._pulled = True

    def plug(self) -> None:
        """Let everything pass, also what has waited."""
        with self._changed:
            self._room, self._pulled = _FOR_EVER, False
            self.held.clear()
            self._changed.notify_all()

    def damage(self, after: int = 0) -> None:
        """Change a bit of what passes to the worker, after so many pieces."""
        with self._changed:
            self._good = after

    def cut(self) -> None:
        """End all connections; new ones pass."""
        self.plug()
        for end in list(self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
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
            while (data := source.recv(_CHUNK)) and self._may_pass(len(data), out):
                sink.sendall(self._damaged(data) if out else data)
        # who has pulled it is told nothing of an end either
        if self._may_pass(0, out):
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _damaged(self, data: bytes) -> bytes:
        with self._changed:
            if self._good is None:
                return data
            self._good = self._good - 1 if self._good else None
            if self._good is not None:
                return data
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        return bytes(changed)

    def _may_pass(self, size: int, out: bool) -> bool:
        with self._changed:
            if out and size > self._room:
                self._pulled = True
            if self._pulled:
                self.held.set()
            self._changed.wait_for(lambda: self._ended or not self._pulled)
            self._room -= size if out else 0
            return not self._ended


@contextmanager
def cable_to(target: str) -> Iterator[Cable]:
    cable = Cable(target)
    try:
        yield cable
    finally:
        cable.close()
