"""`best_counts`: how many layers each device gets, so that some jobs are done soonest.

Where there are few splits all are looked at, else those of `ladder`; the best by `estimate` are
played by the simulator, and so are those next to the best of them. Called by `planner` and `auto`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from caravan.plan.estimate import F64, I64, Estimator
from caravan.plan.job import Job
from caravan.plan.ladder import Kind, Problem, all_splits, ladder
from caravan.plan.pipeline import Pipeline, Setting
from caravan.plan.predict import job_seconds

_FEW = 2000  # splits that are looked at one by one
_ROUNDS = 20
_JUDGED = 4
_MOVES = 16
_NEAR = 0.03  # of a job's time; a move that looks worse by more than this is not played


def best_counts(
    setting: Setting,
    devices: Sequence[int],
    jobs: Sequence[Job],
    layers: Sequence[int],
    room: Sequence[int],
) -> tuple[int, ...] | None:
    """Layers of each device; the sum of the logarithms of all jobs' seconds is the least.

    A device may get none. None where the layers do not fit.

    Args:
        devices: numbers in the cluster, in the order of the layers.
        layers: bytes of each, the output layer last: n_layer + 1.
        room: bytes for layers on each of `devices`, in their order.
    """
    return Search(setting, jobs, layers).best(devices, room)


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
        self._played: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def best(
        self, devices: Sequence[int], room: Sequence[int], moves: int = _MOVES
    ) -> tuple[int, ...] | None:
        """As `best_counts`.

        Args:
            moves: most splits that are played to better the best.
        """
        splits = self.guesses(devices, room)
        if not len(splits):
            return None
        judged = [(self.play(devices, split), split) for split in _tuples(splits[:_JUDGED])]
        score, best = min(judged)
        return self._bettered(devices, room, best, score, moves)

    def guesses(self, devices: Sequence[int], room: Sequence[int]) -> I64:
        """(splits, devices) the best by estimate, best first; none where nothing fits."""
        n_layers = len(self._borders) - 1
        if math.comb(n_layers + len(devices) - 1, len(devices) - 1) <= _FEW:
            splits = self._sorted(devices, room, _every(n_layers, len(devices)))
            return splits[: 2 * _JUDGED]
        splits = self._sorted(devices, room, ladder(self._problem(devices, room)))
        for _ in range(_ROUNDS if len(splits) else 0):
            best = splits[0]
            near = np.concatenate((splits[: 2 * _JUDGED], _moves(best)))
            splits = self._sorted(devices, room, near)[: 2 * _JUDGED]
            if (splits[0] == best).all():
                break
        return splits

    def play(self, devices: Sequence[int], counts: Sequence[int]) -> float:
        """The sum of the logarithms of all jobs' seconds, by the simulator."""
        used = [(d, n) for d, n in zip(devices, counts, strict=True) if n]
        key = (tuple(d for d, _ in used), tuple(n for _, n in used))
        if key not in self._played:
            pipeline = Pipeline(self.estimator.setting, *key)
            self._played[key] = sum(
                math.log(job_seconds(pipeline, job)) for job in self.estimator.jobs
            )
        return self._played[key]

    def _bettered(
        self,
        devices: Sequence[int],
        room: Sequence[int],
        best: tuple[int, ...],
        score: float,
        moves: int,
    ) -> tuple[int, ...]:
        seen = {best}
        margin = _NEAR * len(self.estimator.jobs)
        while moves > 0:
            near = self._held(_moves(np.array(best)), room)
            looks = self.estimator.score(devices, np.concatenate((near, [best])))
            order = np.argsort(looks[:-1], kind="stable")
            wanted = [
                split
                for split in _tuples(near[order[looks[order] < looks[-1] + margin]])
                if split not in seen
            ]
            before = best
            for split in wanted[:moves]:
                moves -= 1
                seen.add(split)
                found = self.play(devices, split)
                if found < score:
                    score, best = found, split
                    break
            if best == before:
                break
        return best

    def _sorted(self, devices: Sequence[int], room: Sequence[int], splits: I64) -> I64:
        splits = self._held(np.unique(splits, axis=0), room)
        if not len(splits):
            return splits
        order = np.argsort(self.estimator.score(devices, splits), kind="stable")
        return np.asarray(splits[order])

    def _held(self, splits: I64, room: Sequence[int]) -> I64:
        """Those that the devices have room for."""
        ends = np.cumsum(splits, axis=1)
        taken = self._borders[ends] - self._borders[ends - splits]
        fits = ((taken <= np.asarray(room)) | (splits == 0)).all(axis=1)
        return np.asarray(splits[fits])

    def _problem(self, devices: Sequence[int], room: Sequence[int]) -> Problem:
        """What the ladder is for: all jobs in one, each as long as it takes with an even split."""
        numbers = np.asarray(devices)
        n_devices, n_layers = len(devices), len(self._borders) - 1
        even = np.diff(np.arange(n_devices + 1) * n_layers // n_devices)[None, :]
        weights = 1 / self.estimator.seconds(devices, even)[:, 0]
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
            if job.generate and lanes > 1:
                step = self._estimator.step(number, -(-job.concurrency // lanes))
                sums.append(weight * job.generate * lanes * step[self._devices])
                stage.append(weight * job.generate * lanes * turn)
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
            own = estimator.graph[devices] + job.generate * estimator.turn[devices]
            own = own + head.build_stage + job.generate * head.reuse_stage
            sums = sums + weight * (loads.first.compute[devices] + job.generate * step)
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
            tokens = loads.first.tokens + job.generate * -(-job.concurrency // lanes)
            messages = 1 + job.generate
            cost += weight * (messages * seconds + tokens * traffic.activation * per_byte)
        return cost

    def _travel(self) -> F64:
        tokens = sum(weight * loads.all.tokens for _, _, loads, weight in self._weighted)
        per_byte = self._estimator.links.per_byte[np.ix_(self._devices, self._devices)]
        return np.asarray(tokens * self._estimator.setting.traffic.activation * per_byte)


def _moves(split: I64) -> I64:
    """(splits, devices) one layer or two from any device to any other, by the borders between."""
    n = len(split)
    sources, targets = np.nonzero(~np.eye(n, dtype=bool))
    rows = np.arange(len(sources))
    made = []
    for layers in (1, 2):
        moved = np.tile(split, (len(sources), 1))
        moved[rows, sources] -= layers
        moved[rows, targets] += layers
        made.append(moved)
    all_made = np.concatenate(made)
    return np.asarray(all_made[(all_made >= 0).all(axis=1)])


def _tuples(splits: I64) -> Iterable[tuple[int, ...]]:
    return [tuple(int(count) for count in split) for split in splits]


@lru_cache(maxsize=64)
def _every(n_layers: int, n_devices: int) -> I64:
    return all_splits(n_layers, n_devices)
