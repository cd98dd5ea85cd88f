"""SIGTERM lets sessions go on for a while; SIGINT, and being told twice, do not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator

import pytest

from caravan.wire import extension
from caravan.wire.commands import Base, Ext
from caravan.wire.extension import PeerTarget, Status
from caravan.worker.local import Worker
from caravan.worker.shutdown import Shutdown
from e2e.processes import children
from leaks import running
from wired import wait_until
from worker.raw_client import BaseClient, Closed, ExtClient
from worker.test_worker_life import COMMAND, busy_graph


class Started:
    """A worker as a service manager would run it."""

    def __init__(self, *options: str, devices: str = "CPU:1,CPU:1") -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "-p", "0", "-d", devices, "--no-cache", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.endpoint, self.errors = "", []
        while not self.endpoint:
            line = self.process.stdout.readline()
            assert line, "it did not start"
            if line.startswith("worker ready on "):
                self.endpoint = line.split()[3]
        self._readers = [
            threading.Thread(target=self.process.stdout.read),
            threading.Thread(target=lambda: self.errors.extend(self.process.stderr)),
        ]
        for reader in self._readers:
            reader.start()

    def told(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def says(self, text: str) -> None:
        wait_until(lambda: any(text in line for line in self.errors))

    def code(self) -> int:
        return self.process.wait(20)


@contextlib.contextmanager
def started(*options: str) -> Iterator[Started]:
    worker = Started(*options)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()
        for reader in worker._readers:
            reader.join()
        worker.process.stdout.close()
        worker.process.stderr.close()


def test_sessions_go_on_and_nobody_else_is_let_in():
    with started("--drain-seconds", "60") as worker, ExtClient(worker.endpoint) as client:
        _, base = client.alloc(64)
        client.set(base, b"data")
        worker.told()
        worker.says("shutting down: 1 session may go on for 60 s")
        # a service manager tells all processes of the service
        for pid in children(worker.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        with ExtClient(worker.endpoint) as late:
            assert late.answer.status == Status.BUSY
            assert late.answer.body == b"the worker is shutting down"
        with BaseClient(worker.endpoint) as late, pytest.raises(Closed):
            late.call(Base.DEVICE_COUNT)
        assert client.get(base, 4) == b"data"
        # the second device of a head that is about to load
        with ExtClient(worker.endpoint, 1, client.key) as more:
            more.alloc(64)
            more.post(Ext.BYE)
            more.assert_closed()
        # a way from another session of the same head, as from another worker
        asked = PeerTarget(1, [worker.endpoint], client.session.peer_key, 0)
        assert client.call_raw(Ext.PEER_OPEN, extension.encode_json(asked)).status == 0
        assert worker.process.poll() is None
        client.post(Ext.BYE)
        assert worker.code() == 0


def test_the_end_of_the_drain_is_the_end():
    with started("--drain-seconds", "0.5") as worker, ExtClient(worker.endpoint) as client:
        busy_graph(client, 100_000)
        sessions = children(worker.process.pid)
        worker.told()
        assert worker.code() == 0
        assert not any(running(pid) for pid in sessions)
        client.assert_closed()
        worker.says("shutting down: the time is over, and 1 session ended with it")


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_told_twice_it_ends_at_once(second):
    with started("--drain-seconds", "600") as worker, ExtClient(worker.endpoint) as client:
        client.alloc(64)
        worker.told()
        worker.says("shutting down")
        worker.told(second)
        assert worker.code() == 0
        client.assert_closed()


@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGINT, ("--drain-seconds", "600")), (signal.SIGTERM, ("--drain-seconds", "0"))],
)
def test_without_a_drain_sessions_end_at_once(number, options):
    with started(*options) as worker, ExtClient(worker.endpoint) as client:
        busy_graph(client, 100_000)
        worker.told(number)
        assert worker.code() == 0
        client.assert_closed()
        assert worker.errors == []


def test_without_sessions_it_ends_at_once():
    with started("--drain-seconds", "600") as worker:
        pids = children(worker.process.pid)
        worker.told()
        assert worker.code() == 0
        assert worker.errors == []
        assert not any(map(running, pids))


def test_a_local_worker_ends_with_its_parent_whatever_it_is_told_to_wait_for():
    worker = Worker("CPU:1", options=("--drain-seconds", "600"))
    pid = worker.pid
    with ExtClient(worker.endpoint) as client:
        client.alloc(64)
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: any("shutting down" in line for line in worker.messages()))
        worker.close()
        client.assert_closed()
    assert not running(pid)


def test_a_local_worker_does_not_drain_by_itself():
    with Worker("CPU:1") as worker, ExtClient(worker.endpoint) as client:
        client.alloc(64)
        os.kill(worker.pid, signal.SIGTERM)
        client.assert_closed()
        wait_until(lambda: worker._process.poll() is not None)
        assert worker._process.returncode == 0


def test_what_becomes_of_a_shutdown():
    shutdown = Shutdown(600)
    assert (shutdown.asked, shutdown.begins(), shutdown.is_over(0)) == (False, False, False)
    shutdown._told(signal.SIGTERM, None)
    assert (shutdown.asked, shutdown.begins(), shutdown.begins()) == (True, True, False)
    assert (shutdown.is_over(1), shutdown.is_over(0)) == (False, True)
    assert 590 < shutdown.patience() <= 600
    shutdown.at_once()
    assert shutdown.is_over(1)
    assert repr(shutdown) == "<Shutdown now>"
