"""Session processes that die, and heads that are gone: what is told of it, and what comes back."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from caravan.wire.commands import Ext
from caravan.wire.extension import NO_DEVICE, Status, public_id
from caravan.worker import obituaries
from caravan.worker.local import Worker
from caravan.worker.obituaries import Obituaries
from e2e.loads import is_spare, resident
from e2e.processes import children
from wired import wait_until
from worker.raw_client import BaseClient, Closed, ExtClient, linear_rows
from worker.test_worker_life import busy_graph

MB = 1 << 20


# on a machine with much else to do, whoever has something to say may say it late
IDLE = 3.0


@pytest.fixture(scope="module")
def limited() -> Iterator[Worker]:
    with Worker("CPU:1", options=("--max-memory", "64MiB")) as running:
        yield running


@pytest.fixture(scope="module")
def impatient() -> Iterator[Worker]:
    options = ("--max-memory", "64MiB", "--idle-timeout", str(IDLE))
    with Worker("CPU:1", options=options) as running:
        yield running


@pytest.fixture
def worker(limited) -> Worker:
    """One that serves nobody."""
    return at_rest(limited)


@pytest.fixture
def waiting(impatient) -> Worker:
    """The same, which soon takes silence for an end."""
    return at_rest(impatient)


def at_rest(worker: Worker) -> Worker:
    wait_until(lambda: [*map(is_spare, children(worker.pid))] == [True])
    return worker


def serving(worker: Worker) -> int:
    """The process of the only session."""
    found: list[int] = []

    def one() -> bool:
        found[:] = [pid for pid in children(worker.pid) if not is_spare(pid)]
        return len(found) == 1

    wait_until(one)
    return found[0]


def why(endpoint: str, key: str) -> tuple[int, str]:
    """What the worker says of a session's end."""
    while True:
        # one that is just ending may still be given the question, and not answer it
        with contextlib.suppress(Closed), ExtClient(endpoint, NO_DEVICE, key) as asking:
            if asking.answer.status != Status.BUSY:
                return asking.answer.status, asking.answer.body.decode()
        time.sleep(0.01)


DEATHS = {
    signal.SIGKILL: "the session process was killed by signal SIGKILL (out of memory?)",
    signal.SIGSEGV: "the session process died by signal SIGSEGV",
    signal.SIGABRT: "the session process died by signal SIGABRT",
    signal.SIGFPE: "the session process died by signal SIGFPE",
    signal.SIGBUS: "the session process died by signal SIGBUS",
}


@pytest.mark.parametrize(
    ("number", "busy"),
    [(n, n in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)) for n in DEATHS],
)
def test_a_death_costs_one_session_and_is_told(worker, number, busy):
    with ExtClient(worker.endpoint) as dying:
        victim = serving(worker)
        with ExtClient(worker.endpoint) as other:
            check_death(worker.endpoint, dying, other, number, victim, busy)
    with ExtClient(worker.endpoint) as client:
        client.alloc(50 * MB)


def check_death(endpoint, dying, other, number, victim, busy) -> None:
    rows, at = linear_rows(other.alloc(20 * MB)[1])
    dying.alloc(30 * MB)
    if busy:
        busy_graph(dying)
    assert other.call_raw(Ext.ALLOC, (30 * MB).to_bytes(8, "little")).status == (
        Status.OUT_OF_MEMORY
    )
    os.kill(victim, number)
    dying.assert_closed()
    assert why(endpoint, dying.key) == (Status.ENDED, DEATHS[number])
    # its memory is the others', and they are none the worse
    other.alloc(30 * MB)
    base = int(rows["data"][2]) - at["w"]
    other.set(base + at["b"], b"\1\2\3\4" * 4)
    assert other.get(base + at["b"], 16) == b"\1\2\3\4" * 4


def test_a_death_gives_the_systems_memory_back(worker):
    with ExtClient(worker.endpoint) as client:
        victim = serving(worker)
        _, base = client.alloc(40 * MB)
        client.set(base, bytes(40 * MB))
        client.fence()
        assert resident(victim) > 40 * MB
        os.kill(victim, signal.SIGSEGV)
        client.assert_closed()
    wait_until(lambda: victim not in children(worker.pid))


def test_a_session_that_goes_on_says_so_and_is_none_the_worse(worker):
    with ExtClient(worker.endpoint) as client:
        for _ in range(3):
            with ExtClient(worker.endpoint, NO_DEVICE, client.key) as asking:
                assert asking.answer.status == Status.BUSY
        client.alloc(64)


def test_who_left_in_order_may_ask_too(worker):
    with ExtClient(worker.endpoint) as client:
        client.alloc(64)
        client.post(Ext.BYE)
        client.assert_closed()
    assert why(worker.endpoint, client.key) == (Status.ENDED, "the session has ended")


