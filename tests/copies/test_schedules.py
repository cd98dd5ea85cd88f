"""Order and content of copies under random schedules, compared with plain byte arrays.

Whatever is posted in some order has the effects of that order, over all devices, whichever way each
copy goes and however long everything takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from caravan.stream.routes import Path
from caravan.transport import tcp
from caravan.transport.tcp import SocketTransport
from caravan.wire.dtypes import WireType
from caravan.worker import outlet, peering, peers, session
from copies.cluster import SIZE, Cluster, Kind, narrow, running
from wired import PATIENCE, Side

KINDS = {
    "within a worker": (Kind((True, True, False)),),
    "between workers": (Kind(), Kind(), Kind((False,))),
    "both": (Kind((True, True)), Kind((True, False)), Kind()),
    "all ways": (
        Kind((True, False)),
        Kind(),
        Kind(direct=False),
        Kind((True, True), extension=False),
    ),
}


@pytest.fixture(autouse=True)
def sessions_end_alone(monkeypatch) -> Iterator[None]:
    """A session's end must not be that of this process; and little fits into each way."""

    def connect(*arguments: Any) -> SocketTransport:
        transport = tcp.connect(*arguments)
        narrow(transport._sock)
        return transport

    monkeypatch.setattr(session, "leave", lambda code: None)
    monkeypatch.setattr(peers, "_BACKLOG", 30_000)
    # the order alone must see to it that nobody waits for ever
    monkeypatch.setattr(outlet, "PATIENCE", 3600.0)
    monkeypatch.setattr(peering, "connect", connect)
    yield


