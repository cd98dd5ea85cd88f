"""`Outlet`: whole messages onto one connection, without waiting for the other end to read.

What the socket does not take at once is copied and left to a writer thread, so a slow reader never
holds a device; only a backlog above a bound, where there is one, makes the sender wait. What is too
big to be copied is sent from where it lies, at the reader's pace.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice

from caravan.errors import TransportError
from caravan.trace.recorder import Recorder
from caravan.trace.spans import Kind
from caravan.transport.base import Buffer, Transport
from caravan.worker.waiting import Waiting

# Seconds that a sender waits for room. Then it goes on beyond the limit: who should make it may
# have frozen, and what else the sender has to do is not to wait for that.
PATIENCE = 1.0

# Beyond so many bytes, or so many parts, whoever reads requests waits before it takes on more.
CROWD_BYTES = 256 << 20
CROWD_PARTS = 65536
# What the socket leaves of a reply is copied, if it is not more.
MAX_COPY = 64 << 20
# The kernel takes no more parts at once.
_AT_ONCE = 512

Parts = Sequence[Buffer]


class Outlet:
    """See the module. Any thread may send; a message leaves whole.

    Args:
        recorder, kind: what the writer thread does is recorded as such; whoever sends records that.
        limit: bytes that may wait before a sender waits, `PATIENCE` at most; None: it only does
            with a message that is too big to be copied.
        waiting: counts what waits here, and elsewhere; None: nobody wants to know.

    Attributes:
        broken: nothing can be sent any more.
    """

    def __init__(
        self,
        transport: Transport,
        recorder: Recorder,
        kind: Kind,
        limit: int | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        self._transport = transport
        self._recorder = recorder
        self._kind = kind
        self._limit = limit
        self._waiting = waiting if waiting is not None else Waiting()
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
                if left and limit is None and sum(map(len, left)) > MAX_COPY:
                    left = self._send_big(left)
            except TransportError:
                self._break()
                return
            if left:
                self._keep(left)

    @property
    def crowded(self) -> bool:
        """Whether so much waits that nothing should be taken on that adds to it."""
        return self._size > CROWD_BYTES or len(self._backlog) > CROWD_PARTS

    def wait_room(self) -> None:
        """Wait until it is not crowded any more, or nothing can be sent."""
        with self._changed:
            self._changed.wait_for(lambda: self.broken or not self.crowded)

    def offer(self, parts: Parts) -> None:
        """As `send`, but only if nothing waits: for what is of no use later."""
        with self._lock:
            if self._backlog or self.broken:
                return
        self.send(parts)

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
        self._waiting.add(-self._size, -len(self._backlog))
        self._backlog.clear()
        self._size = 0
        self._changed.notify_all()

    def _send_big(self, left: deque[memoryview]) -> deque[memoryview]:
        """Send at the reader's pace, with the lock held, until the rest is worth a copy.

        Nothing of the message has left if others are before it, so these may go first.
        """
        self._changed.wait_for(lambda: self.broken or not self._backlog)
        while left and not self.broken and sum(map(len, left)) > MAX_COPY:
            self._transport.wait_writable(1.0)
            _drop(left, self._transport.send(list(left)))
        return deque() if self.broken else left

    def _keep(self, left: deque[memoryview]) -> None:
        """Copy what is left of a message, for the writer."""
        size = sum(map(len, left))
        self._backlog.extend(memoryview(bytes(part)) for part in left)
        self._size += size
        self._waiting.add(size, len(left))
        self._wake_writer()

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
                parts = list(islice(self._backlog, _AT_ONCE))
            with self._recorder.during(self._kind) as sending:
                try:
                    self._transport.wait_writable(1.0)
                    sending.size = self._transport.send(parts)
                except TransportError:
                    self.close()
                    return
            with self._changed:
                if not self.broken:
                    parts_left = len(self._backlog)
                    _drop(self._backlog, sending.size)
                    self._size -= sending.size
                    self._waiting.add(-sending.size, len(self._backlog) - parts_left)
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
