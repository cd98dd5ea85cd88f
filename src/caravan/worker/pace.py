"""`Pace`: how fast work behind the scenes may go on without holding up a load or a computation."""

from __future__ import annotations

import time
from collections.abc import Callable

# Above this, what the keeper takes of memory and processor would show in the load: a slower network
# leaves enough of both.
_FAST = 400e6
# Seconds between two looks at what else goes on.
_WINDOW = 0.1
# Of its time in the background: one part of work and so many of rest.
_REST = 19.0
# A device that computes less than this share of the time counts as idle.
_IDLE = 0.02

Sleep = Callable[[float], bool]


class Pace:
    """See the module.

    Args:
        totals: bytes that have arrived and nanoseconds that were computed, since any moment.
        now: seconds, on a clock that only goes forward.
    """

    def __init__(
        self, totals: Callable[[], tuple[int, int]], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._totals = totals
        self._now = now
        self._busy = True
        self._since = 0.0
        self._last = (0, 0)

    def begin(self) -> None:
        """First of all, and after a pause: until more is known, others are busy."""
        self._busy = True
        self._since = self._now()
        self._last = self._totals()

    def busy(self) -> bool:
        """Whether payloads arrive fast, or a device computes, as of the last look."""
        now = self._now()
        elapsed = now - self._since
        if elapsed >= _WINDOW:
            arrived, computing = self._totals()
            fast = arrived - self._last[0] > _FAST * elapsed
            self._busy = fast or (computing - self._last[1]) * 1e-9 > _IDLE * elapsed
            self._since, self._last = now, (arrived, computing)
        return self._busy

    def rest(self, took: float, sleep: Sleep) -> None:
        """Wait after a piece of work that took so many seconds; not at all if nobody else is busy.

        Args:
            sleep: waits for so many seconds; True when there is no time left to wait.
        """
        until = self._now() + _REST * took
        while self.busy() and (left := until - self._now()) > 0:
            if sleep(min(left, _WINDOW)):
                return
