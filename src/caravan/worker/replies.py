"""`Replies`: what goes back on one connection, in the order of the requests.

A slot is reserved when a request arrives and completed by whichever thread finishes its work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from caravan.trace.recorder import Recorder
from caravan.trace.spans import Kind
from caravan.transport.base import Transport
from caravan.worker.outlet import Outlet, Parts

_LIMIT = 256 << 20
# Requests that are not answered yet, silent ones behind a computation included.
_MOST_SLOTS = 65536

NOTHING: Parts = ()


class Slot:
    """The place of one reply; `parts` is None until it is known."""

    __slots__ = ("cost", "parts")

    def __init__(self, cost: int) -> None:
        self.cost = cost
        self.parts: Parts | None = None


class Replies:
    """Orders and sends the replies of one connection.

    Args:
        recorder: of the device whose replies they are, if it is one's.
    """

    def __init__(self, transport: Transport, recorder: Recorder | None = None) -> None:
        # what nobody reads costs next to nothing
        self._recorder = recorder or Recorder()
        self._outlet = Outlet(transport, self._recorder, Kind.REPLY)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._slots: deque[Slot] = deque()
        self._owed = 0

    def reserve(self, cost: int = 0) -> Slot:
        """The next place; waits while too many replies are on their way, or are not read."""
        slot = Slot(cost)
        if self._outlet.crowded:
            self._outlet.wait_room()
        with self._lock:
            if cost:
                if self._owed + cost > _LIMIT:
                    self._wait_for(lambda: self._owed == 0 or self._owed + cost <= _LIMIT)
                self._owed += cost
            if len(self._slots) >= _MOST_SLOTS:
                self._wait_for(lambda: len(self._slots) < _MOST_SLOTS)
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
                    with self._recorder.during(Kind.REPLY, sum(map(len, done.parts))):
                        self._outlet.send(done.parts)
            if self._waiting:
                self._changed.notify_all()

    def now(self, parts: Parts) -> None:
        """Send ahead of every reply that is not complete yet; waits while too many are not read."""
        if self._outlet.crowded:
            self._outlet.wait_room()
        self._outlet.send(parts)

    def drain(self, timeout: float) -> bool:
        """Wait until every place has been filled and sent; False if it was not."""
        deadline = time.monotonic() + timeout
        with self._lock:
            filled = self._wait_for(lambda: not self._slots, timeout)
        return filled and self._outlet.drain(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Send nothing more."""
        self._outlet.close()
        with self._lock:
            self._changed.notify_all()

    def _wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait, with the lock released, until it is so or nothing can be sent any more."""
        self._waiting += 1
        try:
            return self._changed.wait_for(lambda: self._outlet.broken or ready(), timeout)
        finally:
            self._waiting -= 1
