"""`best_counts`: how many layers each device gets, so that some jobs are done soonest.

Where there are few splits all are looked at, else those of `ladder`; the best by `estimate` are
played by the simulator, and so are those next to the best of them. Called by `planner` and `auto`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from caravan.plan.estimate import Estimator, logarithm
from caravan.plan.job import Job
from caravan.plan.ladder import Kind, Problem, all_splits, ladder
from caravan.plan.pipeline import Pipeline, Setting
from caravan.plan.predict import prompt_seconds, step_seconds
from caravan.plan.times import F64, I64

_FEW = 2000  # splits that are looked at one by one
_ROUNDS = 20
_GUESSES = 64
# Micro-batches in stages that are played for one order, which takes about 0.2 s.
_BUDGET = 20_000
_TRIED = 2  # of each number of devices
_PLAYED = 24  # of the splits next to the best of them
# By how much of a job's time the formula may be wrong, for one request and for several.
_MARGIN, _CROWD = 0.03, 0.15
# Of a job's time: what a device more must save to be worth it.
WORTH = 0.01


def best_counts(
    setting: Setting,
    devices: Sequence[int],
    jobs: Sequence[Job],
    layers: Sequence[int],
    room: Sequence[int],
) -> tuple[int, ...] | None:
    """Layers of each device; the sum of the logarithms of all jobs' seconds is the least, but for
    what is so little that a device is not worth it.

    A device may get none. None where the layers do not fit.

    Args:
        devices: numbers in the cluster, in the order of the layers.
        layers: bytes of each, the output layer last: n_layer + 1.
        room: bytes for layers on each of `devices`, in their order.
    """
    search = Search(setting, jobs, layers)
    best = search.best(devices, room)
    return None if best is None else search.fewest(devices, room, best, WORTH * len(jobs))


class Search:
    """Splits of one model for some jobs. Keeps what was computed from one order to the next.

    Args:
        layers: bytes of each, the output layer last.
    """

    def __init__(self, setting: Setting, jobs: Sequence[Job], layers: Sequence[int]) -> None:
        if len(layers) != setting.n_layer + 1:
            raise ValueError(f"{len(layers)} sizes for {setting.n_layer + 1} layers")
        self.estimator = Estimator(setting, jobs)
        self._borders: I64 = np.concatenate(([0], np.cumsum(np.asarray(layers, np.int64))))
        # what looks worse by more is not played
        self._margin = sum(_MARGIN if job.concurrency == 1 else _CROWD for job in jobs)
        self._played: dict[object, tuple[tuple[float, float], ...]] = {}

    def best(
        self,
        devices: Sequence[int],
        room: Sequence[int],
        least: int = 1,
        budget: int = _BUDGET,
    ) -> tuple[int, ...] | None:
        """As `best_counts`.

        Args:
            least: how many devices get layers at least.
            budget: what may be played, as `cost` has it.
        """
        splits = self.guesses(devices, room, least)
        if not len(splits):
            return None
        most = budget // self.cost(int((splits[0] > 0).sum()))
        looks = self.estimator.score(devices, splits)
        splits = splits[looks <= looks[0] + self._margin]
        tried = _tuples(splits[: max(2, most // 2)])
        best = min(tried, key=lambda split: self.score(devices, split))
        return self._bettered(devices, room, best, least, min(_PLAYED, most - len(tried)))

    def fewest(
        self, devices: Sequence[int], room: Sequence[int], best: tuple[int, ...], worth: float
    ) -> tuple[int, ...]:
        """The best split over as few devices as there can be without losing more than `worth`."""
        limit = self.score(devices, best) + worth
        splits = self.guesses(devices, room)
        looks = self.estimator.score(devices, splits)
        near = _tuples(splits[looks <= limit + self._margin])
        for count in range(1, _used(best)):
            some = [split for split in near if _used(split) == count][:_TRIED]
            good = [split for split in some if self.score(devices, split) <= limit]
            if good:
                return min(good, key=lambda split: self.score(devices, split))
        return best

    def guesses(self, devices: Sequence[int], room: Sequence[int], least: int = 1) -> I64:
        """(splits, devices) the best by estimate: first the best of each set of devices, of these
        the best first, then others; empty where nothing fits.
        """
        n_layers = len(self._borders) - 1
        if math.comb(n_layers + len(devices) - 1, len(devices) - 1) <= _FEW:
            splits = self._sorted(devices, room, _every(n_layers, len(devices)), least)
            return _varied(splits)
        splits = self._sorted(devices, room, ladder(self._problem(devices, room)), least)
        for _ in range(_ROUNDS if len(splits) else 0):
            best, known = splits[0], _varied(splits)
            splits = self._sorted(devices, room, np.concatenate((known, _moves(best))), least)
            if (splits[0] == best).all():
                break
        return _varied(splits)

    def _sorted(self, devices: Sequence[int], room: Sequence[int], splits: I64, least: int) -> I64:
        held = self._held(splits, room, least)
        order = np.argsort(self.estimator.score(devices, held), kind="stable")
        return np.asarray(held[order])

    def _bettered(
        self,
        devices: Sequence[int],
        room: Sequence[int],
        counts: tuple[int, ...],
        least: int = 1,
        most: int = _PLAYED,
    ) -> tuple[int, ...]:
        """A split next to one, and next to that, as long as the simulator finds it better.

        Args:
            most: how many are played.
        """
        best, seen = counts, {counts}
        while most > 0:
            before = best
            for split in self._near(devices, room, best, least):
                if split in seen or not most:
                    continue
                most -= 1
                seen.add(split)
                if self.score(devices, split) < self.score(devices, best):
                    best = split
                    break
            if best == before:
                break
        return best

    def cost(self, stages: int) -> int:
        """Micro-batches and steps in stages that a split of so many takes to play, about."""
        size = self.estimator.setting.n_ubatch
        return sum(
            stages * (job.concurrency * -(-job.prompt // size) + 9 * min(stages, job.concurrency))
            for job in self.estimator.jobs
        )

    def score(self, devices: Sequence[int], counts: Sequence[int]) -> float:
        """The sum of the logarithms of all jobs' seconds, by the simulator."""
        times = self.played(devices, counts)
        jobs = self.estimator.jobs
        seconds = [
            prompt + job.n_steps * step for job, (prompt, step) in zip(jobs, times, strict=True)
        ]
        return float(logarithm(np.array(seconds)).sum())

    def played(
        self, devices: Sequence[int], counts: Sequence[int]
    ) -> tuple[tuple[float, float], ...]:
        """Seconds for the prompts, and for a decode step, of each job, by the simulator."""
        pipeline = self.pipeline(devices, counts)
        key = pipeline.devices, pipeline.counts
        if key not in self._played:
            self._played[key] = tuple(
                (
                    prompt_seconds(pipeline, job.prompt, job.concurrency),
                    step_seconds(pipeline, job.depth, job.concurrency),
                )
                for job in self.estimator.jobs
            )
        return self._played[key]

    def guessed(
        self, devices: Sequence[int], counts: Sequence[int]
    ) -> tuple[tuple[float, float], ...]:
        """As `played`, by the formula."""
        prompts, steps = self.estimator.parts(devices, np.array([counts]))
        return tuple((float(p), float(s)) for p, s in zip(prompts[:, 0], steps[:, 0], strict=True))

    def pipeline(self, devices: Sequence[int], counts: Sequence[int]) -> Pipeline:
        """Of those that have layers."""
        used = [(device, count) for device, count in zip(devices, counts, strict=True) if count]
        numbers, layers = zip(*used, strict=True)
        return Pipeline(self.estimator.setting, numbers, layers)

    def _near(
        self, devices: Sequence[int], room: Sequence[int], best: tuple[int, ...], least: int
    ) -> list[tuple[int, ...]]:
        """What is next to a split and looks hardly worse, the best first."""
        near = self._held(_moves(np.array(best)), room, least)
        looks = self.estimator.score(devices, np.concatenate((near, [best])))
        order = np.argsort(looks[:-1], kind="stable")
        return _tuples(near[order[looks[order] < looks[-1] + self._margin]])

    def _held(self, splits: I64, room: Sequence[int], least: int) -> I64:
        """Those that the devices have room for."""
        ends = np.cumsum(splits, axis=1)
        taken = self._borders[ends] - self._borders[ends - splits]
        fits = ((taken <= np.asarray(room)) | (splits == 0)).all(axis=1)
        return np.asarray(splits[fits & ((splits > 0).sum(axis=1) >= least)])

    def _problem(self, devices: Sequence[int], room: Sequence[int]) -> Problem:
        """What the ladder is for: all jobs in one, each as long as it takes with an even split."""
        numbers = np.asarray(devices)
        n_devices, n_layers = len(devices), len(self._borders) - 1
        even = np.diff(np.arange(n_devices + 1) * n_layers // n_devices)[None, :]
        weights = 1 / np.maximum(self.estimator.seconds(devices, even)[:, 0], 1e-9)
        return _Mixture(self.estimator, numbers, weights).problem(self._borders, room)


class _Mixture:
    """Some jobs as one, each with a weight."""

    def __init__(self, estimator: Estimator, devices: I64, weights: F64) -> None:
        self._estimator = estimator
        self._devices = devices
        self._weighted = [
            (number, job, loads, float(weight))
            for number, (job, loads, weight) in enumerate(
                zip(estimator.jobs, estimator.loads, weights, strict=True)
            )
        ]

    def problem(self, borders: I64, room: Sequence[int]) -> Problem:
        """See `Problem`.

        Args:
            borders: bytes of all layers before each.
        """
        shape = (len(self._devices), len(borders))
        memory = Kind(np.broadcast_to(borders.astype(np.float64), shape), np.zeros(shape[0]), 0.0)
        prompt, decode = self._prompt(), self._decode()
        bounded = (prompt,) if decode is None else (prompt, decode)
        return Problem(
            memory,
            np.asarray(room, np.float64),
            self._cost(),
            self._hop(),
            bounded,
            self._travel(),
        )

    def _prompt(self) -> Kind:
        """A stage's part of all prompts."""
        graph = self._estimator.graph[self._devices]
        sums = sum(w * loads.all.compute[self._devices] for _, _, loads, w in self._weighted)
        stage = sum(w * loads.all.count * graph for _, _, loads, w in self._weighted)
        return Kind(np.asarray(sums), np.asarray(stage))

    def _decode(self) -> Kind | None:
        """A stage's part of all decode steps, where several requests keep all stages busy."""
        turn = self._estimator.turn[self._devices]
        sums, stage = [], []
        for number, job, _, weight in self._weighted:
            lanes = min(job.concurrency, len(self._devices))
            steps = weight * job.n_steps * lanes
            if steps and lanes > 1:
                step = self._estimator.step(number, -(-job.concurrency // lanes))
                sums.append(steps * step[self._devices])
                stage.append(steps * turn)
        return Kind(np.sum(sums, axis=0), np.sum(stage, axis=0)) if sums else None

    def _cost(self) -> Kind:
        """What all stages take one after the other: the first micro-batch, and all steps."""
        estimator, devices = self._estimator, self._devices
        head = estimator.setting.head
        sums: F64 = np.zeros(())
        stage: F64 = np.zeros(())
        for number, job, loads, weight in self._weighted:
            lanes = min(job.concurrency, len(devices))
            step = estimator.step(number, -(-job.concurrency // lanes))[devices]
            steps = job.n_steps
            own = estimator.graph[devices] + steps * estimator.turn[devices]
            own = own + head.build_stage + steps * head.reuse_stage
            sums = sums + weight * (loads.first.compute[devices] + steps * step)
            stage = stage + weight * own
        return Kind(sums, stage)

    def _hop(self) -> F64:
        """The same between stages, the head last."""
        ends = np.append(self._devices, -1)
        links, traffic = self._estimator.links, self._estimator.setting.traffic
        seconds, per_byte = links.seconds[np.ix_(ends, ends)], links.per_byte[np.ix_(ends, ends)]
        cost: F64 = np.zeros(seconds.shape)
        for _, job, loads, weight in self._weighted:
            lanes = min(job.concurrency, len(self._devices))
            tokens = loads.first.tokens + job.n_steps * -(-job.concurrency // lanes)
            messages = loads.first.count + job.n_steps
            cost += weight * (messages * seconds + tokens * traffic.activation * per_byte)
        return cost

    def _travel(self) -> F64:
        tokens = sum(weight * loads.all.tokens for _, _, loads, weight in self._weighted)
        per_byte = self._estimator.links.per_byte[np.ix_(self._devices, self._devices)]
        return np.asarray(tokens * self._estimator.setting.traffic.activation * per_byte)


def _varied(splits: I64) -> I64:
    """The best few, of each set of devices that have layers at least one."""
    sets = (splits > 0) @ (1 << np.arange(splits.shape[1], dtype=np.int64) % 62)
    _, first = np.unique(sets, return_index=True)
    first.sort()
    others = np.setdiff1d(np.arange(len(splits)), first)
    return np.asarray(splits[np.concatenate((first, others))[:_GUESSES]])


def _moves(split: I64) -> I64:
    """(splits, devices) one layer, two or all from any device to any other, by the borders
    between.
    """
    n = len(split)
    sources, targets = np.nonzero(~np.eye(n, dtype=bool))
    rows = np.arange(len(sources))
    moved = np.tile(split, (3, len(sources), 1))
    for some, layers in zip(moved, (1, 2, split[sources]), strict=True):
        some[rows, sources] -= layers
        some[rows, targets] += layers
    found = moved.reshape(-1, n)
    return np.asarray(found[(found >= 0).all(axis=1) & (found != split).any(axis=1)])


def _used(split: Sequence[int]) -> int:
    """How many devices get layers."""
    return sum(count > 0 for count in split)


def _tuples(splits: I64) -> list[tuple[int, ...]]:
    return [tuple(int(count) for count in split) for split in splits]


@lru_cache(maxsize=64)
def _every(n_layers: int, n_devices: int) -> I64:
    return all_splits(n_layers, n_devices)
