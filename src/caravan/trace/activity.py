"""`Activity`: where a device's time goes, as totals that never add up to more than the time.

Several threads work for one device: one computes, another receives the next input or sends the
last result. Every moment counts once, for the first of the list below that is going on; the rest
is idle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

COMPUTING, WAITING, SENDING, IDLE = range(4)


class Totals(NamedTuple):
    """Nanoseconds since the device was opened, as of `now` on the clock of this process."""

    now: int
    computing: int
    waiting: int
    sending: int


class Activity:
    """See the module. Any thread may call; a call costs well under a microsecond."""

    __slots__ = ("_clock", "_going_on", "_lock", "_ns", "_since")

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._going_on = [0, 0, 0, 1]  # being idle never ends, it only gives way
        self._ns = [0, 0, 0, 0]
        self._since = clock()

    def begin(self, what: int) -> int:
        """`what` begins on the caller's thread; the time."""
        with self._lock:
            now = self._count()
            self._going_on[what] += 1
        return now

    def end(self, what: int) -> int:
        """What `begin` began is over; the time."""
        with self._lock:
            now = self._count()
            self._going_on[what] -= 1
        return now

    def totals(self) -> Totals:
        """So far, what is going on included."""
        with self._lock:
            now = self._count()
            return Totals(now, *self._ns[:IDLE])

    def _count(self) -> int:
        now = self._clock()
        computing, waiting, sending, _ = self._going_on
        what = COMPUTING if computing else WAITING if waiting else SENDING if sending else IDLE
        self._ns[what] += now - self._since
        self._since = now
        return now
