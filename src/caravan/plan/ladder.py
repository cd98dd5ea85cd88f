"""`ladder`: good splits among too many to look at: a dynamic programme for each of some bounds.

What the jobs take is the sum of what all stages take, for the first micro-batch and for decode
steps, and of what the busiest one takes for the rest. So the busiest is given a bound, from the
least that is possible upwards, and under each bound the split with the least sum is found, over
(device, border between two layers). Numbers in, splits out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caravan.plan.times import F64, I64

_ALONE = (1.0, 1.01, 1.03, 1.06, 1.1, 1.15, 1.22, 1.3, 1.4, 1.6, 1.9, 2.5, 4.0, np.inf)
_TOGETHER = (1.0, 1.04, 1.12, 1.25, 1.5, 2.2, np.inf)


@dataclass(frozen=True, slots=True)
class Kind:
    """Something that a device takes for its layers.

    Attributes:
        sums: (devices, borders) of the layers before each border; never falls along them.
        stage: (devices,) more where a device has layers at all.
        slack: part of a bound that a sum may be above it, as rounding may have put it there.
    """

    sums: F64
    stage: F64
    slack: float = 1e-9

    def first(self, device: int, bounds: F64) -> I64:
        """(bounds, borders) the lowest border to start from for each to end at, under a bound."""
        least = self.sums[device] + self.stage[device] - bounds[:, None] * (1 + self.slack)
        return np.asarray(np.searchsorted(self.sums[device], least, side="left"))

    def reach(self, device: int, starts: I64, bounds: F64) -> I64:
        """(bounds,) the highest border that can be reached from `starts`, under each bound."""
        most = self.sums[device][starts] + bounds * (1 + self.slack) - self.stage[device]
        ends = np.searchsorted(self.sums[device], most, side="right") - 1
        return np.asarray(np.maximum(starts, ends))


@dataclass(frozen=True, slots=True)
class Problem:
    """Devices in an order, and layers.

    Attributes:
        memory: bytes, for `room`.
        room: (devices,) bytes.
        cost: what is summed up over all stages.
        hop: (devices + 1, devices + 1) cost from one stage to the next; last the head.
        bounded: what the busiest stage takes; one or two kinds.
        travel: (devices, devices) what the link between two takes, as in the first of `bounded`.
    """

    memory: Kind
    room: F64
    cost: Kind
    hop: F64
    bounded: tuple[Kind, ...]
    travel: F64


def ladder(problem: Problem) -> I64:
    """(splits, devices) layers of each; no two alike, none at all where nothing fits."""
    least = [_least(problem, kind) for kind in problem.bounded]
    if not np.isfinite(least).all():
        return np.zeros((0, len(problem.room)), np.int64)
    rungs = np.array(_ALONE if len(least) == 1 else _TOGETHER)
    programme = _Programme(problem, [bound * rungs for bound in least])
    return np.unique(np.array(programme.splits(), np.int64), axis=0)


def _least(problem: Problem, kind: Kind) -> float:
    """The lowest bound under which there is a split; infinite where the room is too small."""
    low, high = 0.0, float((kind.sums[:, -1] + kind.stage).max())
    if not _possible(problem, kind, np.array([high]))[0]:
        return np.inf
    for _ in range(3):
        steps = np.linspace(low, high, 33)
        first = int(np.argmax(_possible(problem, kind, steps)))
        low, high = steps[max(first - 1, 0)], steps[first]
    # nothing at all may be a bound, and has no multiples
    return max(float(high), np.finfo(np.float64).tiny)


def _possible(problem: Problem, kind: Kind, bounds: F64) -> NDArray[np.bool_]:
    """Whether there is a split under each bound: every device takes as much as it can."""
    at: I64 = np.zeros(len(bounds), np.int64)
    for device, room in enumerate(problem.room):
        filled = problem.memory.reach(device, at, np.full(len(bounds), room))
        at = np.minimum(kind.reach(device, at, bounds), filled)
    return np.asarray(at == kind.sums.shape[1] - 1)


class _Programme:
    """The least cost of all layers before each border, the last of them on each device.

    Args:
        bounds: of each kind; every one goes with every other.
    """

    def __init__(self, problem: Problem, bounds: Sequence[F64]) -> None:
        self._problem = problem
        self._bounds = bounds
        n_devices, n_borders = problem.cost.sums.shape
        n_bounds = math.prod(len(some) for some in bounds)
        # of the first kind, for all combinations
        self._first = np.repeat(bounds[0], n_bounds // len(bounds[0]))
        shape = (n_devices, n_bounds, n_borders)
        self._best: F64 = np.full(shape, np.inf)
        self._start: F64 = np.full(shape, np.inf)
        self._lowest: I64 = np.zeros(shape, np.int64)
        for device in range(n_devices):
            self._add(device)

    def splits(self) -> list[list[int]]:
        """One for each bound that has any."""
        totals = self._best[:, :, -1] + self._problem.hop[:-1, -1, None]
        ends = totals.argmin(axis=0)
        return [
            self._back(int(device), bound)
            for bound, device in enumerate(ends)
            if np.isfinite(totals[device, bound])
        ]

    def _add(self, device: int) -> None:
        problem = self._problem
        enter = self._entered(device).min(axis=0, initial=np.inf)
        enter[:, 0] = problem.hop[-1, device]
        start = enter - problem.cost.sums[device]
        lowest = problem.memory.first(device, np.array([problem.room[device]]))
        for kind, bounds in zip(problem.bounded, self._bounds, strict=True):
            lowest = np.maximum(lowest[:, None, :], kind.first(device, bounds)[None, :, :])
            lowest = lowest.reshape(-1, lowest.shape[-1])
        own = problem.cost.sums[device] + problem.cost.stage[device]
        self._best[device] = _window_minima(start, lowest) + own
        self._start[device], self._lowest[device] = start, lowest

    def _entered(self, device: int) -> F64:
        """(devices, bounds, borders) what is paid until `device` starts, by the one before."""
        problem = self._problem
        hop = np.where(
            problem.travel[:device, device, None] <= self._first,
            problem.hop[:device, device, None],
            np.inf,
        )
        return np.asarray(self._best[:device] + hop[:, :, None])

    def _before(self, device: int, bound: int, start: int) -> int:
        """The device before one that starts at a border."""
        problem = self._problem
        paid = self._best[:device, bound, start] + problem.hop[:device, device]
        paid[problem.travel[:device, device] > self._first[bound]] = np.inf
        return int(paid.argmin())

    def _back(self, device: int, bound: int) -> list[int]:
        n_devices, _, n_borders = self._best.shape
        counts = [0] * n_devices
        end = n_borders - 1
        while True:
            lowest = int(self._lowest[device, bound, end])
            start = lowest + int(self._start[device, bound, lowest:end].argmin())
            counts[device] = end - start
            if not start:
                return counts
            device, end = self._before(device, bound, start), start


def _window_minima(values: F64, lowest: I64) -> F64:
    """The least of `values[:, lowest:border]` for each border, along the last axis.

    Args:
        values, lowest: (bounds, borders)
    """
    n = values.shape[1]
    powers = [values]
    for width in (1 << i for i in range((n - 1).bit_length() - 1)):
        wider = powers[-1].copy()
        np.minimum(wider[:, :-width], wider[:, width:], out=wider[:, :-width])
        powers.append(wider)
    borders = np.arange(n)
    length = np.broadcast_to(borders - lowest, values.shape)
    level = np.frexp(np.maximum(length, 1))[1] - 1
    table = np.stack(powers)
    rows = np.arange(len(values))[:, None]
    left = table[level, rows, np.minimum(lowest, n - 1)]
    right = table[level, rows, np.maximum(borders - (1 << level), 0)]
    return np.where(length > 0, np.minimum(left, right), np.inf)


def all_splits(n_layers: int, n_devices: int) -> I64:
    """(splits, devices) every one there is."""
    rows: Sequence[Sequence[int]] = [
        *itertools.combinations(range(n_layers + n_devices - 1), n_devices - 1)
    ]
    bars = np.array(rows, np.int64).reshape(len(rows), n_devices - 1)
    ends = np.full((len(rows), 1), n_layers + n_devices - 1, np.int64)
    starts = np.full((len(rows), 1), -1, np.int64)
    borders = np.concatenate((starts, bars, ends), axis=1)
    return np.asarray(borders[:, 1:] - borders[:, :-1] - 1)
