"""`orders`: which devices to think of for a model, and in which order the layers go through them.

Of a few devices everything; of many the fastest ones, such that a slow link is crossed once at
most. Knows no splits; called by `planner`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from caravan.plan.estimate import Links
from caravan.plan.pipeline import Setting
from caravan.plan.times import F64

FEW = 4  # devices of which every subset is tried in every order
_MOST = 60
_SINGLES = 16
_SLOWER = 3.0  # a link that takes that many times as long as one before it leads to another site


def orders(setting: Setting, room: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Devices, in the order of the layers; the best to be expected come first.

    Of orders that differ in nothing but equal devices with equal links there is one.

    Args:
        room: bytes for layers on each device of the cluster; those without any are not used.
    """
    usable = [number for number, space in enumerate(room) if space > 0]
    kinds = Kinds(setting, room)
    if len(usable) <= FEW:
        found = kinds.distinct(_everything(usable))
    else:
        wide = _Wide(setting, room, usable)
        singles = itertools.islice(kinds.distinct(wide.singles()), _SINGLES)
        found = itertools.islice(itertools.chain(singles, kinds.distinct(wide.several())), _MOST)
    yield from found


def _everything(usable: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(usable) + 1):
        yield from itertools.permutations(usable, size)


class Kinds:
    """Which devices are alike.

    Args:
        room: bytes for layers on each device of the cluster.
    """

    def __init__(self, setting: Setting, room: Sequence[int]) -> None:
        self._cluster = setting.cluster
        self._kinds: list[int] = []
        known: dict[object, int] = {}
        for number, device in enumerate(setting.cluster.devices):
            times = setting.times[number]
            grids = [(g.tokens, g.kv, g.seconds.tobytes()) for g in (times.prompt, times.decode)]
            kind = (
                *grids,
                replace(device, name="", host="", memory_free=0, memory_total=0),
                setting.cluster.to_head[number],
                room[number],
                setting.cluster.processors.get(device.host),
            )
            self._kinds.append(known.setdefault(kind, len(known)))

    def distinct(self, found: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """Without those that are like one before; of equal devices the first ones, in order."""
        seen = set()
        for devices in found:
            looks = self.looks(devices)
            if looks not in seen:
                seen.add(looks)
                first = self._first(devices)
                yield first if self.looks(first) == looks else devices

    def _first(self, devices: tuple[int, ...]) -> tuple[int, ...]:
        """Devices of the same kinds, each time the first one that is left."""
        left = {kind: self._numbers(kind) for kind in {self._kinds[n] for n in devices}}
        return tuple(next(left[self._kinds[number]]) for number in devices)

    def _numbers(self, kind: int) -> Iterator[int]:
        return (number for number, own in enumerate(self._kinds) if own == kind)

    def looks(self, devices: tuple[int, ...]) -> tuple[object, ...]:
        """The same for orders that differ in nothing but equal devices with equal links."""
        hosts = [self._cluster.devices[number].host for number in devices]
        # a device may get no layers, and the one before it hands on to the one after it
        pairs: Iterable[tuple[int, int]]
        if len(devices) <= FEW:
            pairs = itertools.combinations(devices, 2)
        else:
            pairs = itertools.pairwise(devices)
        return (
            tuple(self._kinds[number] for number in devices),
            tuple(self._cluster.link(*pair) for pair in pairs),
            tuple(hosts.index(host) if host else -1 for host in hosts),
        )


class _Wide:
    """Orders of many devices.

    Args:
        usable: their numbers.
    """

    def __init__(self, setting: Setting, room: Sequence[int], usable: Sequence[int]) -> None:
        at = setting.n_ubatch, setting.n_ctx // 2
        self._room = room
        self._usable = usable
        self._prompt = [float(times.prompt.at(*at).sum()) for times in setting.times]
        self._decode = [float(times.decode.at(1, at[1]).sum()) for times in setting.times]
        sites = [self._ranked(groups) for groups in _groupings(usable, _costs(setting))]
        self._sites = sites[0] if sites else [sorted(usable, key=self._prompt.__getitem__)]
        # groups within groups, and the fastest first in each of them
        self._place = {number: (*_ranks(number, sites), self._prompt[number]) for number in usable}

    def _ranked(self, groups: list[list[int]]) -> list[list[int]]:
        """The fastest group, and the fastest device of each, first."""
        inside = [sorted(group, key=self._prompt.__getitem__) for group in groups]
        return sorted(inside, key=lambda group: -sum(1 / self._prompt[n] for n in group))

    def singles(self) -> Iterator[tuple[int, ...]]:
        """Each alone: the fastest, and those with the most room."""
        rankings = (
            sorted(self._usable, key=self._prompt.__getitem__),
            sorted(self._usable, key=self._decode.__getitem__),
            sorted(self._usable, key=lambda number: -self._room[number]),
        )
        for numbers in zip(*rankings, strict=True):
            yield from ((number,) for number in numbers)

    def several(self) -> Iterator[tuple[int, ...]]:
        """All, half of them, and so on, at one site or at more; then the numbers between."""
        for size in _sizes(len(self._usable)):
            for ranking in self._rankings():
                if size <= len(ranking):
                    yield from self._ordered(ranking[:size])

    def _rankings(self) -> Iterator[list[int]]:
        """Whom to take first: the fastest of all, of one site after the other, with most room."""
        yield sorted(self._usable, key=self._prompt.__getitem__)
        if len(self._sites) > 1:
            yield [number for site in self._sites for number in site]
            yield from self._sites[1:]
        yield sorted(self._usable, key=lambda number: -self._room[number])

    def _ordered(self, chosen: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Some devices in a few orders; those of a site, or of a host, stay together."""
        order = sorted(chosen, key=self._place.__getitem__)
        # whoever computes the output layer in decoding had better be fast at it
        yield tuple(reversed(order))
        if len(order) > 2:
            # the two fastest at the ends, unless another site is there
            site = self._place[order[-1]][:-1]
            own = [n for n in order[1:] if self._place[n][:-1] == site]
            last = min(own or order[1:], key=self._decode.__getitem__)
            yield (*(n for n in order if n != last), last)
        yield tuple(order)


def _ranks(number: int, sites: Sequence[Sequence[Sequence[int]]]) -> Iterator[int]:
    for groups in sites:
        yield next(rank for rank, group in enumerate(groups) if number in group)


def _groupings(numbers: Sequence[int], costs: F64) -> Iterator[list[list[int]]]:
    """Devices with fast links between them, by ever faster ones; nothing where all are alike."""
    joins = list(_joins(numbers, costs))
    gaps = [b for (a, *_), (b, *_) in itertools.pairwise(joins) if b > _SLOWER * a]
    for gap in reversed(gaps):
        part = {number: {number} for number in numbers}
        for cost, one, other in joins:
            if cost < gap:
                part[one] |= part[other]
                for number in part[other]:
                    part[number] = part[one]
        yield [sorted(group) for group in {id(group): group for group in part.values()}.values()]


def _joins(numbers: Sequence[int], costs: F64) -> list[tuple[float, int, int]]:
    """The fastest links that reach all devices, fastest first."""
    slower = np.maximum(costs, costs.T)
    outside, joins = set(numbers[1:]), []
    nearest = {number: (float(slower[numbers[0], number]), numbers[0]) for number in outside}
    while outside:
        found = min(outside, key=lambda number: nearest[number])
        outside.remove(found)
        joins.append((*nearest[found], found))
        for number in outside:
            nearest[number] = min(nearest[number], (float(slower[found, number]), found))
    return sorted(joins)


def _costs(setting: Setting) -> F64:
    """(devices + 1, devices + 1) seconds for a micro-batch from one device to another."""
    links = Links(setting)
    return np.asarray(
        links.seconds + setting.n_ubatch * setting.traffic.activation * links.per_byte
    )


def _sizes(n: int) -> list[int]:
    """From n down to 2: first its halves, then what is between two of them, then the others."""
    found = []
    for size in (n, 3 * n // 4):
        while size >= 2:
            found.append(size)
            size //= 2
    return [*dict.fromkeys([*found, *range(n - 1, 1, -1)])]
