"""A cluster, measured: its devices one after the other on each host, then the links.

What was measured of a device before is taken from the `store`; links are always measured, and
memory is asked for. Used by `caravan devices`, `caravan plan` and `--split auto`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from caravan.backend import RemoteDevice, routes_between
from caravan.errors import AllocationError
from caravan.llm.cores import physical_cores
from caravan.plan.layers import assemble, axes, measure_classes
from caravan.plan.links import measure_head_link, measure_link
from caravan.plan.probe import HERE, host_of, measure_device
from caravan.plan.profile import ClusterProfile, DeviceProfile, LinkProfile
from caravan.plan.store import Identity, Store
from caravan.plan.times import DeviceTimes
from caravan.stream.routes import Path
from caravan.transport.endpoint import Endpoint

if TYPE_CHECKING:
    from caravan.plan.work import ModelWork

_UNKNOWN = 1e-3
Say = Callable[[str], None]


def measure_cluster(
    devices: Sequence[RemoteDevice],
    *,
    fresh: bool = False,
    on_step: Say | None = None,
    links: bool = True,
    ordered: bool = False,
) -> ClusterProfile:
    """Speeds of devices that should have nothing else to do, and links that should be idle.

    Args:
        fresh: measure also what is known.
        on_step: told in a few words what is about to take long; on any thread.
        links: measure between devices, too; without, all copies count as relays.
        ordered: only from each device to the next. A way past others counts as slow as the slowest
            of theirs.

    Waits: a second for a device that is not known yet, a tenth for a link. A device that has no
    memory free has speeds of 0. Raises WorkerLost.
    """
    say = on_step or _silent
    by_host: dict[str, list[int]] = {}
    for number, device in enumerate(devices):
        by_host.setdefault(host_of(device), []).append(number)

    def profiles(numbers: list[int]) -> list[DeviceProfile]:
        return [_profile(devices[number], fresh, say) for number in numbers]

    # devices of one host would take each other's processor and memory
    if len(by_host) > 1:
        with ThreadPoolExecutor(len(by_host), "probe") as pool:
            done = list(pool.map(profiles, by_host.values()))
    else:
        done = [profiles(numbers) for numbers in by_host.values()]
    found = dict(zip(itertools.chain(*by_host.values()), itertools.chain(*done), strict=True))
    to_head = tuple(_head_link(device) for device in devices)
    between = {} if not links else _in_order(devices) if ordered else _between(devices)
    profiles_found = tuple(found[n] for n in range(len(devices)))
    # of other machines nobody knows
    return ClusterProfile(profiles_found, to_head, between, {HERE: float(physical_cores())})


def times_of(
    devices: Sequence[RemoteDevice],
    work: ModelWork,
    cluster: ClusterProfile,
    *,
    fresh: bool = False,
    on_step: Say | None = None,
) -> tuple[DeviceTimes, ...]:
    """How long each device takes for the layers of a model; measured where that is not known.

    Args:
        cluster: of these devices, in this order.
        fresh, on_step: as for `measure_cluster`.

    Waits, some seconds for a slow device. Raises WorkerLost.
    """
    say = on_step or _silent
    return tuple(
        _times(device, work, profile, fresh, say)
        for device, profile in zip(devices, cluster.devices, strict=True)
    )


def identity(device: RemoteDevice) -> Identity:
    """By which it is known again.

    Ports and sockets of this machine may be others each time, and which device of one kind it is
    makes no difference; but a llama.cpp server does not say of which kind its devices are.
    """
    told = device.link.extension
    here = told and Endpoint.parse(device.endpoint).is_here
    description = device.description if told else f"device {device.link.index}"
    return Identity(
        host_of(device) if here else device.endpoint,
        description,
        device.link.info.threads,
        device.engine,
        device.memory()[1],
    )


def _profile(device: RemoteDevice, fresh: bool, say: Say) -> DeviceProfile:
    free, total = device.memory()
    blank = DeviceProfile(
        device.name,
        0.0,
        0.0,
        memory_free=free,
        memory_total=total,
        host=host_of(device),
        threads=float(device.link.info.threads),
    )
    store = Store(identity(device))
    known = None if fresh else store.profile(blank)
    if known is not None:
        return known
    say(f"measuring {device.name}")
    try:
        found = measure_device(device)
    except AllocationError:
        return blank
    store.keep_profile(found)
    # what is free was asked when nothing was taken
    return replace(found, memory_free=free, memory_total=total)


def _head_link(device: RemoteDevice) -> LinkProfile:
    try:
        return measure_head_link(device)
    except AllocationError:
        return LinkProfile()


def _between(devices: Sequence[RemoteDevice]) -> dict[tuple[int, int], LinkProfile]:
    """By numbers; relays are left out. A way is measured once for all devices of two workers, and
    in one direction if it leads in both."""
    numbers = {device.name: number for number, device in enumerate(devices)}
    found: dict[tuple[int, int], LinkProfile] = {}
    known: dict[frozenset[str], LinkProfile] = {}
    relay = Path.RELAY.value
    for (one, other), route in routes_between(devices).items():
        if route.path is not Path.DIRECT:
            continue
        source, target = devices[numbers[one]], devices[numbers[other]]
        ends = frozenset((source.endpoint, target.endpoint))
        if ends not in known:
            known[ends] = _link(source, target)
        # the way may be lost by the time that it is measured
        if known[ends].way != relay:
            found[numbers[one], numbers[other]] = known[ends]
    return found


def _in_order(devices: Sequence[RemoteDevice]) -> dict[tuple[int, int], LinkProfile]:
    """By numbers, ascending."""
    found: dict[tuple[int, int], LinkProfile] = {}
    for i, (one, other) in enumerate(itertools.pairwise(devices)):
        link = _link(one, other)
        if link.way == Path.RELAY.value:
            continue
        found[i, i + 1] = link
        for first in range(i):
            before = found.get((first, i))
            if before is None:
                continue
            seconds, rate = max(before.seconds, link.seconds), min(before.rate, link.rate)
            found[first, i + 1] = LinkProfile(seconds, rate)
    return found


def _link(one: RemoteDevice, other: RemoteDevice) -> LinkProfile:
    try:
        return measure_link(one, other)
    except AllocationError:
        return LinkProfile()


def _times(
    device: RemoteDevice, work: ModelWork, profile: DeviceProfile, fresh: bool, say: Say
) -> DeviceTimes:
    if not profile.gflops or not profile.gbps:
        # nobody knows; nothing is put there
        return work.times(replace(profile, gflops=_UNKNOWN, gbps=_UNKNOWN))
    if device.simulated:
        # that is all that it does itself
        return work.times(profile)
    store = Store(identity(device))
    prompt, decode = (tuple(map(len, axes(points))) for points in (work.prompt, work.decode))
    shapes = (prompt, decode)
    kept = {} if fresh else store.classes(work.signatures, shapes)
    found = {
        number: kept[signature]
        for number, signature in enumerate(work.signatures)
        if signature in kept
    }
    missing = sorted(set(work.classes) - set(found))
    if missing:
        say(f"measuring the model's layers on {device.name}")
        try:
            new = measure_classes(device, work, profile, missing, say)
        except AllocationError as exc:
            # somebody else has all of it by now
            say(f"{device.name}: no memory to measure a layer in ({exc}); computed instead")
            new = {}
        store.keep_classes({work.signatures[number]: times for number, times in new.items()})
        found |= new
    return assemble(work, profile, found)


def _silent(text: str) -> None:
    pass
