"""Plays a pipeline: what the engine's scheduler, the head's links and the workers do, and when.

A thread of the head builds a micro-batch and posts to each stage its inputs, its graph, and the
command that sends its output to the next stage; it goes on without waiting. Each device works off
what was posted to it, in order. What the real thing has and what bounds nothing with these devices
is not played: the scheduler's copies of inputs (a device's commands are in order anyway, and its
events only stand for what the host can see), the bounds on what waits at the head (64 MiB) and on
a way (256 MiB: whoever waits for room is ahead of who does not take).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from caravan.llm.params import whole_blocks
from caravan.plan.events import Clock, Device, Do, Host, Span, Thread, Ticket, Way, Work
from caravan.plan.pipeline import Pipeline
from caravan.plan.profile import HEAD
from caravan.plan.times import Grid, between

Steps = Iterator[float | Ticket]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What came of it.

    Attributes:
        seconds: until the head has the last logits.
        spans: empty unless they were asked for.
    """

    seconds: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Ubatch:
    """A micro-batch.

    Attributes:
        n_tokens: in all.
        n_past: of the longest sequence, before it.
        outputs: of how many tokens there are logits.
        decode: its tokens belong to as many sequences.
    """

    n_tokens: int
    n_past: int
    outputs: int = 0
    decode: bool = False

    @property
    def n_kv(self) -> int:
        """Entries of the KV cache that attention looks at."""
        end = self.n_past + (1 if self.decode else self.n_tokens)
        return whole_blocks(end)

    @property
    def shape(self) -> tuple[int, int, bool]:
        """What makes the engine use the last graph again, if it is the same."""
        return self.n_tokens, self.n_kv, self.outputs > 0


class _Stage:
    """Layers on a device, the links of the device, and how long it takes."""

    def __init__(self, run: Run, number: int, first: int, end: int) -> None:
        setting, clock = run.setting, run.clock
        cluster, times = setting.cluster, setting.times[number]
        profile = cluster.devices[number]
        self.device = Device(clock, number, profile, run.hosts.get(profile.host))
        self.down = Way(clock, cluster.link(HEAD, number), HEAD, number)
        self.up = Way(clock, cluster.link(number, HEAD), number, HEAD)
        # to the next stage; None: through the head, or there is none
        self.way: Way | None = None
        self.n_layers = end - first
        self._prompt = lines(times.prompt, first, end)
        self._decode = lines(times.decode, first, end)
        n_layer = setting.n_layer
        self._output = lines(times.decode, n_layer, n_layer + 1) if end > n_layer else None

    def seconds(self, ubatch: Ubatch) -> float:
        if ubatch.decode:
            return self._decode(ubatch.n_tokens, ubatch.n_kv)
        total = self._prompt(ubatch.n_tokens, ubatch.n_kv)
        if ubatch.outputs and self._output is not None:
            total += self._output(ubatch.outputs, ubatch.n_kv)
        return total


class Run:
    """A pipeline at work. Each thread of the head is a generator of what it does, see `go`.

    Attributes:
        clock: its time.

    Raises ValueError for a pipeline in which no device has any layer.
    """

    def __init__(self, pipeline: Pipeline, record: bool = False) -> None:
        self.setting = pipeline.setting
        self.clock = Clock(record)
        self.hosts = _hosts(self.clock, pipeline)
        self._stages = [_Stage(self, *stage) for stage in pipeline.stages]
        if not self._stages:
            raise ValueError("no device of this pipeline has any layer")
        for one, other in itertools.pairwise(self._stages):
            ends = one.device.number, other.device.number
            link = self.setting.cluster.link(*ends)
            if link.way != "relay":
                one.way = Way(self.clock, link, *ends)
        self._number = -1
        # of Python's threads one at a time runs: one that posts holds up others
        self._lock_free = 0.0

    @property
    def n_stages(self) -> int:
        return len(self._stages)

    def go(self, *threads: Steps) -> None:
        """Have the head's threads work, until nothing is left to do anywhere."""
        for steps in threads:
            Thread(self.clock, steps)
        self.clock.run()

    def locked(self, seconds: float) -> float:
        """Work of the head that only one thread at a time can do: how long it takes from now on."""
        now = self.clock.now
        self._lock_free = max(now, self._lock_free) + seconds
        return self._lock_free - now

    def post(self, ubatch: Ubatch, reuse: bool) -> Steps:
        """Post a micro-batch to all stages; `reuse`: its graph is that of the one before."""
        head, began = self.setting.head, self.clock.now
        self._number += 1
        number = self._number
        tokens = 0.0 if ubatch.decode else head.token * ubatch.n_tokens
        yield (head.reuse if reuse else head.build) + tokens
        each = head.reuse_stage if reuse else head.build_stage
        before: _Stage | None = None
        for stage in self._stages:
            work = Work(stage.device, number, 1, stage.seconds(ubatch))
            after = None if before is None else self._cross(before, ubatch, work)
            if each:
                yield self.locked(each)
            self._post_graph(stage, ubatch, reuse, work, after, before is None)
            before = stage
        self.clock.note("head", HEAD, HEAD, number, began)

    def fetch(self, outputs: int) -> Ticket:
        """Ask the last stage for the logits of so many tokens; for none, to tell when it is there
        in its queue."""
        last, number, ticket = self._stages[-1], self._number, Ticket()
        size = self.setting.traffic.logits * outputs
        self._post_command(last, number, lambda: last.up.send(size, ticket.settle, number))
        return ticket

    def _cross(self, one: _Stage, ubatch: Ubatch, work: Work) -> Ticket | None:
        """Have a stage send what it has computed to the one that does `work` with it.

        Returns what a message to that one waits for, if the head relays it.
        """
        number, way = work.ubatch, one.way
        size = self.setting.traffic.activation * ubatch.n_tokens
        if way is not None:
            work.missing += 1
            self._post_command(one, number, lambda: way.send(size, work.arrive, number))
            return None
        ticket = Ticket()
        self._post_command(one, number, lambda: one.up.send(size, ticket.settle, number))
        return ticket

    def _post_command(self, stage: _Stage, number: int, do: Do) -> None:
        """A short message that is at once done at its turn."""
        work = Work(stage.device, number, 1, begun=do)
        stage.device.post(work)
        stage.down.send(0.0, work.arrive, number)

    def _post_graph(
        self,
        stage: _Stage,
        ubatch: Ubatch,
        reuse: bool,
        work: Work,
        after: Ticket | None,
        first: bool,
    ) -> None:
        traffic = self.setting.traffic
        size = traffic.inputs(ubatch.n_tokens, ubatch.n_kv, first=first)
        if self.n_stages == 1:
            size += traffic.alone * ubatch.n_tokens
        if reuse and ubatch.decode:
            size *= traffic.again
        if after is not None:
            size += traffic.activation * ubatch.n_tokens
        arrived = work.arrive
        if not reuse:
            size += traffic.graph * stage.n_layers
            nodes = traffic.nodes * stage.n_layers

            def arrived() -> None:
                stage.device.check(nodes, work.arrive)

        stage.device.post(work)
        stage.down.send(size, arrived, work.ubatch, after)


