"""A device that only costs time: its clock, its memory, and its place in a session."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from caravan.errors import AllocationError
from caravan.wire.commands import Ext
from caravan.wire.extension import Status, decode_session_reply
from caravan.worker.ext_channel import ExtChannel
from caravan.worker.local import Worker
from caravan.worker.sim import Pace, SimDevice
from caravan.worker.speed import Speed
from worker.fakes import FakeDevice
from worker.raw_client import BaseClient, ExtClient, linear_records, linear_rows
from worker.test_channels import serving

MS = 1_000_000


class Clock:
    """A clock that stands still but for sleeps, all of which last too long by `late`, and for
    `tick` at every look."""

    def __init__(self, late: int = 0, tick: int = 0) -> None:
        self.time = 123_456_789_000
        self.late = late
        self.tick = tick
        self.slept: list[int] = []

    def now(self) -> int:
        self.time += self.tick
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds * 1e9))
        self.time += self.slept[-1] + self.late


def paced(clock: Clock) -> Pace:
    return Pace(clock.now, clock.sleep)


def test_a_wait_ends_at_its_deadline():
    clock = Clock(tick=1000)
    start = clock.time
    paced(clock).spend(5 * MS)
    assert 0 <= clock.time - start - 5 * MS <= 2000


def test_the_clock_is_only_watched_in_the_last_moments():
    clock = Clock(tick=100)
    paced(clock).spend(5 * MS)
    assert len(clock.slept) == 1
    assert 5 * MS - clock.slept[0] <= 100_000


def test_a_short_sleep_is_slept_again():
    clock = Clock(tick=10)
    start = clock.time
    Pace(clock.now, lambda seconds: clock.sleep(seconds / 2)).spend(8 * MS)
    assert len(clock.slept) > 1
    assert 0 <= clock.time - start - 8 * MS <= 100


def test_what_is_overslept_does_not_add_up_over_graphs_that_queue():
    clock = Clock(late=200_000)
    pace, start = paced(clock), clock.time
    for done in range(1, 101):
        pace.spend(5 * MS)
        assert 0 <= clock.time - start - done * 5 * MS <= 200_000


def test_a_graph_that_comes_later_gets_its_full_time():
    clock = Clock(late=200_000)
    pace = paced(clock)
    pace.spend(5 * MS)
    clock.time += 50 * MS
    start = clock.time
    pace.spend(5 * MS)
    assert clock.time - start >= 5 * MS


def test_no_time_is_no_wait():
    clock = Clock()
    paced(clock).spend(0)
    assert not clock.slept


# the device


def device(speed: Speed | None = None, clock: Clock | None = None) -> SimDevice:
    clock = clock or Clock(tick=100)
    return SimDevice(speed or Speed(1, 1), FakeDevice(), paced(clock))


def test_it_says_what_it_is():
    info = device(Speed(2000, 400, gib=24, us=20)).info()
    assert (info.name, info.type, info.threads) == ("sim", 0, 0)
    assert info.description == "simulated, 2000 GFLOPS, 400 GB/s, 20 us a graph"
    assert info.memory_total == info.memory_free == info.max_size == 24 << 30


def test_its_memory_has_a_limit_and_no_bytes():
    sim = device(Speed(1, 1, gib=1))
    big = sim.allocate(768 << 20)
    assert sim.memory() == (256 << 20, 1 << 30)
    with pytest.raises(AllocationError, match="no room for a buffer of 268435457 bytes"):
        sim.allocate((256 << 20) + 1)
    rest = sim.allocate(256 << 20)
    big.write(5, b"abc")
    big.fill(0, 100, 1)
    big.clear(7)
    rest.copy(0, big, 5, 3)
    assert bytes(big.read(4, 5)) == bytes(5) == bytes(rest.read(0, 5))
    big.free()
    assert sim.memory() == (768 << 20, 1 << 30)


def test_a_connection_computes_in_simulated_time():
    clock = Clock(tick=10)
    sim = device(Speed(0.001, 1), clock)
    with serving(ExtChannel, [sim]) as (peer, _):
        rows, at = linear_rows(peer.alloc(1 << 16))
        body = rows.tobytes()
        start = clock.time
        peer.ext(Ext.GRAPH_COMPUTE, 7, 2, len(rows), tail=body)
        for _ in range(9):
            peer.ext(Ext.GRAPH_RECOMPUTE, 7)
        peer.ext(Ext.GET, int(rows["data"][1]), 48)
        _, status, _, data = peer.answer()
        assert (status, data) == (Status.OK, bytes(48))
        # 192 + 12 operations, ten times
        assert 0 <= clock.time - start - 10 * 204_000 < 10_000
    assert at["y"] == 16384


def test_graphs_that_arrive_during_a_wait_are_computed_after_it():
    clock = Clock(tick=10)
    asleep, wake = threading.Event(), threading.Event()

    def sleep(seconds: float) -> None:
        asleep.set()
        assert wake.wait(10)
        clock.sleep(seconds)

    sim = SimDevice(Speed(0.0001, 1), FakeDevice(), Pace(clock.now, sleep))
    with serving(ExtChannel, [sim]) as (peer, lanes):
        rows, _ = linear_rows(peer.alloc(1 << 16))
        peer.ext(Ext.GRAPH_COMPUTE, 7, 2, len(rows), tail=rows.tobytes())
        assert asleep.wait(10)
        start = clock.time
        for _ in range(3):
            peer.ext(Ext.GRAPH_RECOMPUTE, 7)
        # answered out of order: so all of these have been read
        peer.ext(Ext.PING)
        assert peer.answer()[0] == Ext.PING
        assert lanes[0].executor.pending == 4
        wake.set()
        peer.ext(Ext.FENCE)
        assert peer.answer()[0] == Ext.FENCE
        assert 0 <= clock.time - start - 4 * 2_040_000 < 10_000


def test_an_allocation_beyond_its_memory_is_answered_as_a_refusal():
    with serving(ExtChannel, [device(Speed(1, 1, gib=1 / 1024))]) as (peer, _):
        for size, status in ((1 << 19, 0), (1 << 20, 3), (1 << 21, 3), (1 << 19, 0)):
            peer.ext(Ext.ALLOC, size)
            assert peer.answer()[1] == status


# in a real worker


SIMS = "CPU:1,sim:GFLOPS=1000,GBPS=1000,GIB=0.5,sim:GFLOPS=1e-9,GBPS=1e6"


@pytest.fixture(scope="module")
def simulating():
    with Worker(SIMS) as worker:
        yield worker


def test_a_worker_lends_them_beside_real_ones(simulating):
    with ExtClient(simulating.endpoint) as client:
        session = decode_session_reply(client.answer.body)
    assert [device.name for device in session.devices] == ["CPU", "sim", "sim"]
    assert [device.type for device in session.devices] == [0, 0, 0]
    assert session.devices[1].memory_total == 1 << 29
    assert session.devices[2].description == "simulated, 1e-09 GFLOPS, 1e+06 GB/s"


def test_its_graphs_are_checked_as_any_devices(simulating):
    with ExtClient(simulating.endpoint, device=1) as client:
        _, base = client.alloc(1 << 16)
        rows, at = linear_rows(base)
        client.set(base + at["x"], b"\x01" * 96)
        client.graph(rows, 2, uid=5)
        assert client.get(base + at["y"], 48) == bytes(48)
        client.post(Ext.GRAPH_RECOMPUTE, 5)
        client.fence()
        wrong = rows.copy()
        wrong["data"][1] = base + (1 << 16)
        client.graph(wrong, 2)
        assert client.answer_of().status == Status.REFUSED
        assert client.call_raw(Ext.ALLOC, (1 << 29).to_bytes(8, "little")).status == 3


def test_the_real_neighbour_computes_while_it_waits(simulating):
    """204 operations at one a second: long after the CPU's answer."""
    with (
        ExtClient(simulating.endpoint, device=2) as slow,
        ExtClient(simulating.endpoint, device=0, session=slow.key) as cpu,
    ):
        rows, _ = linear_rows(slow.alloc(1 << 16)[1])
        slow.graph(rows, 2)
        slow.post(Ext.FENCE)
        _, base = cpu.alloc(1 << 16)
        rows, at = linear_rows(base)
        cpu.set(base + at["b"], b"\0\0\x80?" * 4)
        cpu.graph(rows, 2)
        assert cpu.get(base + at["y"], 4) == b"\0\0\x80?"
        slow.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            slow.sock.recv(1)


def test_llama_cpps_own_protocol_works_on_it(simulating):
    with BaseClient(simulating.endpoint) as client:
        handle, base = client.alloc(1 << 16, device=1)
        nodes, parts = linear_records(handle, base)
        client.set(parts["x"], b"\x01" * 96)
        client.graph(nodes, list(parts.values()), device=1, uid=3)
        client.recompute(device=1, uid=3)
        assert client.get(parts["y"], 48) == bytes(48)


def test_the_start_up_lines_say_how_fast_it_is():
    command = [sys.executable, "-m", "caravan", "worker", "--no-cache", "-p", "0", "-d"]
    process = subprocess.Popen(
        [*command, "sim:GFLOPS=100,GBPS=50,GIB=2"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith("worker ready"):
                break
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()
    assert "sim: simulated, 100 GFLOPS, 50 GB/s (2048 MiB, 2048 MiB free)" in lines
