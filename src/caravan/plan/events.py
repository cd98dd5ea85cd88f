"""What takes time in a pipeline, one thing after the other: links, devices, hosts, and a clock.

Discrete events: nothing happens between two of them. All queues are first in, first out, in the
order in which the head posts, as streams and executors have them. Knows no models.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from caravan.plan.profile import DeviceProfile, LinkProfile

Do = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        kind: `compute`, `transfer` or `head`.
        source, target: numbers of devices in the cluster, or HEAD; equal but for transfers.
        ubatch: number of the micro-batch or step, in the order of their posting.
        start, end: seconds; a transfer ends when it has arrived.
    """

    kind: str
    source: int
    target: int
    ubatch: int
    start: float
    end: float


class Clock:
    """Events in the order of their time; of several at once, in the order of their making.

    Attributes:
        now: seconds since the beginning.
        spans: where they are recorded; None: nobody wants them.
    """

    def __init__(self, record: bool = False) -> None:
        self.now = 0.0
        self.spans: list[Span] | None = [] if record else None
        self._due: list[tuple[float, int, Do]] = []
        self._numbers = itertools.count()

    def at(self, time: float, do: Do) -> None:
        heapq.heappush(self._due, (time, next(self._numbers), do))

    def run(self) -> None:
        """Until nothing is due any more."""
        due = self._due
        while due:
            self.now, _, do = heapq.heappop(due)
            do()

    def note(self, kind: str, source: int, target: int, ubatch: int, start: float) -> None:
        """A span from `start` until now."""
        if self.spans is not None:
            self.spans.append(Span(kind, source, target, ubatch, start, self.now))


class Ticket:
    """Something that is waited for."""

    __slots__ = ("_waiting", "done")

    def __init__(self) -> None:
        self.done = False
        self._waiting: list[Do] = []

    def settle(self) -> None:
        self.done = True
        for do in self._waiting:
            do()

    def then(self, do: Do) -> None:
        """When it is done, which it is not yet."""
        self._waiting.append(do)


class Thread:
    """A thread of the head.

    Args:
        steps: yields the seconds that it works, and tickets that it waits for.
    """

    def __init__(self, clock: Clock, steps: Iterator[float | Ticket]) -> None:
        self._clock = clock
        self._steps = steps
        clock.at(clock.now, self._go)

    def _go(self) -> None:
        for wanted in self._steps:
            if isinstance(wanted, Ticket):
                if not wanted.done:
                    wanted.then(self._go)
                    return
            elif wanted > 0:
                self._clock.at(self._clock.now + wanted, self._go)
                return


class Way:
    """One direction of a link: a message leaves when the one before it has left."""

    def __init__(self, clock: Clock, link: LinkProfile, source: int, target: int) -> None:
        self._clock = clock
        self._link = link
        self._ends = source, target
        self._free = 0.0
        self._held: deque[tuple[float, Do, int, Ticket]] = deque()

    def send(self, size: float, arrived: Do, ubatch: int, after: Ticket | None = None) -> None:
        """Post a message.

        Args:
            arrived: called when it is at the other end.
            after: it, and all that is posted later, cannot leave before that.
        """
        if after is None or after.done:
            if not self._held:
                self._leave(size, arrived, ubatch)
                return
            after = after or _NOTHING
        else:
            after.then(self._go_on)
        self._held.append((size, arrived, ubatch, after))

    def _go_on(self) -> None:
        while self._held and self._held[0][3].done:
            size, arrived, ubatch, _ = self._held.popleft()
            self._leave(size, arrived, ubatch)

    def _leave(self, size: float, arrived: Do, ubatch: int) -> None:
        clock, start = self._clock, max(self._clock.now, self._free)
        self._free = start + self._link.transfer(size)
        if clock.spans is None or not size:
            clock.at(self._free + self._link.seconds, arrived)
            return

        def noted() -> None:
            clock.note("transfer", *self._ends, ubatch, start)
            arrived()

        clock.at(self._free + self._link.seconds, noted)


