"""The supervisor's life: silent and rude clients, killed sessions, several heads, the end."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from caravan.errors import WorkerStartError
from caravan.wire import codec, extension
from caravan.wire.commands import Base, Ext
from caravan.wire.extension import Status
from caravan.worker.local import LocalWorkers, Worker
from e2e.loads import resident
from e2e.processes import children, descriptors
from leaks import running
from wired import wait_until
from worker.raw_client import ADD, BaseClient, Closed, ExtClient, Wire, linear_rows, row

COMMAND = [sys.executable, "-m", "caravan", "worker"]


def session_of(worker: Worker, before: list[int]) -> int:
    """The session process that has taken a connection: the oldest that is not a spare."""
    return sorted(set(children(worker.pid)) & set(before))[0]


def busy_graph(client: ExtClient, n: int = 3000) -> None:
    """Start a computation of some seconds."""
    size = 1 << 20
    _, base = client.alloc(8 << 20)
    rows = [row((size,), base, ADD, (n if i == 0 else i - 1, n)) for i in range(n)]
    client.graph(np.stack([*rows, row((size,), base + 4 * size)]), n, 1)


def test_a_killed_session_leaves_the_worker_serving() -> None:
    with Worker("CPU:1") as worker:
        spare = children(worker.pid)
        with ExtClient(worker.endpoint) as client:
            client.alloc(64)
            os.kill(session_of(worker, spare), signal.SIGKILL)
            client.assert_closed()
        with ExtClient(worker.endpoint) as client:
            client.alloc(64)
        wait_until(lambda: any("was killed by signal" in line for line in worker.messages()))


def test_a_client_that_only_asks_leaves_the_process_to_the_next() -> None:
    """llama.cpp's client connects anew for every question until it has a buffer."""
    with Worker("CPU:1") as worker:
        (spare,) = children(worker.pid)
        for _ in range(20):
            with BaseClient(worker.endpoint) as client:
                assert client.call(Base.GET_ALIGNMENT, 0) == (32,)
                assert client.call(Base.DEVICE_COUNT) == (1,)
        # one more may have been started where a client was faster than the process
        wait_until(lambda: children(worker.pid) == [spare])
        with ExtClient(worker.endpoint) as client:
            client.alloc(64)
        wait_until(lambda: spare not in children(worker.pid))
        assert worker.messages() == []


def test_what_a_client_has_allocated_goes_with_its_process() -> None:
    with Worker("CPU:1") as worker:
        (spare,) = children(worker.pid)
        with BaseClient(worker.endpoint) as client:
            handle, _ = client.alloc(64)
            client.post(Base.FREE_BUFFER, handle)
        wait_until(lambda: spare not in children(worker.pid))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="about the GNU library")
def test_freed_memory_is_the_systems_again() -> None:
    size = 24 << 20
    with Worker("CPU:1") as worker:
        (spare,) = children(worker.pid)
        with ExtClient(worker.endpoint) as client:
            before = resident(spare)
            # the C library would keep one for every thread that has asked for memory
            for _ in range(3):
                handle, base = client.alloc(size)
                client.set(base, bytes(size))
                client.fence()
                assert resident(spare) > before + size // 2
                client.post(Ext.FREE, handle)
                client.fence()
            assert resident(spare) < before + size // 2


def test_clients_wait_for_processes_that_are_starting() -> None:
    with Worker("CPU:1") as worker:
        (spare,) = children(worker.pid)
        os.kill(spare, signal.SIGKILL)
        wait_until(lambda: spare not in children(worker.pid))
        clients = [BaseClient(worker.endpoint) for _ in range(3)]
        for client in clients:
            client.alloc(64)
        for client in clients:
            client.close()


def test_a_second_head_is_served_while_the_first_computes() -> None:
    with Worker("CPU:1") as worker, ExtClient(worker.endpoint) as first:
        busy_graph(first)
        fence = first.post(Ext.FENCE)
        start = time.monotonic()
        with ExtClient(worker.endpoint) as second:
            _, base = second.alloc(1 << 16)
            second.graph(linear_rows(base)[0], 2)
            second.fence()
        served = time.monotonic() - start
        assert first.answer_of().seq == fence
        assert time.monotonic() - start > served


