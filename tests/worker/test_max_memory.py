"""`--max-memory`: what is announced, what is refused, and how sessions share it."""

from __future__ import annotations

import os
import signal

import pytest

from caravan.errors import AllocationError, WorkerStartError
from caravan.wire.commands import EXT, Base, Ext
from caravan.worker.limited import LimitedDevice, limited
from caravan.worker.local import Worker
from caravan.worker.tally import Row, Tally
from e2e.processes import children
from wired import wait_until
from worker.fakes import FakeDevice
from worker.raw_client import BaseClient, ExtClient

MIB = 1 << 20


def limited_worker(limits: str, devices: str = "CPU:1") -> Worker:
    return Worker(devices, options=("--max-memory", limits))


def memory(client: ExtClient) -> tuple[int, ...]:
    return client.call(Ext.MEMORY)


def refused(client: ExtClient, size: int) -> str:
    answer = client.call_raw(Ext.ALLOC, EXT[Ext.ALLOC].request.pack(size))
    assert answer.status
    return answer.body.decode(errors="replace")


@pytest.fixture
def tally():
    made = Tally()
    yield made
    made.close()


# the tally


def test_rows_add_up_and_stop_at_the_limit(tally):
    one, other = (Row(tally.fd, tally.take()) for _ in range(2))
    assert one.take(0, 60, 100)
    assert not other.take(0, 41, 100)
    assert other.take(0, 40, 100)
    assert other.take(1, 100, 100)
    assert one.held(0) == other.held(0) == 100
    one.give_back(0, 60)
    assert other.held(0) == 40


def test_a_cleared_row_counts_no_more_and_is_given_again(tally):
    first, second = tally.take(), tally.take()
    assert Row(tally.fd, first).take(0, 60, 100)
    tally.clear(first)
    assert Row(tally.fd, second).held(0) == 0
    assert tally.take() not in (first, second)
    tally.give_back(first)
    assert tally.take() == first


def test_processes_that_take_at_once_never_pass_the_limit(tally):
    rows = [tally.take() for _ in range(4)]
    kids = []
    for number in rows:
        kid = os.fork()
        if not kid:
            row = Row(tally.fd, number)
            for _ in range(200):
                row.take(0, 1, 500)
            os._exit(0)
        kids.append(kid)
    for kid in kids:
        os.waitpid(kid, 0)
    assert Row(tally.fd, rows[0]).held(0) == 500


# the device


def test_a_refusal_by_the_device_itself_counts_nothing(tally):
    class Full(FakeDevice):
        def allocate(self, size):
            raise AllocationError("full")

    row = Row(tally.fd, tally.take())
    device = LimitedDevice(Full(), 100, row)
    with pytest.raises(AllocationError, match="full"):
        device.allocate(10)
    assert row.held(0) == 0


def test_what_is_in_use_is_told_if_anything_is(tally):
    row = Row(tally.fd, tally.take())
    device = LimitedDevice(FakeDevice(), 64 * MIB, row)
    with pytest.raises(AllocationError, match=r"a --max-memory of 64\.0 MiB$"):
        device.allocate(65 * MIB)
    row.take(0, MIB, 64 * MIB)
    with pytest.raises(AllocationError, match=r"64\.0 MiB, of which 1\.0 MiB are in use$"):
        device.allocate(64 * MIB)


def test_as_many_limits_as_devices(tally):
    row = Row(tally.fd, tally.take())
    assert len(limited([FakeDevice(), FakeDevice()], [100], row)) == 2
    with pytest.raises(WorkerStartError, match="2 limits of memory for 1 device: "):
        limited([FakeDevice()], [1, 2], row)
    with pytest.raises(WorkerStartError, match="3 limits of memory for 2 devices: "):
        limited([FakeDevice(), FakeDevice()], [1, 2, 3], row)


# the worker


def test_the_limit_is_announced_in_both_protocols():
    with limited_worker("64MiB") as worker:
        with ExtClient(worker.endpoint) as client:
            assert memory(client) == (64 * MIB, 64 * MIB)
            device = client.session.devices[0]
            assert (device.memory_free, device.memory_total) == (64 * MIB, 64 * MIB)
        with BaseClient(worker.endpoint) as client:
            assert client.call(Base.GET_DEVICE_MEMORY, 0) == (64 * MIB, 64 * MIB)


