"""Several of llama.cpp's clients at one worker: none holds up another, whatever becomes of it.

Its own server would serve the first one alone.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import caravan
from caravan.wire import codec
from caravan.wire.commands import Base
from e2e.processes import alive, children, descriptors, kill, wait_for
from interop.cases import CASES, TEXT, assert_same, observe
from interop.peers import CppClient, Ended, connections, engine

CASE = "ubatch does not divide"
# of a computation that is not over soon
LONG = {"n_ctx": 2048, "n_batch": 2048, "n_ubatch": 1}
N_LONG = 200
TICKS = 5


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[caravan.Worker]:
    with engine(folder):
        worker = caravan.Worker("CPU:1")
    with worker:
        yield worker


@pytest.fixture
def worker(started: caravan.Worker) -> Iterator[caravan.Worker]:
    """Whatever a test does, the worker comes back to one spare process and its descriptors."""
    wait_for(lambda: len(children(started.pid)) == 1)
    before = descriptors(started.pid)
    yield started
    wait_for(lambda: len(children(started.pid)) == 1)
    wait_for(lambda: descriptors(started.pid) == before)


def sessions(worker: caravan.Worker) -> set[int]:
    """The session processes that have a client."""
    return {pid for pid in children(worker.pid) if connections(pid)}


@contextlib.contextmanager
def loaded(worker: caravan.Worker, folder: Path, model: Path) -> Iterator[tuple[CppClient, int]]:
    """A client with the model on the worker, and its session process."""
    before = sessions(worker)
    with CppClient(folder) as client:
        client.ask("connect", endpoints=[worker.endpoint])
        client.ask("load", path=str(model))
        (session,) = sessions(worker) - before
        yield client, session


def computed(pid: int) -> int:
    """Ticks of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def begin(client: CppClient, session: int) -> None:
    """Into a long prompt: on return the worker computes."""
    tokens = client.ask("tokenize", text=TEXT)["tokens"][:N_LONG]
    client.ask("open", **LONG)
    before = computed(session)
    client.tell("decode", tokens=tokens)
    wait_for(lambda: computed(session) >= before + TICKS)


def check(client: CppClient, alone) -> None:
    assert_same({CASE: CASES[CASE].observe(client)}, alone)


def test_three_at_the_same_time(worker, folder, smollm2, alone):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(CppClient(folder)) for _ in range(3)]
        for client in clients:
            client.tell("connect", endpoints=[worker.endpoint])
            client.tell("load", path=str(smollm2))
            client.tell("tokenize", text=TEXT)
        for client in clients:
            client.answer()
            client.answer()
            tokens = client.answer()["tokens"]
        assert len(sessions(worker)) == 3
        case = CASES[CASE]
        for client in clients:
            client.tell("open", n_ctx=128, **case.options)
            client.tell("decode", tokens=tokens[: case.n_prompt])
            client.tell("logits")
        for client in clients:
            client.answer()
            client.answer()
            assert client.answer()["logits"] == alone[CASE][0]


def test_an_idle_one_and_a_busy_one_hold_up_nobody(worker, folder, smollm2, alone):
    with (
        loaded(worker, folder, smollm2) as (idle, _),
        loaded(worker, folder, smollm2) as (busy, session),
    ):
        check(idle, alone)
        tokens = busy.ask("tokenize", text=TEXT)["tokens"][:100]
        busy.ask("open", n_ctx=512)
        # its prompt takes as long as the others may need
        kill(session, signal.SIGSTOP)
        try:
            busy.tell("decode", tokens=tokens)
            with CppClient(folder) as client:
                assert_same(observe(client, [worker.endpoint], smollm2, [CASE]), alone)
            check(idle, alone)
            assert not busy.answers_within(0.0)
        finally:
            kill(session, signal.SIGCONT)
        busy.answer()
        check(busy, alone)


def test_one_that_is_killed_in_a_computation(worker, folder, smollm2, alone):
    with loaded(worker, folder, smollm2) as (other, _):
        with loaded(worker, folder, smollm2) as (client, session):
            begin(client, session)
            client.kill()
            wait_for(lambda: not alive(session))
        check(other, alone)
    assert not [line for line in worker.messages() if "error" in line or "died" in line]


def test_one_that_freezes_in_a_computation(worker, folder, smollm2, alone):
    with loaded(worker, folder, smollm2) as (client, session):
        begin(client, session)
        client.send_signal(signal.SIGSTOP)
        with CppClient(folder) as other:
            assert_same(observe(other, [worker.endpoint], smollm2, [CASE]), alone)
        client.send_signal(signal.SIGCONT)
        client.answer()


def test_a_session_that_is_killed_costs_its_client_alone(worker, folder, smollm2, alone):
    with loaded(worker, folder, smollm2) as (other, _):
        with loaded(worker, folder, smollm2) as (client, session):
            begin(client, session)
            kill(session)
            with pytest.raises(Ended, match="ended with -6"):
                client.answer()
        check(other, alone)


# what a client may have sent before it says nothing more
HELLO = codec.hello_request(bytes(24))
SILENT = {
    "nothing": b"",
    "half a HELLO": HELLO[:20],
    "HELLO": HELLO,
    "half a request": HELLO + codec.base_request(Base.SET_TENSOR, 1 << 20) + bytes(100),
}


def test_silent_ones_hold_up_nobody(worker, folder, smollm2, alone):
    host, _, port = worker.endpoint.rpartition(":")
    with contextlib.ExitStack() as stack:
        for words in SILENT.values():
            for _ in range(2):
                sock = socket.create_connection((host, int(port)))
                stack.enter_context(sock).sendall(words)
        with CppClient(folder) as client:
            assert_same(observe(client, [worker.endpoint], smollm2, [CASE]), alone)
