"""Private workers: who can reach them, and that nothing of them stays behind."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from caravan.errors import WorkerStartError
from caravan.worker import local
from caravan.worker.local import LocalDevices, Worker
from leaks import running
from wired import wait_until
from worker.raw_client import ExtClient
from worker.test_worker_life import children


def socket_of(worker: Worker) -> Path:
    assert worker.endpoint.startswith("unix:")
    return Path(worker.endpoint[5:])


def test_only_this_user_reaches_it_and_nothing_stays(scratch) -> None:
    with Worker("CPU:1", private=True) as worker:
        path = socket_of(worker)
        assert path.parent.parent == scratch
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_ISSOCK(path.stat().st_mode)
        with ExtClient(worker.endpoint) as client:
            client.fence()
            assert client.session.devices[0].threads == 1
    assert list(scratch.iterdir()) == []


def test_the_worker_itself_takes_its_directory_away(scratch) -> None:
    with Worker("CPU:1", private=True) as worker:
        os.kill(worker.pid, signal.SIGTERM)
        wait_until(lambda: not list(scratch.iterdir()))


def test_after_a_worker_that_was_killed_its_owner_tidies_up(scratch) -> None:
    with Worker("CPU:1", private=True) as worker:
        os.kill(worker.pid, signal.SIGKILL)
        assert list(scratch.iterdir())
    assert list(scratch.iterdir()) == []


def test_one_that_froze_with_all_its_processes_holds_nobody_up(scratch, monkeypatch) -> None:
    monkeypatch.setattr(local, "_STOP_TIMEOUT", 0.2)
    monkeypatch.setattr(local, "_READ_TIMEOUT", 0.2)
    worker = Worker("CPU:1", private=True)
    wait_until(lambda: children(worker.pid))
    sessions = children(worker.pid)
    closing = threading.Thread(target=worker.close, daemon=True)
    for pid in (worker.pid, *sessions):
        os.kill(pid, signal.SIGSTOP)
    try:
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
    finally:
        for pid in sessions:
            os.kill(pid, signal.SIGKILL)
        closing.join()
    assert list(scratch.iterdir()) == []


def test_one_that_does_not_start_leaves_nothing(scratch) -> None:
    with pytest.raises(WorkerStartError, match="unknown device 'CUDA7'"):
        Worker("CUDA7", private=True)
    assert list(scratch.iterdir()) == []


def test_a_long_name_of_the_temporary_directory_is_gone_around(scratch, monkeypatch) -> None:
    deep = scratch / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with Worker("CPU:1", private=True) as worker, ExtClient(worker.endpoint) as client:
        client.fence()
    assert list(deep.iterdir()) == []


def test_several_keep_their_order(scratch) -> None:
    with LocalDevices(["CPU:2", "CPU", "CPU:1"], threads=3) as devices:
        assert len(list(scratch.iterdir())) == 3
        threads = []
        for endpoint in devices.endpoints:
            with ExtClient(endpoint) as client:
                threads.append(client.session.devices[0].threads)
        assert threads == [2, 3, 1]
    assert list(scratch.iterdir()) == []


def test_one_that_fails_ends_the_others(scratch) -> None:
    with pytest.raises(WorkerStartError, match="CUDA7"):
        LocalDevices(["CPU:1", "CUDA7", "CPU:1"])
    assert list(scratch.iterdir()) == []


def test_they_end_with_their_owner_even_when_that_is_killed(scratch) -> None:
    script = (
        "import os, signal\n"
        "from caravan.worker.local import LocalDevices\n"
        "devices = LocalDevices(['CPU:1', 'CPU:1'])\n"
        "print(*[worker.pid for worker in devices.workers], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(running(pid) for pid in pids))
    wait_until(lambda: not list(scratch.iterdir()))
