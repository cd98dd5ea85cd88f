"""A device's times for the layers of a model: its own graph's nodes, run over weights of zeros.

One layer of each class is measured, several times with other weights at once where those of one
would stay in a cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from caravan.backend import RemoteDevice
from caravan.engine.layouts import TYPE_NUMBERS
from caravan.errors import AllocationError
from caravan.plan.excerpt import Excerpt, Parts, excerpt
from caravan.plan.profile import DeviceProfile
from caravan.plan.samples import addition, ramp
from caravan.plan.scratch import Scratch, Span
from caravan.plan.times import F64, DeviceTimes, Grid
from caravan.stream.link import RemoteAllocation

if TYPE_CHECKING:
    from caravan.plan.work import ModelWork, Point


_MIB = 1 << 20
_MASK_TYPES = (TYPE_NUMBERS["f32"], TYPE_NUMBERS["f16"])
_FEW_TOKENS = 8
_UNCACHED = 64 * _MIB
_AT_ONCE = 0.05  # seconds that a layer may take all in all, if it is computed several times
_POINT = 0.02  # seconds for a point, if a layer does not take longer
_SLOW_POINT = 1.5  # seconds that one may take at most
_ALL_POINTS = 15.0  # seconds after which the rest is computed
# where tensors are padded: less than a row of 512; at the end, what kernels keep behind a result
_GAP, _END = 4096, 64 * _MIB


@dataclass(frozen=True, slots=True)
class ClassTimes:
    """Seconds of a layer of one class.

    Attributes:
        prompt, decode: (tokens, kv) at the model's points.
        measured: whether all of it was measured; else some of it is computed.
    """

    prompt: F64
    decode: F64
    measured: bool = True


def assemble(
    work: ModelWork, profile: DeviceProfile, found: Mapping[int, ClassTimes]
) -> DeviceTimes:
    """The times of all layers at the model's points from those of the classes, by number; of
    classes that are not there from the device's speeds."""
    times = work.times(profile)
    return DeviceTimes(
        _grid(times.prompt, work.prompt, work.classes, {n: t.prompt for n, t in found.items()}),
        _grid(times.decode, work.decode, work.classes, {n: t.decode for n, t in found.items()}),
    )


def _grid(
    computed: Grid, points: Sequence[Point], classes: Sequence[int], found: Mapping[int, F64]
) -> Grid:
    tokens, kv = axes(points)
    seconds = np.array([[computed.at(n_tokens, n_kv) for n_kv in kv] for n_tokens in tokens])
    for layer, number in enumerate(classes):
        if number in found:
            seconds[:, :, layer] = found[number]
    return Grid(tokens, kv, seconds)


