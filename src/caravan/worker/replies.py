"""`Replies`: what goes back on one connection, in the order of the requests.

A slot is reserved when a request arrives and completed by whichever thread finishes its work. What
the socket does not take at once is left to a writer thread, so a slow client never holds a device.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from caravan.errors import TransportError
from caravan.transport.base import Buffer, Transport

_LIMIT = 256 << 20

Parts = Sequence[Buffer]
NOTHING: Parts = ()


class Slot:
    """The place of one reply; `parts` is None until it is known."""

    __slots__ = ("cost", "parts")

    def __init__(self, cost: int) -> None:
        self.cost = cost
        self.parts: Parts | None = None


class Replies:
    """Orders and sends the replies of one connection."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._slots: deque[Slot] = deque()
        self._backlog: deque[memoryview] = deque()
        self._owed = 0
        self._broken = False
        self._writer: threading.Thread | None = None

    def reserve(self, cost: int = 0) -> Slot:
        """The next place; waits while replies of more than the limit are on their way."""
        slot = Slot(cost)
        with self._lock:
            if cost:
                self._changed.wait_for(
                    lambda: self._broken or self._owed == 0 or self._owed + cost <= _LIMIT
                )
                self._owed += cost
            self._slots.append(slot)
        return slot

    def complete(self, slot: Slot, parts: Parts) -> None:
        """Fill a place (with nothing, for a command that is not answered).

        The parts may lie in device memory: they are sent or copied before this returns.
        """
        with self._lock:
            slot.parts = parts
            if self._slots[0] is not slot:
                slot.parts = [bytes(part) for part in parts]
                return
            while self._slots and self._slots[0].parts is not None:
                done = self._slots.popleft()
                self._owed -= done.cost
                if done.parts:
                    self._emit(done.parts)
            self._changed.notify_all()

    def now(self, parts: Parts) -> None:
        """Send ahead of every reply that is not complete yet."""
        with self._lock:
            self._emit(parts)

    def drain(self, timeout: float) -> bool:
        """Wait until every place has been filled and sent; False if it was not."""
        with self._lock:
            return self._changed.wait_for(
                lambda: self._broken or not (self._backlog or self._slots), timeout
            )

    def close(self) -> None:
        """Send nothing more and let the writer end."""
        with self._lock:
            self._break()

    def _break(self) -> None:
        self._broken = True
        self._backlog.clear()
        self._changed.notify_all()

    def _emit(self, parts: Parts) -> None:
        if self._broken:
            return
        left = deque(memoryview(part).cast("B") for part in parts if len(part))
        if not self._backlog:
            try:
                while left and (count := self._transport.send(list(left))):
                    _drop(left, count)
            except TransportError:
                self._break()
                return
        if left:
            self._backlog.extend(memoryview(bytes(part)) for part in left)
            self._wake_writer()

    def _wake_writer(self) -> None:
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="replies", daemon=True)
            self._writer.start()
        self._changed.notify_all()

    def _write(self) -> None:
        """The writer: it alone removes from the backlog, so `_emit` queues behind it."""
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._broken or self._backlog)
                if self._broken:
                    return
                parts = list(self._backlog)
            try:
                self._transport.wait_writable(1.0)
                count = self._transport.send(parts)
            except TransportError:
                self.close()
                return
            with self._lock:
                if not self._broken:
                    _drop(self._backlog, count)
                self._changed.notify_all()


def _drop(parts: deque[memoryview], count: int) -> None:
    """Remove the first `count` bytes."""
    while count:
        head = parts[0]
        if count < len(head):
            parts[0] = head[count:]
            return
        count -= len(head)
        parts.popleft()
