"""`Estimator`: about how long some jobs take, for many splits at once.

A formula in place of the simulator: the busiest stage's or link's work on a prompt, what comes
before it for the first micro-batch and after it for the last one. The search for splits (`split`)
asks it for all that it thinks of, and the simulator for the few that are left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from caravan.llm.params import whole_blocks
from caravan.plan.job import Job
from caravan.plan.pipeline import Setting
from caravan.plan.profile import HEAD
from caravan.plan.times import F64, I64, DeviceTimes

_NOTHING = 1e-9  # seconds


def logarithm(seconds: F64) -> F64:
    """Also of nothing at all."""
    return np.asarray(np.log(np.maximum(seconds, _NOTHING)))


@dataclass(frozen=True, slots=True)
class Load:
    """Some micro-batches of a job's prompts.

    Attributes:
        count: how many.
        tokens: in all of them.
        compute: (devices, n_layer + 2) seconds of the layers before each border.
        inputs: bytes from the head to the first stage, and to any other.
    """

    count: int
    tokens: int
    compute: F64
    inputs: tuple[float, float]


@dataclass(frozen=True, slots=True)
class JobLoads:
    """What a job is made of: its first and its last micro-batch, and all of them.

    Attributes:
        steps: (devices, n_layer + 2) as in `Load`, of a decode step, by sequences taking it
            together; filled when asked for.
    """

    first: Load
    last: Load
    all: Load
    steps: dict[int, F64] = field(default_factory=dict)


class Links:
    """All links of a cluster as matrices by number, the head last, so that HEAD finds it.

    Attributes:
        seconds: (n + 1, n + 1) of a short message.
        per_byte: (n + 1, n + 1) more for each byte.
    """

    def __init__(self, setting: Setting) -> None:
        cluster = setting.cluster
        n = len(cluster.devices)
        shape = (n + 1, n + 1)
        self.seconds: F64 = np.zeros(shape)
        self.per_byte: F64 = np.zeros(shape)
        for one, other in itertools.permutations(range(HEAD, n), 2):
            link = cluster.link(one, other)
            self.seconds[one, other], self.per_byte[one, other] = link.seconds, 1 / link.rate


def _hosts(setting: Setting) -> list[F64]:
    parts = []
    for host, processors in setting.cluster.processors.items():
        on = [d.threads * (d.host == host) / processors for d in setting.cluster.devices]
        if sum(on) > 1:
            parts.append(np.array(on))
    return parts


class Estimator:
    """See the module.

    Attributes:
        setting, jobs: what it is for.
        links: see `Links`.
        graph, turn: of each device of the cluster, see `DeviceProfile`.
        check, check_layer: of each device, seconds for a new graph, and for each layer in it.
        hosts: for each whose processors may be too few, what part of them each device takes.
        loads: of each job.
    """

    def __init__(self, setting: Setting, jobs: Sequence[Job]) -> None:
        self.setting = setting
        self.jobs = tuple(jobs)
        self.links = Links(setting)
        devices = setting.cluster.devices
        self.graph: F64 = np.array([device.graph for device in devices])
        self.turn: F64 = np.maximum(self.graph, [device.turn for device in devices])
        nodes = setting.traffic.nodes
        self.check: F64 = np.array([device.check_graph for device in devices])
        self.check_layer: F64 = np.array([device.check * nodes for device in devices])
        self.hosts = _hosts(setting)
        self.loads = [self._loads(job) for job in self.jobs]

    def score(self, devices: Sequence[int], counts: I64) -> F64:
        """(splits,) sums of the logarithms of all jobs' seconds; arguments as for `parts`."""
        return np.asarray(logarithm(self.seconds(devices, counts)).sum(axis=0))

    def seconds(self, devices: Sequence[int], counts: I64) -> F64:
        """(jobs, splits) seconds of each job; arguments as for `parts`."""
        prompts, steps = self.parts(devices, counts)
        again = np.array([[job.n_steps] for job in self.jobs])
        return np.asarray(prompts + again * steps)

    def parts(self, devices: Sequence[int], counts: I64) -> tuple[F64, F64]:
        """(jobs, splits) each: seconds for the prompts of each job, and for a decode step.

        Args:
            devices: in the order of the layers.
            counts: (splits, devices) layers of each.
        """
        way = _Way(self, np.asarray(devices), counts)
        numbers = range(len(self.jobs))
        prompts = [way.prompt(number) for number in numbers]
        return np.array(prompts), np.array([way.step(number) for number in numbers])

    def step(self, number: int, n_seqs: int) -> F64:
        """(devices, n_layer + 2) as in `Load`, of job `number`'s decode step of so many."""
        steps = self.loads[number].steps
        if n_seqs not in steps:
            at = whole_blocks(self.jobs[number].depth)
            steps[n_seqs] = self._sums(lambda times: times.decode.at(n_seqs, at))
        return steps[n_seqs]

    def _loads(self, job: Job) -> JobLoads:
        size = self.setting.n_ubatch
        ends = [*range(size, job.prompt, size), job.prompt]
        starts = [0, *ends[:-1]]
        batches = [(end - at, whole_blocks(end)) for at, end in zip(starts, ends, strict=True)]
        return JobLoads(
            self._load(batches[:1], outputs=int(len(batches) == 1), times=1),
            self._load(batches[-1:], outputs=1, times=1),
            self._load(batches, outputs=1, times=job.concurrency),
        )

    def _load(self, batches: list[tuple[int, int]], outputs: int, times: int) -> Load:
        """Some micro-batches, as many `times`; with `outputs` the last has logits. One without
        tokens is none.
        """
        times = times if batches[0][0] else 0

        def seconds(device: DeviceTimes) -> F64:
            layers = np.sum([device.prompt.at(*batch) for batch in batches], axis=0)
            layers[-1] += outputs * device.decode.at(1, batches[-1][1])[-1]
            return np.asarray(layers * times)

        traffic = self.setting.traffic
        first, later = (
            times * sum(traffic.inputs(*batch, first=first) for batch in batches)
            for first in (True, False)
        )
        tokens = times * sum(n_tokens for n_tokens, _ in batches)
        return Load(times * len(batches), tokens, self._sums(seconds), (first, later))

    def _sums(self, seconds: Callable[[DeviceTimes], F64]) -> F64:
        """Of each device; those with the same times share what was computed for them."""
        known: dict[int, F64] = {}
        for times in self.setting.times:
            if id(times) not in known:
                known[id(times)] = np.concatenate(([0.0], np.cumsum(seconds(times))))
        return np.array([known[id(times)] for times in self.setting.times])


