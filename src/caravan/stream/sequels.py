"""`Sequels`: whether a graph's result is fetched right after it, as it was the last time.

Then the command that computes it may wait the few microseconds for the one that fetches (GET or
PUSH), and both leave in one segment. A wrong guess costs a little time and nothing else: whatever
depends on the graph is posted after it, on the same stream, and sends it too.
"""

from __future__ import annotations

_MANY = 256


class Sequels:
    """What followed the graphs of one device, by uid."""

    __slots__ = ("_followed", "_last")

    def __init__(self) -> None:
        self._followed: set[int] = set()
        self._last = 0

    def expected(self, uid: int) -> bool:
        """The graph `uid` is posted now; whether its result was fetched at once last time."""
        self.other()
        self._last = uid
        return uid in self._followed

    def came(self) -> None:
        """A result is fetched."""
        if self._last:
            if len(self._followed) >= _MANY:
                self._followed.clear()
            self._followed.add(self._last)
            self._last = 0

    def other(self) -> None:
        """Something else is posted."""
        if self._last:
            self._followed.discard(self._last)
            self._last = 0
