"""`Ration`: lines that strangers can cause, so many a minute and no more.

Of every source a few are said, and of all together a bounded number; the others are counted, and
told of in one line when the minute is over. Belongs to one thread, which calls `tick` now and then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

WINDOW_SECONDS = 60.0
MOST_OF_ONE = 5
MOST = 40


class Ration:
    """See the module; `say` is given what is said."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._end = 0.0
        self._said: Counter[str] = Counter()
        self._unsaid = 0

    def __repr__(self) -> str:
        return f"<Ration: {self._said.total()} said, {self._unsaid} not>"

    def tell(self, source: str, text: str) -> None:
        """Say `text`, which `source` has caused, if it may be said."""
        self.tick()
        if not self._said:
            self._end = self._clock() + WINDOW_SECONDS
        if self._said[source] < MOST_OF_ONE and self._said.total() < MOST:
            self._said[source] += 1
            self._say(text)
        else:
            # no entry for it: the table holds what was said, and nothing more
            self._unsaid += 1

    def tick(self) -> None:
        """Begin a new window, and tell of what was left out of the last one, when it is over."""
        if self._said and self._clock() >= self._end:
            self.finish()

    def finish(self) -> None:
        """Tell of what was left out so far."""
        unsaid, self._unsaid = self._unsaid, 0
        self._said.clear()
        if unsaid:
            self._say(f"and {unsaid} more such lines in the last minute")

    def patience(self) -> float | None:
        """Seconds until `tick` has something to tell; None if there is nothing."""
        return max(0.0, self._end - self._clock()) if self._unsaid else None
