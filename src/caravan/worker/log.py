"""`log`: one line on stderr for the person who runs the worker, from any of its processes.

Nobody may be reading, and a file may have no room: that fails nothing else, and holds up nobody.
"""

from __future__ import annotations

import contextlib
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

# Of a session process, whose lines its head can cause.
MOST = 60
WINDOW_SECONDS = 60.0


class Bound:
    """So many lines a minute and no more; what was left out is told with the first line after it.

    Any thread may ask.
    """

    def __init__(self, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._end = 0.0
        self._said = 0
        self._unsaid = 0

    def admits(self) -> tuple[bool, int]:
        """Whether one more may be said; and how many were left out before it."""
        with self._lock:
            unsaid, now = 0, self._clock()
            if now >= self._end:
                self._end, self._said = now + WINDOW_SECONDS, 0
                unsaid, self._unsaid = self._unsaid, 0
            self._said += 1
            admitted = self._said <= self._most
            self._unsaid += not admitted
            return admitted, unsaid


_bound: Bound | None = None


def bound_lines(bound: Bound | None) -> None:
    """From now on this process says no more lines than that."""
    global _bound
    _bound = bound


def log(text: str) -> None:
    """See the module."""
    if _bound is not None:
        admitted, unsaid = _bound.admits()
        if unsaid:
            _write(sys.stderr, f"caravan worker: and {unsaid} more lines were not shown")
        if not admitted:
            return
    _write(sys.stderr, f"caravan worker: {text}")


def say(text: str) -> None:
    """A line on stdout, for the person, or the program, that started the worker."""
    _write(sys.stdout, text)


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        if _takes(stream):
            print(text, file=stream, flush=True)


def _takes(stream: TextIO) -> bool:
    """Whether a line can be written at once: a pipe that nobody reads, or a terminal that was told
    to stop, would hold up whoever writes, and with him all that he serves."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except (OSError, ValueError):
        return True
    return bool(poll.poll(0))