def test_what_passes_the_limit_is_refused_in_both_protocols():
    with limited_worker("64MiB") as worker:
        with ExtClient(worker.endpoint) as client:
            handle, _ = client.alloc(48 * MIB)
            assert memory(client) == (16 * MIB, 64 * MIB)
            assert "--max-memory of 64.0 MiB, of which 48.0 MiB" in refused(client, 17 * MIB)
            client.post(Ext.FREE, handle)
            assert memory(client) == (64 * MIB, 64 * MIB)
            client.alloc(64 * MIB)
        with BaseClient(worker.endpoint) as client:
            wait_until(lambda: client.call(Base.GET_DEVICE_MEMORY, 0)[0] == 64 * MIB)
            assert client.call(Base.ALLOC_BUFFER, 0, 65 * MIB)[0] == 0
            assert client.call(Base.ALLOC_BUFFER, 0, 64 * MIB)[0]


def test_a_refusal_that_has_no_words_is_told_by_the_worker(capfd):
    options = ("--max-memory", "64MiB")
    with (
        Worker("CPU:1", options=options, verbose=True) as worker,
        BaseClient(worker.endpoint) as client,
    ):
        assert client.call(Base.ALLOC_BUFFER, 0, 65 * MIB)[0] == 0
        assert client.call(Base.ALLOC_BUFFER, 0, 64 * MIB)[0]
        assert client.call(Base.ALLOC_BUFFER, 0, 1 << 60)[0] == 0
    lines = [line for line in capfd.readouterr().err.splitlines() if "refused" in line]
    assert len(lines) == 2
    assert lines[0].startswith(
        "caravan worker: refused a buffer: CPU: no room for a buffer of 65.0"
    )
    assert lines[0].endswith("a --max-memory of 64.0 MiB")
    assert "is too big" in lines[1]


def test_sessions_share_the_limit_and_a_killed_one_gives_its_part_back():
    with limited_worker("64MiB") as worker:
        before = children(worker.pid)
        with ExtClient(worker.endpoint) as first:
            first.alloc(48 * MIB)
            (session,) = set(children(worker.pid)) & set(before)
            with ExtClient(worker.endpoint) as second:
                assert memory(second) == (16 * MIB, 64 * MIB)
                assert refused(second, 32 * MIB)
                os.kill(session, signal.SIGKILL)
                wait_until(lambda: memory(second) == (64 * MIB, 64 * MIB))
                second.alloc(64 * MIB)
            first.assert_closed()


def test_every_device_has_a_limit_of_its_own():
    two = limited_worker("32MiB,64MiB", "CPU:1,sim:GFLOPS=100,GBPS=50,GIB=1")
    with two as worker, BaseClient(worker.endpoint) as client:
        totals = [client.call(Base.GET_DEVICE_MEMORY, number)[1] for number in range(2)]
        assert totals == [32 * MIB, 64 * MIB]
        assert client.call(Base.ALLOC_BUFFER, 0, 48 * MIB)[0] == 0
        assert client.call(Base.ALLOC_BUFFER, 1, 48 * MIB)[0]
        assert client.call(Base.GET_DEVICE_MEMORY, 1) == (16 * MIB, 64 * MIB)


def test_a_limit_above_what_there_is_changes_nothing():
    generous = limited_worker("4GiB", "sim:GFLOPS=100,GBPS=50,GIB=1")
    with generous as worker, ExtClient(worker.endpoint) as client:
        assert memory(client) == (1 << 30, 1 << 30)


def test_wrong_limits_end_the_start_in_one_line():
    for limits, words in (("1GiB,2GiB", "2 limits of memory for 1 device:"), ("8 apples", "size")):
        with pytest.raises(WorkerStartError, match=words):
            limited_worker(limits)


def test_what_others_hold_of_a_machine_is_not_free(worker):
    with ExtClient(worker.endpoint) as client:
        free, total = memory(client)
        assert 0 < free < total
