"""`Estimator`: about how long some jobs take, for many splits at once.

A formula in place of the simulator: the busiest stage's or link's work on a prompt, what comes
before it for the first micro-batch and after it for the last one. The search for splits (`split`)
asks it for all that it thinks of, and the simulator for the few that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from caravan.plan.job import Job
from caravan.plan.pipeline import Setting
from caravan.plan.profile import HEAD
from caravan.plan.times import DeviceTimes

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

_CELLS = 256  # the engine looks at so many entries of the KV cache together


def n_kv(position: int) -> int:
    """Entries that attention looks at where so many tokens have been read."""
    return -(-position // _CELLS) * _CELLS


def depth(job: Job) -> int:
    """Tokens that are there in the middle of what it writes."""
    return job.prompt + job.generate // 2


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
        self.seconds: F64 = np.zeros((n + 1, n + 1))
        self.per_byte: F64 = np.zeros((n + 1, n + 1))
        for one in range(HEAD, n):
            for other in range(HEAD, n):
                if one != other:
                    link = cluster.link(one, other)
                    self.seconds[one, other] = link.seconds
                    self.per_byte[one, other] = 1 / link.rate


class Estimator:
    """See the module.

    Attributes:
        setting, jobs: what it is for.
        links: see `Links`.
        graph, turn: of each device of the cluster, see `DeviceProfile`.
        loads: of each job.
    """

    def __init__(self, setting: Setting, jobs: Sequence[Job]) -> None:
        self.setting = setting
        self.jobs = tuple(jobs)
        self.links = Links(setting)
        self.graph: F64 = np.array([device.graph for device in setting.cluster.devices])
        self.turn: F64 = np.array([device.turn for device in setting.cluster.devices])
        self.loads = [self._loads(job) for job in self.jobs]

    def score(self, devices: Sequence[int], counts: I64) -> F64:
        """(splits,) sums of the logarithms of all jobs' seconds; arguments as for `seconds`."""
        return np.asarray(np.log(self.seconds(devices, counts)).sum(axis=0))

    def seconds(self, devices: Sequence[int], counts: I64) -> F64:
        """(jobs, splits) seconds of each job.

        Args:
            devices: in the order of the layers.
            counts: (splits, devices) layers of each.
        """
        way = _Way(self, np.asarray(devices), counts)
        return np.array(
            [
                way.prompt(loads) + (job.generate * way.step(number) if job.generate else 0.0)
                for number, (job, loads) in enumerate(zip(self.jobs, self.loads, strict=True))
            ]
        )

    def step(self, number: int, n_seqs: int) -> F64:
        """(devices, n_layer + 2) as in `Load`, of job `number`'s decode step of so many."""
        steps = self.loads[number].steps
        if n_seqs not in steps:
            at = n_kv(depth(self.jobs[number]))
            steps[n_seqs] = self._sums(lambda times: times.decode.at(n_seqs, at))
        return steps[n_seqs]

    def _loads(self, job: Job) -> JobLoads:
        size = self.setting.n_ubatch
        ends = [*range(size, job.prompt, size), job.prompt]
        batches = [
            (end - start, n_kv(end)) for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
        return JobLoads(
            self._load(batches[:1], outputs=int(len(batches) == 1), times=1),
            self._load(batches[-1:], outputs=1, times=1),
            self._load(batches, outputs=1, times=job.concurrency),
        )

    def _load(self, batches: list[tuple[int, int]], outputs: int, times: int) -> Load:
        """Some micro-batches, as many `times`; with `outputs` the last has logits."""

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
        self._ends = np.cumsum(counts, axis=1)
        self._starts = self._ends - counts
        self._used = counts > 0
        self._stages = self._used.sum(axis=1)
        places = np.where(self._used, np.arange(len(devices)), HEAD)
        latest = np.maximum.accumulate(places, axis=1)
        before = np.concatenate((np.full((len(counts), 1), HEAD), latest[:, :-1]), axis=1)
        self._first = self._used & (before == HEAD)
        numbers = np.append(devices, HEAD)
        links = estimator.links
        self._hop = np.where(self._used, links.seconds[numbers[before], devices], 0.0)
        self._per_byte = links.per_byte[numbers[before], devices]
        self._end = devices[latest[:, -1]]
        self._graph = np.where(self._used, estimator.graph[devices], 0.0)
        self._turn = np.where(self._used, estimator.turn[devices], 0.0)

    def prompt(self, loads: JobLoads) -> F64:
        """(splits,) seconds until all prompts have been read."""
        traffic, head, links = (
            self._estimator.setting.traffic,
            self._estimator.setting.head,
            self._estimator.links,
        )
        fill, drain, work = (self._compute(x) for x in (loads.first, loads.last, loads.all))
        come, go, travel = (self._travel(x) for x in (loads.first, loads.last, loads.all))
        stages = self._stages
        thread = (head.build + head.build_stage * stages) * loads.all.count
        thread += head.token * loads.all.tokens
        begin = head.build + head.build_stage * stages + head.token * loads.first.tokens
        back = links.seconds[self._end, HEAD] + traffic.logits * links.per_byte[self._end, HEAD]
        come, go = come + self._hop, go + self._hop
        reach = begin[:, None] + np.cumsum(come + fill, axis=1) - fill - come
        whole = drain + go
        after = whole.sum(axis=1, keepdims=True) - np.cumsum(whole, axis=1)
        inputs = loads.all.inputs[1] * links.per_byte[HEAD, self._devices]
        most = np.maximum.reduce(
            (
                reach + come + work,
                reach + self._hop + travel + drain,
                begin[:, None] + inputs + drain,
            )
        )
        longest = np.where(self._used, most + after, 0.0).max(axis=1)
        return np.asarray(np.maximum(longest, thread + whole.sum(axis=1)) + back)

    def step(self, number: int) -> F64:
        """(splits,) seconds of a decode step of job `number`."""
        lanes = np.minimum(self._stages, self._estimator.jobs[number].concurrency)
        result = np.zeros(len(lanes))
        for n_lanes in np.unique(lanes):
            result = np.where(lanes == n_lanes, self._step(number, int(n_lanes)), result)
        return result

    def _step(self, number: int, lanes: int) -> F64:
        setting, links = self._estimator.setting, self._estimator.links
        traffic, head = setting.traffic, setting.head
        job = self._estimator.jobs[number]
        n_seqs = -(-job.concurrency // lanes)
        inputs = [
            traffic.again * traffic.inputs(n_seqs, n_kv(depth(job)), first=first)
            for first in (True, False)
        ]
        compute = self._of(self._estimator.step(number, n_seqs)) + self._turn
        moved = np.where(self._first, inputs[0], n_seqs * traffic.activation)
        travel = np.where(self._used, moved * self._per_byte, 0.0)
        own = head.reuse + head.reuse_stage * self._stages + head.sample
        size = n_seqs * traffic.logits * links.per_byte[self._end, HEAD]
        back = links.seconds[self._end, HEAD] + size
        alone = own + (compute + travel + self._hop).sum(axis=1) + back
        if lanes == 1:
            return np.asarray(alone)
        busiest = np.maximum(compute, travel).max(axis=1)
        busiest = np.maximum(np.maximum(busiest, own), size)
        return np.asarray(np.maximum(alone, lanes * busiest))

    def _compute(self, load: Load) -> F64:
        return np.asarray(self._of(load.compute) + load.count * self._graph)

    def _of(self, sums: F64) -> F64:
        return np.asarray(sums[self._devices, self._ends] - sums[self._devices, self._starts])

    def _travel(self, load: Load) -> F64:
        """Seconds that the link to each stage is taken."""
        activation = load.tokens * self._estimator.setting.traffic.activation
        moved = np.where(self._first, load.inputs[0], activation)
        return np.where(self._used, moved * self._per_byte, 0.0)