_NOTHING = Ticket()
_NOTHING.settle()


class Host:
    """Processors that devices share, and that go round when there are too few."""

    def __init__(self, clock: Clock, processors: float) -> None:
        self._clock = clock
        self._processors = processors
        self._jobs: list[_Job] = []
        self._since = 0.0
        self._rate = 1.0
        self._version = 0

    def run(self, seconds: float, threads: float, ended: Do) -> None:
        """Compute what takes so many threads so long when they are alone."""
        self._catch_up()
        self._jobs.append(_Job(seconds, threads, ended))
        self._plan()

    def _catch_up(self) -> None:
        passed = (self._clock.now - self._since) * self._rate
        self._since = self._clock.now
        for job in self._jobs:
            job.left -= passed

    def _plan(self) -> None:
        self._version += 1
        if not self._jobs:
            return
        wanted = sum(job.threads for job in self._jobs)
        self._rate = min(1.0, self._processors / wanted) if wanted else 1.0
        first, version = min(self._jobs, key=lambda job: job.left), self._version

        def end() -> None:
            if version != self._version:
                return
            self._catch_up()
            self._jobs.remove(first)
            self._plan()
            first.ended()

        self._clock.at(self._clock.now + max(0.0, first.left) / self._rate, end)


@dataclass(eq=False, slots=True)
class _Job:
    left: float
    threads: float
    ended: Do


class Work:
    """An entry of a device's queue.

    Args:
        ubatch: for its span.
        missing: how many things have to arrive before it can be done.
        seconds: that a graph takes; the device's overhead comes on top.
        begun: no graph: called when it is its turn, which takes no time.
    """

    __slots__ = ("begun", "device", "missing", "ready", "seconds", "ubatch")

    def __init__(
        self,
        device: Device,
        ubatch: int,
        missing: int,
        seconds: float = 0.0,
        *,
        begun: Do | None = None,
    ) -> None:
        self.device = device
        self.ubatch = ubatch
        self.missing = missing
        self.seconds = seconds
        self.begun = begun
        self.ready = 0.0

    def arrive(self) -> None:
        """One of the things that were missing is there."""
        self.missing -= 1
        if not self.missing:
            self.ready = self.device.clock.now
            self.device.go_on()


class Device:
    """A queue, worked off in order, and the thread before it that looks at new graphs.

    Args:
        number: in the cluster.
        host: None: it has processors of its own.
    """

    def __init__(
        self, clock: Clock, number: int, profile: DeviceProfile, host: Host | None
    ) -> None:
        self.clock = clock
        self.number = number
        self._profile = profile
        self._host = host
        self._queue: deque[Work] = deque()
        self._busy = False
        self._checked = 0.0

    def post(self, work: Work) -> None:
        self._queue.append(work)
        # what it misses was there already
        self.go_on()

    def check(self, nodes: float, done: Do) -> None:
        """Look at a new graph of so many nodes, beside what is computed."""
        seconds = self._profile.check_graph + nodes * self._profile.check
        if not seconds:
            done()
            return
        self._checked = max(self.clock.now, self._checked) + seconds
        self.clock.at(self._checked, done)

    def go_on(self) -> None:
        while not self._busy and self._queue and self._queue[0].missing <= 0:
            self._begin(self._queue.popleft())

    def _begin(self, work: Work) -> None:
        if work.begun is not None:
            work.begun()
            return
        clock, start = self.clock, self.clock.now
        self._busy = True
        # whoever has waited for its turn was awake before it came
        overhead = max(self._profile.graph, self._profile.turn - (start - work.ready))
        seconds = work.seconds + overhead

        def end() -> None:
            clock.note("compute", self.number, self.number, work.ubatch, start)
            self._free()

        if self._host is not None:
            self._host.run(seconds, self._profile.threads, end)
        else:
            clock.at(start + seconds, end)

    def _free(self) -> None:
        self._busy = False
        self.go_on()