def test_leaving_in_the_middle_of_a_computation_frees_the_session() -> None:
    with Worker("CPU:1") as worker:
        spare = children(worker.pid)
        client = ExtClient(worker.endpoint)
        busy_graph(client, 100_000)
        session = session_of(worker, spare)
        client.close()
        wait_until(lambda: session not in children(worker.pid))
        assert not running(session)


def test_silent_and_rude_clients_hold_up_nobody() -> None:
    with Worker("CPU:1", options=("--timeout", "1")) as worker:
        silent = [Wire(worker.endpoint) for _ in range(20)]
        slow = Wire(worker.endpoint)
        slow.send(codec.hello_request(bytes(24))[:20])
        garbage = Wire(worker.endpoint)
        garbage.send(b"GET / HTTP/1.1\r\n\r\n")
        garbage.assert_closed()
        with ExtClient(worker.endpoint) as client:
            client.alloc(64)
        for wire in (*silent, slow):
            wire.assert_closed()
            wire.close()
        garbage.close()
        wrong = Wire(worker.endpoint)
        wrong.send(codec.base_request(Base.DEVICE_COUNT, 0))
        wrong.assert_closed()
        wrong.close()


@pytest.mark.parametrize("cut", [1, 10, 20, 1000])
def test_leaving_in_the_middle_of_a_message_is_survived(worker, cut) -> None:
    with ExtClient(worker.endpoint) as client:
        _, base = client.alloc(1 << 16)
        rows, _ = linear_rows(base)
        body = (1).to_bytes(8, "little") + (2).to_bytes(4, "little") + (5).to_bytes(4, "little")
        body += rows.tobytes()
        client.send((codec.ext_frame(Ext.GRAPH_COMPUTE, 1, len(body)) + body)[:cut])
    with BaseClient(worker.endpoint) as client:
        client.alloc(64)
        client.send(codec.base_request(Base.SET_TENSOR, 305 + 64)[:cut])
    with ExtClient(worker.endpoint) as client:
        client.fence()


def test_random_bytes_never_end_the_worker(worker) -> None:
    rng = np.random.default_rng(20261129)
    for round_ in range(30):
        with ExtClient(worker.endpoint) as client:
            client.alloc(4096)
            number, length = int(rng.integers(64, 80)), int(rng.integers(0, 400))
            body = rng.bytes(length)
            if rng.random() < 0.5:
                body = (1 << 40).to_bytes(8, "little") + body
            try:
                client.send(codec.ext_frame(number, 1, len(body)), body, rng.bytes(64))
                client.sock.shutdown(1)
                while client.sock.recv(65536):
                    pass
            except (Closed, ConnectionResetError, BrokenPipeError):
                pass
        assert running(worker.pid), f"round {round_}"
    with ExtClient(worker.endpoint) as client:
        client.fence()


def test_descriptors_do_not_leak() -> None:
    with Worker("CPU:1") as worker:

        def rounds(n: int) -> None:
            for _ in range(n):
                with ExtClient(worker.endpoint) as client:
                    client.alloc(64)
                Wire(worker.endpoint).close()

        def quiet() -> bool:
            return len(children(worker.pid)) == 1

        rounds(1)
        wait_until(quiet)
        before = descriptors(worker.pid)
        rounds(5)
        wait_until(quiet)
        wait_until(lambda: descriptors(worker.pid) <= before)


def test_session_processes_do_not_hold_each_others_connections() -> None:
    with Worker("CPU:1") as worker:
        first = ExtClient(worker.endpoint)
        with ExtClient(worker.endpoint) as second:
            first.post(Ext.BYE)
            first.assert_closed()
            first.close()
            second.fence()


