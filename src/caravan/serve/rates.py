"""`Rates`: how many tokens each of the last seconds has seen, from the totals of a batcher.

Values only, and what all series of a minute have in common. Called by `cluster` and `gauge`.
"""

from __future__ import annotations

from collections import deque

from caravan.batching import BatcherState

SECONDS = 60


def series() -> deque[float | None]:
    """A value for each of the last seconds, the newest last; None: not known."""
    return deque([None] * SECONDS, SECONDS)


def rounded(values: deque[float | None]) -> list[float | None]:
    """For JSON."""
    return [None if value is None else round(value, 3) for value in values]


class Rates:
    """See the module.

    Attributes:
        prompt, gen: tokens read and generated, a second.
        busy: share of the last second that was spent computing.
        idle: whether nothing came of the last second.
    """

    def __init__(self) -> None:
        self.prompt, self.gen = series(), series()
        self.busy: float | None = None
        self._last: tuple[float, BatcherState] | None = None

    @property
    def idle(self) -> bool:
        return not (self.prompt[-1] or self.gen[-1])

    def add(self, state: BatcherState, now: float) -> None:
        """Another second is over; `now` by any clock of seconds."""
        prompt = gen = self.busy = None
        if self._last is not None and now > self._last[0]:
            then, last = self._last
            seconds = now - then
            prompt = (state.n_prompt - last.n_prompt) / seconds
            gen = (state.n_gen - last.n_gen) / seconds
            # several contexts may compute at the same time
            self.busy = min(1.0, (state.busy_seconds - last.busy_seconds) / seconds)
        self._last = (now, state)
        self.prompt.append(prompt)
        self.gen.append(gen)
