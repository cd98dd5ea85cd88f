"""How far the loading of a model is, for people: a bar for each worker's device on stderr.

On a terminal bars, elsewhere a line every few seconds; nothing for a load that is over at once.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caravan.llm.loading import DeviceLoad

# A load that is shorter shows nothing; rich itself takes 0.1 s to be imported.
_PATIENCE_SECONDS = 0.5
_LINE_SECONDS = 5.0
_MB = 1e6


@contextlib.contextmanager
def shown_loading(quiet: bool = False, *, passing: bool = False) -> Iterator[Shown | None]:
    """What to give a `Model` as its `on_load`; None if nothing is to be shown.

    Whoever prints something else meanwhile calls its `end` first: a load that breaks off does not.

    `passing`: the bars vanish at the end.
    """
    if quiet:
        yield None
        return
    with contextlib.ExitStack() as stack:
        yield _Bars(stack, passing) if sys.stderr.isatty() else _Lines()


def source(load: DeviceLoad) -> str:
    """Where a device's weights come from, such as `cache` or `cache+network`; empty so far."""
    parts = {"disk": load.disk, "cache": load.cache, "network": load.network}
    return "+".join(name for name, size in parts.items() if size)


class _Far:
    """How far each device was when it was last heard of."""

    def __init__(self) -> None:
        self._done: dict[str, int] = {}

    def is_anew(self, loads: Sequence[DeviceLoad]) -> bool:
        """Whether this is another load than before, which broke off: somebody has less by now, or
        does without."""
        before, self._done = self._done, {load.name: load.done for load in loads}
        return any(done > self._done.get(name, -1) for name, done in before.items())


class _Speeds:
    """Bytes a second of each device since the load began; that of one that is done stays."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin: float | None = None
        self._ends: dict[str, float] = {}

    def of(self, load: DeviceLoad) -> float:
        now = self._clock()
        if self._begin is None:
            self._begin = now
        if load.total and load.done == load.total:
            now = self._ends.setdefault(load.name, now)
        seconds = now - self._begin
        return load.done / seconds if seconds > 0 else 0.0


class _Lines:
    """For logs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._far = _Far()
        self.end()

    def end(self) -> None:
        """It may be loaded once more."""
        self._last = self._clock()
        self._speeds = _Speeds(self._clock)
        self._told: set[str] = set()  # of devices that are done
        self._begun = False

    def __call__(self, loads: Sequence[DeviceLoad]) -> None:
        if self._far.is_anew(loads):
            self.end()
        speeds = {load.name: self._speeds.of(load) for load in loads}
        now = self._clock()
        over = all(load.done == load.total for load in loads)
        # the last line only where there was another one, and once
        if not (now - self._last >= _LINE_SECONDS or (over and self._begun)):
            return
        self._last = now
        self._begun = not over
        # a log that takes no more is no reason to give up a load
        with contextlib.suppress(OSError):
            for load in loads:
                if load.total and load.name not in self._told:
                    print(_line(load, speeds[load.name] / _MB), file=sys.stderr, flush=True)
        self._told |= {load.name for load in loads if load.done == load.total}
        if over:
            self.end()


def _line(load: DeviceLoad, speed: float) -> str:
    """`speed`: MB a second."""
    done, total = load.done / _MB, load.total / _MB
    text = f"caravan: loading {load.name}: {done:.0f} of {total:.0f} MB"
    if not load.done:
        return text
    text += f" from {source(load)}, {speed:.0f} MB/s"
    if done < total and speed > 0:
        text += f", {_duration((total - done) / speed)} left"
    return text


def _rate(speed: float) -> str:
    return f"{speed:.1f} MB/s" if speed < 100 else f"{speed:.0f} MB/s"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


class _Bars:
    """For a terminal."""

    def __init__(self, stack: contextlib.ExitStack, passing: bool) -> None:
        self._stack = stack
        self._passing = passing
        self._far = _Far()
        self.end()

    def end(self) -> None:
        """What is printed from here on is somebody else's; and it may be loaded once more."""
        self._stack.close()
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}
        self._begin, self._speeds = time.monotonic(), _Speeds(time.monotonic)

    def __call__(self, loads: Sequence[DeviceLoad]) -> None:
        if self._far.is_anew(loads):
            self.end()
        over = all(load.done == load.total for load in loads)
        speeds = {load.name: self._speeds.of(load) for load in loads}
        if self._bars is None:
            if over:
                self.end()
            if over or time.monotonic() - self._begin < _PATIENCE_SECONDS:
                return
            self._bars = self._stack.enter_context(_new_bars(self._passing))
        for load in loads:
            if not load.total:
                continue
            if load.name not in self._tasks:
                self._tasks[load.name] = self._bars.add_task(
                    load.name, source="", rate="", total=load.total
                )
            self._bars.update(
                self._tasks[load.name],
                total=load.total,
                completed=load.done,
                source=source(load),
                rate=_rate(speeds[load.name] / _MB) if load.done else "",
            )
        if over:
            self.end()


Shown = _Lines | _Bars


def _new_bars(passing: bool) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    # what fits into 80 columns with the longest of sources
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=14),
        DownloadColumn(),
        TextColumn("{task.fields[rate]}", style="progress.data.speed"),
        TextColumn("{task.fields[source]}"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=passing,
    )
