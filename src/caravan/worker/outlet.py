"""`Outlet`: whole messages onto one connection, without waiting for the other end to read.

What the socket does not take at once is copied and left to a writer thread, so a slow reader never
holds a device; only a backlog above a bound, where there is one, makes the sender wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from caravan.errors import TransportError
from caravan.trace.recorder import Recorder
from caravan.trace.spans import Kind
from caravan.transport.base import Buffer, Transport

# Seconds that a sender waits for room. Then it goes on beyond the limit: who should make it may
# have frozen, and what else the sender has to do is not to wait for that.
PATIENCE = 1.0

Parts = Sequence[Buffer]


class Outlet:
    """See the module. Any thread may send; a message leaves whole.

    Args:
        recorder, kind: what the writer thread does is recorded as such; whoever sends records that.
        limit: bytes that may wait before a sender waits, `PATIENCE` at most; None: it never does.

    Attributes:
        broken: nothing can be sent any more.
    """

    def __init__(
        self, transport: Transport, recorder: Recorder, kind: Kind, limit: int | None = None
    ) -> None:
        self._transport = transport
        self._recorder = recorder
        self._kind = kind
        self._limit = limit
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._backlog: deque[memoryview] = deque()
        self._size = 0
        self._writer: threading.Thread | None = None
        self.broken = False

    def send(self, parts: Parts) -> None:
        """Send a message, which may lie in device memory: it has been sent or copied on return.

        Dropped without a word when the connection is broken.
        """
        with self._lock:
            limit = self._limit
            if limit is not None and self._size > limit:
                self._changed.wait_for(lambda: self.broken or self._size <= limit, PATIENCE)
            if self.broken:
                return
            try:
                left = self._send_now(parts) if not self._backlog else _parts_after(parts, 0)
            except TransportError:
                self._break()
                return
            for part in left:
                self._backlog.append(memoryview(bytes(part)))
                self._size += len(part)
            if left:
                self._wake_writer()

    def drain(self, timeout: float) -> bool:
        """Wait until all has left; False if it has not."""
        with self._changed:
            return self._changed.wait_for(lambda: self.broken or not self._backlog, timeout)

    def close(self) -> None:
        """Send nothing more and let the writer end."""
        with self._changed:
            self._break()

    def _send_now(self, parts: Parts) -> deque[memoryview]:
        """What the socket does not take of a message; mostly it takes all of it at once."""
        count = self._transport.send(parts)
        if count == sum(map(len, parts)):
            return deque()
        left = _parts_after(parts, count)
        while left and count:
            count = self._transport.send(list(left))
            _drop(left, count)
        return left

    def _break(self) -> None:
        self.broken = True
        self._backlog.clear()
        self._size = 0
        self._changed.notify_all()

    def _wake_writer(self) -> None:
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="outlet", daemon=True)
            self._writer.start()
        self._changed.notify_all()

    def _write(self) -> None:
        """The writer: it alone removes from the backlog, so `send` queues behind it."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.broken or self._backlog)
                if self.broken:
                    return
                parts = list(self._backlog)
            with self._recorder.during(self._kind) as sending:
                try:
                    self._transport.wait_writable(1.0)
                    sending.size = self._transport.send(parts)
                except TransportError:
                    self.close()
                    return
            with self._changed:
                if not self.broken:
                    self._size -= sending.size
                    _drop(self._backlog, sending.size)
                self._changed.notify_all()


def _parts_after(parts: Parts, count: int) -> deque[memoryview]:
    """What is left of them without the first `count` bytes."""
    left = deque(memoryview(part) for part in parts if len(part))
    _drop(left, count)
    return left


def _drop(parts: deque[memoryview], count: int) -> None:
    """Remove the first `count` bytes."""
    while count:
        head = parts[0]
        if count < len(head):
            parts[0] = head[count:]
            return
        count -= len(head)
        parts.popleft()