def test_too_many_sessions_are_told_so() -> None:
    from caravan.worker.settings import Settings

    with Worker("CPU:1") as worker:
        clients = [ExtClient(worker.endpoint) for _ in range(Settings().max_sessions)]
        with ExtClient(worker.endpoint) as late:
            assert late.answer.status == Status.BUSY
        with BaseClient(worker.endpoint) as late, pytest.raises(Closed):
            late.call(Base.DEVICE_COUNT)
        for client in clients:
            client.close()
        wait_until(lambda: len(children(worker.pid)) <= 1)
        with ExtClient(worker.endpoint) as client:
            client.fence()


@pytest.mark.parametrize(
    ("protocol", "spoken", "other"), [(7, "7.0.0", "--protocol 8"), (8, "8.0.0", "--protocol 7")]
)
def test_a_client_that_leaves_after_hello_is_explained(protocol, spoken, other) -> None:
    with Worker("CPU:1", options=("--protocol", str(protocol))) as worker:
        spare = children(worker.pid)
        with BaseClient(worker.endpoint):
            pass
        wait_until(lambda: any("it left after HELLO" in line for line in worker.messages()))
        (line,) = [line for line in worker.messages() if "it left after HELLO" in line]
        assert f"this worker speaks RPC protocol {spoken} (ggml 0.2" in line and other in line
        # and has cost no process
        assert children(worker.pid) == spare


def test_a_client_that_pauses_after_hello_is_served() -> None:
    with (
        Worker("CPU:1", options=("--timeout", "0.2")) as worker,
        BaseClient(worker.endpoint) as client,
    ):
        spare = children(worker.pid)
        wait_until(lambda: children(worker.pid) != spare)  # the spare's successor
        assert client.call(Base.DEVICE_COUNT) == (1,)


@pytest.mark.parametrize("early", [True, False], ids=["for a session", "after one"])
def test_a_head_that_does_not_go_together_is_explained(early) -> None:
    reason = "this head speaks\tin tongues"
    with Worker("CPU:1") as worker:
        if early:
            with Wire(worker.endpoint) as wire:
                wire.hello(extension.caps())
                wire.send(codec.ext_frame(Ext.BYE, 0, len(reason)), reason.encode())
                wire.assert_closed()
        else:
            with ExtClient(worker.endpoint) as client:
                client.post(Ext.BYE, tail=reason.encode())
                client.assert_closed()
        said = "leaves: this head speaks in tongues"
        wait_until(lambda: any(said in line for line in worker.messages()))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_ends_with_0_and_leaves_nothing(signum) -> None:
    process = subprocess.Popen(
        [*COMMAND, "-p", "0", "-d", "CPU:1", "--no-cache", "--drain-seconds", "0"],
        stdout=subprocess.PIPE,
    )
    lines = []
    while not lines or not lines[-1].startswith(b"worker ready on "):
        lines.append(process.stdout.readline())
    with ExtClient(lines[-1].split()[3].decode()) as client:
        busy_graph(client, 50_000)
        sessions = children(process.pid)
        process.send_signal(signum)
        assert process.wait(10) == 0
        assert not any(running(pid) for pid in sessions)
    process.stdout.close()


def test_it_says_what_rpc_server_says() -> None:
    process = subprocess.Popen(
        [*COMMAND, "-p", "0", "-d", "CPU:1/CPU:2", "--protocol", "7", "--no-cache"],
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = [process.stdout.readline().rstrip("\n") for _ in range(8)]
    endpoint = lines[-1].split()[3]
    with ExtClient(endpoint):
        assert process.stdout.readline() == "Accepted client connection\n"
    assert process.stdout.readline() == "Client connection closed\n"
    process.terminate()
    assert process.wait(10) == 0
    process.stdout.close()
    assert lines[0] == "Starting RPC server v7.0.0"
    assert lines[1] == f"  endpoint       : {endpoint}"
    assert lines[2:4] == ["  local cache    : n/a", "Devices:"]
    assert lines[4].startswith("  CPU: ") and lines[4].endswith(" MiB free)")
    assert lines[6] == "  transport      : TCP"
    assert lines[7].startswith(f"worker ready on {endpoint} (protocol 7.0.0, ")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-d", "CUDA7"], 1, "unknown device 'CUDA7'; available devices: CPU"),
        (["-d", "CPU:x"], 2, "threads must be a number"),
        (["-t", "0"], 2, "threads"),
        (["--nonsense"], 2, "nonsense"),
        (["-H", "no.such.host.invalid"], 1, "unknown host"),
        (["-H", "203.0.113.7"], 1, "cannot listen"),
    ],
)
def test_exit_codes(arguments, code, words) -> None:
    done = subprocess.run(
        [*COMMAND, "-p", "0", "--no-cache", *arguments], capture_output=True, text=True
    )
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_an_error(worker) -> None:
    port = int(worker.endpoint.rpartition(":")[2])
    with pytest.raises(WorkerStartError, match=f"cannot listen on 127.0.0.1 port {port}"):
        Worker("CPU:1", port=port)