def axes(points: Sequence[Point]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and KV entries of a full grid of points, ascending."""
    tokens = tuple(sorted({point.n_tokens for point in points}))
    return tokens, tuple(sorted({point.n_kv for point in points}))


def measure_classes(
    device: RemoteDevice,
    work: ModelWork,
    profile: DeviceProfile,
    classes: Collection[int],
    say: Callable[[str], None] | None = None,
) -> dict[int, ClassTimes]:
    """The model's own layers on the device, one of each of some classes.

    Where it has not the memory for them, or would take too long, the time is that which follows
    from its speeds, in the proportion that was found at the points that could be measured; `say`
    is told. Waits, and raises WorkerLost, which it also does where the device cannot compute the
    model, and KeyboardInterrupt after Ctrl-C where that is held back.
    """
    tell = say or (lambda text: None)
    found: dict[int, ClassTimes] = {}
    times = work.times(profile)
    end = time.perf_counter() + _ALL_POINTS
    with Scratch(device) as scratch:
        small = addition(32)
        memory = scratch.take(small.size)
        own = scratch.computing(scratch.graph(small.at(memory.base), 1, memory), _POINT)
        for number in classes:
            layer = _Layer(scratch, work, times, work.classes.index(number), own, end)
            try:
                found[number] = layer.measure()
            except AllocationError as exc:
                tell(f"{device.name}: no memory to measure a layer in ({exc}); computed instead")
    if any(not times.measured for times in found.values()):
        tell(f"{device.name} is slow: some of its times are computed")
    lacking = [number for number in classes if number not in found]
    return found | {number: _scaled(work, times, number, found) for number in lacking}


def _scaled(
    work: ModelWork, times: DeviceTimes, number: int, found: Mapping[int, ClassTimes]
) -> ClassTimes:
    """What is computed of a class, in the proportion in which the others were measured."""

    def one(grid: Grid, points: Sequence[Point], known: Mapping[int, F64]) -> F64:
        tokens, kv = axes(points)
        every = np.array([[grid.at(n_tokens, n_kv) for n_kv in kv] for n_tokens in tokens])
        computed = sum(float(every[:, :, work.classes.index(n)].sum()) for n in known)
        ratio = sum(float(times.sum()) for times in known.values()) / computed if computed else 1.0
        return np.asarray(every[:, :, work.classes.index(number)] * ratio)

    prompt = one(times.prompt, work.prompt, {n: t.prompt for n, t in found.items()})
    decode = one(times.decode, work.decode, {n: t.decode for n, t in found.items()})
    return ClassTimes(prompt, decode, measured=False)


class _Table(NamedTuple):
    """A layer at one point.

    Attributes:
        kind: `prompt` or `decode`.
        at: the point's place in the grid.
        repeats: how often it is computed in one graph, each time with other weights.
        estimate: seconds of one, from the device's speeds.
    """

    kind: str
    at: tuple[int, int]
    repeats: int
    estimate: float
    cut: Excerpt

    @property
    def sizes(self) -> Parts:
        """Bytes of each part."""
        ints, reads, writes, masks = self.cut.sizes
        return ints, reads * self.repeats, writes * self.repeats, masks


class _Layer:
    """A layer, which stands for its class, on one device.

    Args:
        layer: its number.
        own: seconds that each graph costs.
        end: when to stop measuring, by time.perf_counter.
    """

    def __init__(
        self,
        scratch: Scratch,
        work: ModelWork,
        times: DeviceTimes,
        layer: int,
        own: float,
        end: float,
    ) -> None:
        self._scratch = scratch
        self._work = work
        self._times = times
        self._layer = layer
        first = work.prompt[0]
        # what would fit into a cache as a whole may do so; that of the output layer is passed once
        layers = work.layer_work(first.n_tokens, first.n_kv)[:-1]
        self._uncached = min(_UNCACHED, sum(one.weights for one in layers))
        self._own = own
        self._end = end
        info = scratch.device.link.info
        self._gap, self._behind = (_GAP, _END) if info.pads else (0, 0)
        self._room = min(int(scratch.device.memory()[0] * 0.9), info.max_size) - self._behind

    def measure(self) -> ClassTimes:
        """At all points, the cheapest first. Raises AllocationError."""
        tables = self._tables(_UNCACHED)
        if _space(tables) > self._room:
            tables = self._tables(0)
        if _space(tables) > self._room:
            raise AllocationError(f"it takes {_space(tables) // _MIB} MiB")
        memory = self._scratch.take(_space(tables) + self._behind)
        ints, reads, writes, _ = _most(tables)
        base = memory.base
        bases = (base, base + ints, base + ints + reads, base + ints + reads + writes)
        seconds = {
            "prompt": np.zeros(tuple(map(len, axes(self._work.prompt)))),
            "decode": np.zeros(tuple(map(len, axes(self._work.decode)))),
        }
        # of what is measured to what is computed, as it was found last
        ratios, whole = {"prompt": 1.0, "decode": 1.0}, True
        try:
            for table in sorted(tables, key=lambda table: table.estimate * table.repeats):
                ratio = ratios[table.kind]
                expected = table.estimate * table.repeats * ratio
                late = time.perf_counter() > self._end
                if not table.cut.n_nodes:
                    found = 0.0
                elif late or expected > _SLOW_POINT:
                    found, whole = table.estimate * ratio, False
                else:
                    rows, n_nodes = table.cut.at(bases, table.repeats)
                    if table.kind == "prompt":
                        self._mask(table.cut, bases, memory)
                    graph = self._scratch.graph(rows, n_nodes, memory)
                    spent = self._scratch.computing(graph, _POINT) - self._own
                    found = max(spent, 0.0) / table.repeats
                    if table.estimate > 0:
                        ratios[table.kind] = found / table.estimate
                seconds[table.kind][table.at] = found
        finally:
            self._scratch.give_back(memory)
        return ClassTimes(seconds["prompt"], seconds["decode"], whole)

    def _mask(self, cut: Excerpt, bases: Parts, memory: RemoteAllocation) -> None:
        """Hide from each token what comes after it: some devices pass over that."""
        rows, _ = cut.at(bases)
        for number in cut.masks:
            mask = rows[number : number + 1]
            # of several sequences, or in another type: nobody has such prompts
            if mask["ne"][0, 2:].max() > 1 or mask["type"][0] not in _MASK_TYPES:
                continue
            made, values = ramp(mask)
            place = Span(memory, int(made["data"][1]) - memory.base, len(values))
            self._scratch.device.link.set_tensor(place, 0, values)
            self._scratch.device.link.graph_compute(self._scratch.graph(made, 1, memory))

    def _tables(self, uncached: int) -> list[_Table]:
        """One for each point; those of few tokens take so many bytes of memory."""
        kinds = (
            ("prompt", self._times.prompt, self._work.prompt),
            ("decode", self._times.decode, self._work.decode),
        )
        tables = []
        for kind, grid, points in kinds:
            tokens, kv = axes(points)
            for point in points:
                at = (tokens.index(point.n_tokens), kv.index(point.n_kv))
                estimate = float(grid.at(point.n_tokens, point.n_kv)[self._layer])
                chosen = point.layers == self._layer
                cut = excerpt(point.graph.rows, point.graph.n_nodes, chosen, self._gap)
                count = 1
                if point.n_tokens <= _FEW_TOKENS:
                    count = _count(cut, estimate, min(uncached, self._uncached))
                tables.append(_Table(kind, at, count, estimate, cut))
        return tables


def _count(cut: Excerpt, estimate: float, uncached: int) -> int:
    """How often to compute it at once, so that it does not find its memory in a cache."""
    wanted = -(-uncached // max(sum(cut.sizes), 1))
    return max(1, min(wanted, int(_AT_ONCE / max(estimate, 1e-9))))


def _most(tables: Sequence[_Table]) -> Parts:
    """Bytes of each part that are enough for all."""
    a, b, c, d = (max(table.sizes[part] for table in tables) for part in range(4))
    return a, b, c, d


def _space(tables: Sequence[_Table]) -> int:
    """Bytes that are enough for any one of them."""
    return sum(_most(tables))
