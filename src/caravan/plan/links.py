"""What the links to a device, and between two devices, can do: measured, nothing is kept.

Latency by the quickest way there is to ask something, throughput by writes or copies that grow
until they take long enough to be told from their latency.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from caravan.backend import RemoteDevice
from caravan.plan.profile import LinkProfile
from caravan.plan.scratch import Scratch, Span
from caravan.stream.routes import Path

_SMALL = 4 << 10
_FIRST = 256 << 10
_BIGGEST = 16 << 20
_LONG = 0.01
_ROUNDS = 5
_HOPS = (8, 64)
_SLOW = 0.5e-3  # seconds of a hop: of such ones a few are enough


def measure_head_link(device: RemoteDevice) -> LinkProfile:
    """From the head to the device, while both are idle; waits.

    Raises WorkerLost, AllocationError.
    """
    with Scratch(device) as scratch:
        # what does not change may be squeezed on the way
        data = memoryview(np.random.default_rng(1).bytes(_BIGGEST))
        size, limit = _FIRST, _limit(device)
        memory = scratch.take(limit)
        # it is cleared first
        scratch.fence()

        def write(count: int) -> None:
            device.link.set_tensor(Span(memory, 0, count), 0, data[:count])
            scratch.fence()

        rate = _rate(write, size, limit, scratch.round_trip)
        return LinkProfile(scratch.round_trip / 2, rate)


def measure_link(source: RemoteDevice, target: RemoteDevice) -> LinkProfile:
    """From one device to another, as their copies go; waits.

    Its latency is that of a copy to and fro many times, which the links to the head have no part
    in. A relay is not measured: what it takes follows from those. Raises WorkerLost,
    AllocationError.
    """
    route = source.route_to(target)
    if route.settle() is not Path.DIRECT:
        return LinkProfile(way=Path.RELAY.value)
    with Scratch(source) as near, Scratch(target) as far:
        limit = min(_limit(source), _limit(target))
        there, here = far.take(limit), near.take(limit)
        near.fence()
        far.fence()

        def copy(count: int) -> None:
            route.copy(Span(here, 0, count), Span(there, 0, count), count)
            far.fence()

        copy(_SMALL)
        small = min(_timed(copy, _SMALL) for _ in range(_ROUNDS))
        rate = _rate(copy, _FIRST, limit, small)
        # on the way of one copy there are the head's word to the source, and the target's to it
        seconds = max(small - (near.round_trip + far.round_trip) / 2, 0.0)
        back = target.route_to(source)
        if back.settle() is Path.DIRECT:

            def to_and_fro(hops: int) -> None:
                for _ in range(hops // 2):
                    route.copy(Span(here, 0, _SMALL), Span(there, 0, _SMALL), _SMALL)
                    back.copy(Span(there, 0, _SMALL), Span(here, 0, _SMALL), _SMALL)
                copy(_SMALL)

            for hops in _HOPS:
                long = min(_timed(to_and_fro, hops) for _ in range(_ROUNDS))
                seconds = max(long - small, 0.0) / hops
                if seconds > _SLOW:
                    break
    return LinkProfile(seconds, rate, "within" if route.round_trip is None else "direct")


def _limit(device: RemoteDevice) -> int:
    """Bytes to move at most: little where there is little memory."""
    free, _ = device.memory()
    return max(min(_BIGGEST, free // 8), _FIRST) & ~3


def _rate(move: Callable[[int], None], size: int, limit: int, latency: float) -> float:
    """Bytes a second, from a move that takes long enough; of a few if they are quick."""
    while True:
        seconds = _timed(move, size) - latency
        if seconds >= _LONG or size == limit:
            break
        size = min(size * 4, limit)
    if seconds < 5 * _LONG:
        more = [_timed(move, size) - latency for _ in range(2)]
        seconds = statistics.median([seconds, *more])
    return size / max(seconds, 1e-6)


def _timed(move: Callable[[int], None], size: int) -> float:
    start = time.perf_counter()
    move(size)
    return time.perf_counter() - start