def test_the_worker_tells_of_a_death_once():
    with Worker("CPU:1") as worker, ExtClient(worker.endpoint) as client:
        os.kill(serving(worker), signal.SIGKILL)
        client.assert_closed()
        assert why(worker.endpoint, client.key)[0] == Status.ENDED
        with ExtClient(worker.endpoint, NO_DEVICE, "f" * 32) as stranger:
            assert stranger.answer.status == Status.REFUSED
        wait_until(lambda: any("no such session" in line for line in worker.messages()))
        assert len([line for line in worker.messages() if "SIGKILL" in line]) == 1


def test_a_connection_that_broke_ended_the_session(worker):
    with ExtClient(worker.endpoint) as client:
        client.alloc(64)
    status, text = why(worker.endpoint, client.key)
    assert status == Status.ENDED
    assert text.startswith("the session has ended, since a connection to its head broke: the conn")


@pytest.mark.parametrize("key", ["0" * 32, "", "x", "é" * 200])
def test_of_others_nothing_is_known(worker, key):
    with ExtClient(worker.endpoint, NO_DEVICE, key) as asking:
        # an empty key asks for a new session
        assert asking.answer.status in (Status.REFUSED, Status.BUSY)


def test_only_the_last_ones_are_remembered(monkeypatch):
    monkeypatch.setattr(obituaries, "MOST", 3)
    kept = Obituaries()
    for number in range(5):
        kept.note(str(number), f"death {number}")
    assert [kept.find(public_id(str(n))) for n in range(5)] == [
        "",
        "",
        "death 2",
        "death 3",
        "death 4",
    ]
    assert repr(kept) == "<Obituaries of 3 sessions>"


def test_memory_that_the_system_does_not_give_is_an_error_and_no_death():
    """A limit on the address space stands in for a machine that is full."""
    room = 6 << 30
    process = subprocess.Popen(
        [sys.executable, "-m", "caravan", "worker", "-p", "0", "-d", "CPU:1", "--no-cache"],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (room, room)),
    )
    try:
        lines = [process.stdout.readline()]
        while not lines[-1].startswith(b"worker ready on "):
            lines.append(process.stdout.readline())
        with ExtClient(lines[-1].split()[3].decode()) as client:
            answer = client.call_raw(Ext.ALLOC, (2 * room).to_bytes(8, "little"))
            assert answer.status == Status.OUT_OF_MEMORY
            client.set(client.alloc(64)[1], b"data")
            client.fence()
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


@contextlib.contextmanager
def confined(pid: int, size: int) -> Iterator[None]:
    """The system lets the process have so much memory; skips where that cannot be arranged."""
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    base, name = (old, "memory.limit_in_bytes") if old.is_dir() else (new, "memory.max")
    group = base / f"caravan-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(size))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as exc:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made here: {exc}")
    try:
        yield
    finally:
        # it is removed when the process is gone
        wait_until(lambda: not group.exists() or _removed(group))


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
        return True
    return False


def test_the_system_kills_one_that_takes_too_much_memory(worker):
    """Which it does without a word: the head is told what is likely."""
    with ExtClient(worker.endpoint) as client:
        victim = serving(worker)
        _, base = client.alloc(50 * MB)
        with ExtClient(worker.endpoint) as other, confined(victim, resident(victim) + 10 * MB):
            with contextlib.suppress(Closed, OSError):
                for at in range(1, 50):
                    client.set(base + at * MB, bytes(MB))
                    client.fence()
            assert why(worker.endpoint, client.key) == (Status.ENDED, DEATHS[signal.SIGKILL])
            other.alloc(60 * MB)


# heads that are gone without a word


def test_a_head_that_says_nothing_is_gone(waiting):
    with ExtClient(waiting.endpoint) as client:
        session = serving(waiting)
        client.alloc(60 * MB)
        started = time.monotonic()
        client.assert_closed()
        assert time.monotonic() - started > 1.0
        status, text = why(waiting.endpoint, client.key)
        assert (status, f"nothing came for {IDLE:g} s" in text) == (Status.ENDED, True)
    wait_until(lambda: session not in children(waiting.pid))
    wait_until(lambda: any("closing the session of 127.0.0.1:" in m for m in waiting.messages()))
    assert client.session.idle_ms == 1000 * IDLE
    with ExtClient(waiting.endpoint) as client:
        client.alloc(60 * MB)


def test_one_that_says_something_now_and_then_is_there(waiting):
    with ExtClient(waiting.endpoint) as client:
        for _ in range(8):
            time.sleep(IDLE / 6)
            client.call(Ext.PING)
        client.alloc(64)


def test_one_that_waits_for_a_long_computation_is_there(waiting):
    """What it says meanwhile is read, though it is answered by nobody."""
    with ExtClient(waiting.endpoint) as client:
        busy_graph(client, 2000)
        fence = client.post(Ext.FENCE)
        while True:
            client.post(Ext.PING)
            answer = client.answer_of()
            if (answer.number, answer.seq) == (Ext.FENCE, fence):
                break
            time.sleep(0.2)


def test_a_head_of_the_base_protocol_owes_no_word(waiting):
    with BaseClient(waiting.endpoint) as client:
        client.alloc(64)
        time.sleep(1.3 * IDLE)
        client.alloc(64)
