"""Clocks of two machines: how far a worker's is from this head's, and how well that is known.

A worker says its time; the head knows when it asked and when the answer came. The quickest of
several round trips decides: half of it is all that the offset can be wrong by.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """All in nanoseconds.

    Attributes:
        at: the head's time of the reading.
        offset: what the worker's clock is ahead of the head's, then.
        uncertainty: what the offset can be wrong by, either way.
    """

    at: int
    offset: int
    uncertainty: int


def read_clock(
    ask: Callable[[], int],
    rounds: int = ROUNDS,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Reading:
    """Ask the worker's time `rounds` times; raises what `ask` raises, and waits for the answers."""
    best: Reading | None = None
    for _ in range(rounds):
        before = clock()
        theirs = ask()
        after = clock()
        middle = (before + after) // 2
        reading = Reading(middle, theirs - middle, (after - before + 1) // 2)
        if best is None or reading.uncertainty < best.uncertainty:
            best = reading
    assert best is not None
    return best


class Alignment:
    """One worker's clock in terms of the head's, from a reading at the start and one at the end.

    Where the two agree within what they can be wrong by, the surer one holds throughout; else the
    clocks run apart, and the offset between the readings lies on the line through them.
    """

    def __init__(self, first: Reading, last: Reading | None = None) -> None:
        last = last or first
        """Without a second reading the first one holds for all time."""
        self._first, self._last = first, last
        self._drifts = abs(last.offset - first.offset) > first.uncertainty + last.uncertainty
        surer = min(first, last, key=lambda reading: reading.uncertainty)
        self._offset = surer.offset
        self.uncertainty = (
            max(first.uncertainty, last.uncertainty) if self._drifts else surer.uncertainty
        )

    def to_head(self, theirs: int) -> int:
        """A time of the worker's clock on the head's."""
        if not self._drifts:
            return theirs - self._offset
        first, last = self._first, self._last
        begin, end = first.at + first.offset, last.at + last.offset
        # outside of the readings the line goes on
        run = (theirs - begin) * (last.offset - first.offset) // max(1, end - begin)
        return theirs - first.offset - run