class _Way:
    """Some splits over devices in one order; all arrays are (splits, devices) where they can be."""

    def __init__(self, estimator: Estimator, devices: I64, counts: I64) -> None:
        self._estimator = estimator
        self._devices = devices
        self._counts = counts
        self._ends = np.cumsum(counts, axis=1)
        self._starts = self._ends - counts
        self._used = counts > 0
        self._stages = self._used.sum(axis=1)
        places = np.where(self._used, np.arange(len(devices)), HEAD)
        latest = np.maximum.accumulate(places, axis=1)
        edge = np.full((len(counts), 1), HEAD)
        before = np.concatenate((edge, latest[:, :-1]), axis=1)
        self._first = self._used & (before == HEAD)
        numbers = np.append(devices, HEAD)
        self._between = numbers[before], np.broadcast_to(devices, counts.shape)
        links = estimator.links
        self._hop = np.where(self._used, links.seconds[self._between], 0.0)
        self._end = devices[latest[:, -1]]
        self._back = links.seconds[self._end, HEAD]
        self._back_per_byte = links.per_byte[self._end, HEAD]
        self._rounds: dict[tuple[int, int], tuple[F64, F64]] = {}

    def prompt(self, number: int) -> F64:
        """(splits,) seconds until all prompts of job `number` have been read."""
        loads = self._estimator.loads[number]
        if not loads.all.tokens:
            return np.zeros(len(self._stages))
        head, stages = self._estimator.setting.head, self._stages
        logits = self._estimator.setting.traffic.logits
        fill, drain, work = (self._compute(x) for x in (loads.first, loads.last, loads.all))
        fill = fill + self._used * (self._estimator.turn - self._estimator.graph)[self._devices]
        come, go, travel = (self._travel(x) for x in (loads.first, loads.last, loads.all))
        checks = self._counts * self._estimator.check_layer[self._devices]
        checks = checks + self._used * self._estimator.check[self._devices]
        come, go = come + self._hop + self._first * checks, go + self._hop
        each = head.build + head.build_stage * stages
        begin = (each + head.token * loads.first.tokens)[:, None]
        reach = begin + np.cumsum(come + fill, axis=1) - fill - come
        rest = drain + go
        after = rest.sum(axis=1, keepdims=True) - np.cumsum(rest, axis=1)
        inputs = loads.all.inputs[1] * self._estimator.links.per_byte[HEAD, self._devices]
        inputs = np.maximum(inputs, loads.all.count * checks)
        most = np.maximum(reach + come + work, reach + self._hop + travel + drain)
        most = np.maximum(most, begin + self._hop + inputs + drain) + after
        longest = np.where(self._used, most, 0.0).max(axis=1)
        thread = each * loads.all.count + head.token * loads.all.tokens
        longest = np.maximum(longest, thread + rest.sum(axis=1))
        # a micro-batch alone has the processors for itself
        for part in self._estimator.hosts if loads.all.count > 1 else ():
            shared = begin[:, 0] + self._shared(part[self._devices], fill, drain, work)
            longest = np.maximum(longest, shared)
        back = self._back + logits * self._back_per_byte
        if self._estimator.jobs[number].concurrency > 1:
            each = np.maximum(drain, go).max(axis=1)
            return self._in_lanes(number, longest + back, rest.sum(axis=1) + back, each)
        return np.asarray(longest + back)

    def _in_lanes(self, number: int, longest: F64, alone: F64, each: F64) -> F64:
        """The same where a lane has several prompts: it waits at the end of each, and generates
        with those that have been read.

        Args:
            longest: seconds without that.
            alone: of the last micro-batch of a prompt.
            each: of that, where it takes longest.
        """
        concurrency = self._estimator.jobs[number].concurrency
        lanes = np.minimum(self._stages, concurrency)
        # what is read before anybody waits
        before = np.maximum(0.0, longest - alone - (concurrency - 1) * each)
        result = longest
        for n_lanes in np.unique(lanes):
            prompts = -(-concurrency // int(n_lanes))
            if prompts > 1:
                step, _ = self._round(number, prompts // 2)
                waits = before + prompts * alone + (prompts - 1) * step
                result = np.where(lanes == n_lanes, np.maximum(longest, waits), result)
        return result

    def _shared(self, part: F64, fill: F64, drain: F64, work: F64) -> F64:
        """(splits,) seconds of a host's processors, some idle until all its devices have work."""
        parts = np.where(self._used, part, 0.0)
        on = parts > 0
        filling = np.maximum(0.0, 1 - np.cumsum(parts, axis=1)) * on * fill
        left = parts.sum(axis=1, keepdims=True) - np.cumsum(parts, axis=1)
        draining = np.maximum(0.0, 1 - left) * on * drain
        draining[left <= 0] = 0.0
        return np.asarray((work * parts + filling + draining).sum(axis=1))

    def step(self, number: int) -> F64:
        """(splits,) seconds of a decode step of job `number`."""
        lanes = np.minimum(self._stages, self._estimator.jobs[number].concurrency)
        result = np.zeros(len(lanes))
        for n_lanes in np.unique(lanes):
            result = np.where(lanes == n_lanes, self._step(number, int(n_lanes)), result)
        return result

    def _step(self, number: int, lanes: int) -> F64:
        # of the lane with the most
        alone, most = self._round(number, -(-self._estimator.jobs[number].concurrency // lanes))
        return np.maximum(alone, lanes * most) if lanes > 1 else alone

    def _round(self, number: int, n_seqs: int) -> tuple[F64, F64]:
        """See `_rounded`, which is asked once."""
        if (number, n_seqs) not in self._rounds:
            self._rounds[number, n_seqs] = self._rounded(number, n_seqs)
        return self._rounds[number, n_seqs]

    def _rounded(self, number: int, n_seqs: int) -> tuple[F64, F64]:
        """(splits,) seconds of a decode step of so many sequences: alone, and in the part of it
        that takes longest, through which one lane after the other goes.
        """
        setting, estimator = self._estimator.setting, self._estimator
        traffic, head = setting.traffic, setting.head
        at = whole_blocks(estimator.jobs[number].depth)
        inputs = traffic.again * traffic.inputs(n_seqs, at, first=True)
        activation = n_seqs * traffic.activation
        moved = np.where(self._first, inputs, activation)
        travel = np.where(self._used, moved * estimator.links.per_byte[self._between], 0.0)
        layers = self._of(estimator.step(number, n_seqs))
        logits = n_seqs * traffic.logits * self._back_per_byte
        stage = head.reuse_stage * self._stages + n_seqs * head.sample
        turns = (self._used * estimator.turn[self._devices]).sum(axis=1)
        alone = head.reuse + stage + (layers + travel + self._hop).sum(axis=1)
        busy = layers + self._used * estimator.graph[self._devices]
        most = np.maximum(np.maximum(busy, travel).max(axis=1), np.maximum(stage, logits))
        for part in estimator.hosts:
            most = np.maximum(most, (busy * part[self._devices]).sum(axis=1))
        return np.asarray(alone + turns + self._back + logits), np.asarray(most)

    def _compute(self, load: Load) -> F64:
        graph = load.count * self._used * self._estimator.graph[self._devices]
        return np.asarray(self._of(load.compute) + graph)

    def _of(self, sums: F64) -> F64:
        return np.asarray(sums[self._devices, self._ends] - sums[self._devices, self._starts])

    def _travel(self, load: Load) -> F64:
        """Seconds that the link to each stage is taken."""
        activation = load.tokens * self._estimator.setting.traffic.activation
        moved = np.where(self._first, load.inputs[0], activation)
        return np.where(self._used, moved * self._estimator.links.per_byte[self._between], 0.0)