def _has(host: str) -> bool:
    """Whether one can listen at `host` here."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, number) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def test_unix_sockets_and_ipv6(tmp_path) -> None:
    path = tmp_path / "worker"
    for host in (f"unix:{path}", "::1", "localhost"):
        try:
            with Worker("CPU:1", host=host) as worker, ExtClient(worker.endpoint) as client:
                client.fence()
        except WorkerStartError:
            # a machine may lack IPv6, or any name for itself
            assert not path.exists() and not _has(host), host
    assert not path.exists()


@pytest.mark.skipif(not _has("::1"), reason="this system has no IPv6")
def test_all_addresses_are_those_of_ipv4_too() -> None:
    with Worker("CPU:1", host="::", options=("--insecure",)) as worker:
        port = worker.endpoint.rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]"):
            with ExtClient(f"{host}:{port}") as client:
                client.fence()
                assert client.session.peer_addresses == [f"{host}:{port}"]
        with Wire(f"127.0.0.1:{port}") as wire:
            wire.send(codec.base_request(Base.DEVICE_COUNT, 0))
            wire.assert_closed()
        wait_until(lambda: any("connection to 127.0.0.1:" in line for line in worker.messages()))


def test_without_the_extension_only_the_base_protocol_is_spoken() -> None:
    with Worker("CPU:1", options=("--no-extension",)) as worker, Wire(worker.endpoint) as wire:
        _, caps = wire.hello(extension.caps())
        assert caps == bytes(24)
        wire.send(codec.base_request(Base.DEVICE_COUNT, 0))
        assert wire.read(12) == (4).to_bytes(8, "little") + (1).to_bytes(4, "little")


def test_local_workers_start_side_by_side_and_close() -> None:
    with LocalWorkers(2) as workers:
        assert len(set(workers.endpoints)) == 2
        pids = [worker.pid for worker in workers.workers]
        for endpoint in workers.endpoints:
            with ExtClient(endpoint) as client:
                assert client.session.devices[0].threads == 1
    assert not any(running(pid) for pid in pids)
    workers.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has this policy")
def test_only_a_local_worker_gives_way_to_others_on_its_machine() -> None:
    with Worker("CPU:1") as worker:
        (session,) = children(worker.pid)
        wait_until(lambda: os.sched_getscheduler(session) == os.SCHED_BATCH)
    process = subprocess.Popen(
        [*COMMAND, "-p", "0", "-d", "CPU:1", "--no-cache"], stdout=subprocess.PIPE
    )
    while not process.stdout.readline().startswith(b"worker ready on "):
        pass
    (session,) = children(process.pid)
    assert os.sched_getscheduler(session) == os.SCHED_OTHER
    process.terminate()
    assert process.wait(10) == 0
    process.stdout.close()


def test_a_local_worker_dies_with_its_parent() -> None:
    script = (
        "import os, signal\n"
        "from caravan.worker.local import Worker\n"
        "worker = Worker('CPU:1')\n"
        "print(worker.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    pid = int(done.stdout)
    wait_until(lambda: not running(pid))


def test_a_local_worker_says_why_it_did_not_start() -> None:
    with pytest.raises(WorkerStartError, match="unknown device 'CUDA7'"):
        Worker("CUDA7")
