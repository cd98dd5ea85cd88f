"""`Shutdown`: how far a worker is with ending: it serves, it drains, or it is over.

SIGTERM lets the sessions that are there go on for a while; SIGINT, a second SIGTERM, and the end of
the process that has started the worker do not. Asked by the supervisor's loop; its signal handlers
only note what came.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any


class Shutdown:
    """See the module.

    Args:
        seconds: that sessions may go on for after SIGTERM.

    Attributes:
        draining: nothing new is to be begun.
    """

    def __init__(self, seconds: float) -> None:
        self.draining = False
        self._seconds = seconds
        self._deadline = 0.0
        self._asked = False
        self._now = False
        self._previous: dict[int, Any] = {}

    def __repr__(self) -> str:
        return f"<Shutdown {'now' if self._now else 'draining' if self.draining else 'not yet'}>"

    def catch(self, wake: int) -> None:
        """Hear the signals from here on; each writes a byte to the descriptor `wake`."""
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._told)

    def release(self) -> None:
        """Leave the signals to whom they belonged."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _told(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT or self._asked:
            self._now = True
        self._asked = True

    def at_once(self) -> None:
        """Let nothing go on."""
        self._now = True

    @property
    def asked(self) -> bool:
        """Whether it has been told to end, in whatever time."""
        return self._asked or self._now

    def begins(self) -> bool:
        """Whether the drain is to begin; True once."""
        if self.draining or not self.asked:
            return False
        self.draining = True
        self._deadline = time.monotonic() + self._seconds
        return True

    def is_over(self, sessions: int) -> bool:
        """Whether it is time to end, with so many sessions left."""
        if not self.draining:
            return False
        return self._now or sessions == 0 or time.monotonic() >= self._deadline

    @property
    def ran_out(self) -> bool:
        """Whether the time is over that sessions were given, with nobody in a hurry."""
        given = self.draining and self._seconds > 0 and not self._now
        return given and time.monotonic() >= self._deadline

    def patience(self) -> float:
        """Seconds until it may be over of its own accord."""
        return max(0.0, self._deadline - time.monotonic()) if self.draining else 3600.0