class Model:
    """The same devices as byte arrays."""

    def __init__(self, count: int) -> None:
        self.memories = [bytearray(SIZE) for _ in range(count)]

    def set(self, device: int, offset: int, data: bytes | bytearray) -> None:
        self.memories[device][offset : offset + len(data)] = data

    def get(self, device: int, offset: int, size: int) -> bytes:
        return bytes(self.memories[device][offset : offset + size])

    def copy(self, source: int, at: int, target: int, to: int, size: int, shortened: bool) -> None:
        data = bytearray(self.get(source, at, size))
        if shortened:
            # bf16 is the upper half of f32, and the fakes do not round
            data[0::4] = data[1::4] = bytes(size // 4)
        self.set(target, to, data)

    def compute(self, device: int) -> None:
        memory = self.memories[device]
        memory[:] = bytes((byte + 1) & 0xFF for byte in memory)


@st.composite
def spans(draw: st.DrawFn, size: int, region: tuple[int, int] = (0, SIZE)) -> int:
    """Where a run of `size` bytes may begin."""
    start, end = region
    return start + 4 * draw(st.integers(0, (end - start - size) // 4))


def steps(count: int, region: tuple[int, int] = (0, SIZE), computing: bool = True):
    """What may be posted to `count` devices, within a region of their memories."""
    devices = st.integers(0, count - 1)
    longest = region[1] - region[0]
    sizes = st.sampled_from([size for size in (4, 60, 4096, 20_000) if size <= longest])

    @st.composite
    def step(draw: st.DrawFn):
        size = draw(sizes)
        kinds = ["copy", "copy", "copy", "set", "input", "input", "fill", "get"]
        kinds += ["compute"] * computing
        kind = draw(st.sampled_from(kinds))
        device = draw(devices)
        if kind == "copy":
            return (
                kind,
                device,
                draw(spans(size, region)),
                draw(devices),
                draw(spans(size, region)),
                size,
                draw(st.sampled_from([WireType.F32, WireType.F32, WireType.BF16])),
            )
        if kind == "compute":
            return (kind, device, draw(st.integers(0, 3)))
        if kind == "input":
            # few places and few values, so that many are what is there already
            at = region[0] + 4096 * draw(st.integers(0, 1))
            return (kind, device, at, min(size, 4096), draw(st.sampled_from([0, 0, 1, 100])))
        return (kind, device, draw(spans(size, region)), size, draw(st.integers(0, 255)))

    return st.lists(step(), min_size=30, max_size=100)


def play(cluster: Cluster, model: Model, script: list[tuple]) -> list[tuple]:
    """Post everything without waiting for anything; the reads, with what they should give."""
    reads = []
    for kind, device, *rest in script:
        if kind == "copy":
            at, target, to, size, dtype = rest
            cluster.copy(device, at, target, to, size, dtype)
            shortened = bool(dtype) and cluster.casts(device, target)
            model.copy(device, at, target, to, size, shortened)
        elif kind == "compute":
            cluster.devices[device].compute(rest[0])
            model.compute(device)
        else:
            offset, size, value = rest
            if kind == "get":
                expected = model.get(device, offset, size)
                reads.append((cluster.devices[device].get(offset, size), expected))
            elif kind == "fill":
                cluster.devices[device].fill(offset, size, value)
                model.set(device, offset, bytes([value]) * size)
            elif kind == "input":
                data = bytearray(size)
                data[value % size] = value
                cluster.devices[device].set(offset, bytes(data), again=True)
                model.set(device, offset, data)
            else:
                data = bytes((value + n) & 0xFF for n in range(size))
                cluster.devices[device].set(offset, data)
                model.set(device, offset, data)
    return reads


def check(reads: list[tuple]) -> None:
    for number, (ticket, expected) in enumerate(reads):
        assert ticket.wait(PATIENCE) == expected, f"read {number}"


def check_memories(cluster: Cluster, model: Model) -> None:
    check([(d.get(0, SIZE), model.get(n, 0, SIZE)) for n, d in enumerate(cluster.devices)])


def count(name: str) -> int:
    return sum(len(kind.devices) for kind in KINDS[name])


def few(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        # a failure may depend on the moment, and one that hangs takes long: no smaller ones
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.mark.parametrize("name", KINDS)
@few(40)
@given(data=st.data())
def test_what_is_posted_has_the_effects_of_its_order(name, data):
    ready = data.draw(st.booleans(), "ways are open before the first copy")
    script = data.draw(steps(count(name)), "script")
    with running(KINDS[name], data.draw(st.integers(0, 1000), "seed")) as cluster:
        if ready:
            settle(cluster)
        model = Model(count(name))
        check(play(cluster, model, script))
        check_memories(cluster, model)


def settle(cluster: Cluster) -> list[Path]:
    """Open all ways; how they go."""
    n = len(cluster.devices)
    routes = [cluster.route(a, b) for a in range(n) for b in range(n) if a != b]
    for route in routes:
        route.open()
    return [route.settle() for route in routes]


@pytest.mark.parametrize("name", ["both", "all ways"])
@few(40)
@given(data=st.data())
def test_threads_that_copy_in_all_directions_at_once(name, data):
    """Each in a part of the memories of its own, so that what it sees is its own order."""
    n, third = count(name), SIZE // 3 // 4 * 4
    regions = [(k * third, (k + 1) * third) for k in range(3)]
    scripts = [data.draw(steps(n, region, computing=False), "script") for region in regions]
    with running(KINDS[name], data.draw(st.integers(0, 1000), "seed")) as cluster:
        start = threading.Barrier(len(scripts))

        def run(script: list[tuple]) -> Model:
            model = Model(n)
            start.wait(PATIENCE)
            check(play(cluster, model, script))
            return model

        sides = [Side(lambda s=script: run(s)) for script in scripts]
        models = [side.join() for side in sides]
        for (begin, end), model in zip(regions, models, strict=True):
            for number, device in enumerate(cluster.devices):
                expected = model.get(number, begin, end - begin)
                assert device.get(begin, end - begin).wait(PATIENCE) == expected


def test_the_ways_are_what_they_should_be():
    """So that the tests above test what they say."""
    expected = {"within a worker": {Path.DIRECT}, "between workers": {Path.DIRECT}}
    for name, kinds in KINDS.items():
        with running(kinds) as cluster:
            paths = settle(cluster)
            assert set(paths) == expected.get(name, set(paths)), name
            if name == "all ways":
                assert (paths.count(Path.DIRECT), paths.count(Path.RELAY)) == (6, 24)


def test_a_first_device_far_ahead_of_the_last():
    """Much more than all the bounds between them hold, and nobody waits for ever."""
    with running(KINDS["both"]) as cluster:
        settle(cluster)
        n = len(cluster.devices)
        model = Model(n)
        script: list[tuple] = [("set", d, 0, 20_000, d) for d in range(n)]
        for round_ in range(60):
            script += [("compute", d, 1) for d in range(n - 1, 0, -1)]
            script += [
                ("copy", d, 4 * round_, d + 1, 8, 20_000, WireType.F32) for d in range(n - 1)
            ]
        check(play(cluster, model, script))
        check_memories(cluster, model)