def _hosts(clock: Clock, pipeline: Pipeline) -> dict[str, Host]:
    """Those whose processors are too few for the stages that they have."""
    cluster, wanted = pipeline.setting.cluster, dict[str, float]()
    for number, _, _ in pipeline.stages:
        profile = cluster.devices[number]
        wanted[profile.host] = wanted.get(profile.host, 0.0) + profile.threads
    there = cluster.processors
    return {h: Host(clock, there[h]) for h, n in wanted.items() if h in there and n > there[h]}


def lines(grid: Grid, first: int, end: int) -> Callable[[int, int], float]:
    """What `Grid.at` has for layers from `first` to `end`, in all; for many calls."""
    tokens, kv = grid.tokens, grid.kv
    table: list[list[float]] = grid.seconds[:, :, first:end].sum(axis=2).tolist()

    def at(n_tokens: int, n_kv: int) -> float:
        i, x = between(tokens, max(n_tokens, tokens[0]))
        j, y = between(kv, n_kv)
        total = table[i][j]
        if x:
            total += (table[i + 1][j] - total) * x
        if y:
            high = table[i][j + 1]
            if x:
                high += (table[i + 1][j + 1] - high) * x
            total += (high - total) * y
        return total if total > 0 else 0.0

    return at


def ubatches(n_prompt: int, n_past: int, n_batch: int, n_ubatch: int) -> Iterator[Ubatch]:
    """The micro-batches of a prompt, of whose last token the logits are wanted."""
    at, end = n_past, n_past + n_prompt
    while at < end:
        # a call of the engine, which is cut for itself
        stop = min(end, at + n_batch)
        while at < stop:
            n_tokens = min(n_ubatch, stop - at)
            yield Ubatch(n_tokens, at, int(at + n_tokens == end))
            at += n_tokens


def simulate_prompt(
    pipeline: Pipeline, n_prompt: int, *, n_past: int = 0, record: bool = False
) -> Timeline:
    """A context reads a prompt, after `n_past` tokens, and waits for the logits of its last one.

    Raises ValueError for a pipeline in which no device has any layer.
    """
    run = Run(pipeline, record)
    setting, ends = run.setting, [0.0]

    def read() -> Steps:
        shape = None
        for ubatch in ubatches(n_prompt, n_past, setting.n_batch, setting.n_ubatch):
            yield from run.post(ubatch, ubatch.shape == shape)
            shape = ubatch.shape
        if shape is not None:
            yield run.fetch(1)
        ends.append(run.clock.now)

    run.go(read())
    return Timeline(ends[-1], tuple(run.clock.spans or ()))


def simulate_decode(
    pipeline: Pipeline, n_past: int, *, steps: int = 8, streams: int = 1, record: bool = False
) -> Timeline:
    """So many streams take so many steps each, after others: as many lanes as stages share them,
    and each waits for its own logits only.

    Raises ValueError for a pipeline in which no device has any layer.
    """
    run = Run(pipeline, record)
    lanes = share(streams, run.n_stages)
    ends: list[list[float]] = [[] for _ in lanes]
    run.go(*(decoding(run, n, n_past, steps, e) for n, e in zip(lanes, ends, strict=True)))
    seconds = max((times[-1] for times in ends if times), default=0.0)
    return Timeline(seconds, tuple(run.clock.spans or ()))


def share(streams: int, n_stages: int) -> list[int]:
    """Streams of each lane, as `Batcher` shares out its slots."""
    n_lanes = min(streams, n_stages)
    return [streams // n_lanes + (lane < streams % n_lanes) for lane in range(n_lanes)]


def decoding(
    run: Run, streams: int, n_past: int, steps: int, ends: list[float], *, grow: bool = True
) -> Steps:
    """A thread that takes steps of so many streams; `ends`: is told when the logits were there.

    Args:
        grow: they become longer by it.
    """
    shape = Ubatch(streams, n_past, streams, decode=True).shape
    for step in range(steps):
        ubatch = Ubatch(streams, n_past + (step if grow else 0), streams, decode=True)
        yield from run.post(ubatch, ubatch.shape == shape)
        shape = ubatch.shape
        yield run.fetch(streams)
        ends.append(run.clock.now)
        yield run.locked(run.setting.head.sample * streams)
