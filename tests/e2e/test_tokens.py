"""Workers that ask for a token: who comes in, who does not, and that nobody hears or sees it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import caravan
from caravan.errors import AuthenticationError, ConnectError
from caravan.trust import token as tokens
from caravan.wire import codec, extension
from caravan.wire.commands import Base
from caravan.worker import lobby
from e2e.processes import assert_one_line, children, closed_port, descriptors
from e2e.processes import caravan as command
from servers import address_elsewhere
from wired import wait_until
from worker.raw_client import BaseClient, Closed, ExtClient, Wire


class Relay:
    """Passes connections on to a worker, and writes down every byte of both directions."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.target = ""
        self.seen = bytearray()
        self._sockets = [self._server]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, call, *args: socket.socket) -> None:
        self._threads.append(threading.Thread(target=call, args=args, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._server.accept()
                host, _, port = self.target.rpartition(":")
                theirs = socket.create_connection((host, int(port)))
                self._sockets += [ours, theirs]
                self._start(self._pass, ours, theirs)
                self._start(self._pass, theirs, ours)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(20)


@pytest.fixture(scope="module")
def secret() -> str:
    return tokens.new()


@pytest.fixture(scope="module")
def file(secret, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "token"
    path.write_text(f"{secret}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """A file with another token."""
    path = tmp_path_factory.mktemp("tokens") / "other"
    path.write_text(tokens.new())
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def worker(file) -> Iterator[caravan.Worker]:
    with caravan.Worker("CPU:1,CPU:1", options=("--token-file", str(file))) as running:
        yield running


def hidden(secret: str, data: bytes) -> bool:
    """Whether the token is nowhere in it, in no spelling that one might come upon."""
    raw = secret.encode()
    spellings = {raw, raw.hex().encode(), raw.hex().upper().encode(), raw[::-1]}
    spellings |= {base64.b64encode(b"x" * n + raw)[4:-4] for n in range(3)}
    spellings |= {base64.urlsafe_b64decode(secret + "="), raw[:16], raw[-16:]}
    return not any(spelling in data for spelling in spellings)


# heads


def test_who_knows_the_token_computes(worker, secret, monkeypatch):
    with caravan.connect([worker.endpoint], token=secret) as cluster:
        assert [device.name for device in cluster.devices] == ["RPC0", "RPC1"]
        assert cluster.devices[0].memory()[1] > 0
        assert cluster.notes == []
    monkeypatch.setenv("CARAVAN_TOKEN", secret)
    with caravan.connect([worker.endpoint]) as cluster:
        cluster.check()


def test_who_does_not_is_told(worker, secret):
    with pytest.raises(AuthenticationError, match=r"wants a token: set CARAVAN_TOKEN or --token-f"):
        caravan.connect([worker.endpoint])
    with pytest.raises(AuthenticationError, match="wants a token"):
        caravan.connect([worker.endpoint], token="")
    for wrong in (tokens.new(), secret[:-1], secret + "A"):
        with pytest.raises(ConnectError, match=rf"^the worker at {worker.endpoint} refused the t"):
            caravan.connect([worker.endpoint], token=wrong)
    # and after that who knows it comes in
    with caravan.connect([worker.endpoint], token=secret) as cluster:
        cluster.check()


def test_a_worker_without_a_token_lets_in_who_has_one(secret):
    with (
        caravan.Worker("CPU:1") as worker,
        caravan.connect([worker.endpoint], token=secret) as cluster,
    ):
        # on this machine that is as it should be
        assert cluster.notes == []


def test_workers_of_ones_own_ask_for_none(secret, monkeypatch):
    monkeypatch.setenv("CARAVAN_TOKEN", secret)
    with caravan.LocalWorkers(1) as workers, caravan.connect(workers.endpoints, token="") as one:
        one.check()
    with caravan.connect(["local:CPU:1"], token="") as cluster:
        cluster.check()


def test_commands_show_it_to_the_worker_and_to_nobody_else(worker, file, other, secret, smollm2):
    rpc = ("--rpc", worker.endpoint)
    run = ("run", "-m", str(smollm2), "-p", "One, two,", "-n", "2", "-c", "64", *rpc)
    done = command(*run, "--token-file", str(file))
    assert done.returncode == 0, done.stderr
    assert hidden(secret, (done.stdout + done.stderr).encode())
    bench = ("bench", "-m", str(smollm2), "-p", "8", "-n", "0", "-r", "1", "-o", "json", *rpc)
    for words in (bench, ("devices", "--json", *rpc)):
        done = command(*words, env={**os.environ, "CARAVAN_TOKEN": secret})
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)
        assert hidden(secret, (done.stdout + done.stderr).encode())
    assert_one_line(command(*run), worker.endpoint, "wants a token")
    assert_one_line(command(*run, "--token-file", str(other)), worker.endpoint, "refused the token")


def test_a_token_file_that_is_none_is_wrong_usage(worker, tmp_path):
    (tmp_path / "short").write_text("open sesame")
    for name, why in (("nowhere", "No such file"), ("short", "too short")):
        for words in (("devices", "--rpc", worker.endpoint), ("worker", "-p", "0")):
            done = command(*words, "--token-file", str(tmp_path / name))
            assert done.returncode == 2
            assert why in done.stderr and "sesame" not in done.stderr


# between workers


@pytest.fixture
def relayed(file, secret) -> Iterator[tuple[list[caravan.Worker], list[Relay]]]:
    """Two workers that ask for the token; all that comes to them, from each other too, is seen."""
    with ExitStack() as stack:
        relays = [Relay(), Relay()]
        workers = []
        for relay in relays:
            stack.callback(relay.close)
            options = ("--token-file", str(file), "--peer-address", relay.endpoint)
            workers.append(stack.enter_context(caravan.Worker("CPU:1", options=options)))
            relay.target = workers[-1].endpoint
        yield workers, relays


def test_workers_show_it_to_each_other_and_it_is_on_no_wire(relayed, secret, smollm2):
    _, relays = relayed
    with (
        caravan.connect([relay.endpoint for relay in relays], token=secret) as cluster,
        caravan.Model(smollm2, devices=cluster.devices) as model,
        caravan.Context(model, caravan.ContextParams(n_ctx=64)) as context,
    ):
        assert {route.path.value for route in cluster.routes().values()} == {"direct"}
        assert "".join(caravan.generate(context, "One, two,", max_tokens=3))
    for relay in relays:
        seen = bytes(relay.seen)
        # two connections of the head and the other worker's, with AUTH and PROVE each way
        assert seen.count(codec.ext_frame(93, 1, 32)) >= 4
        assert seen.count(codec.ext_frame(94, 2, 32)) >= 4
        assert hidden(secret, seen)


@pytest.mark.parametrize("has", ["none", "another"])
def test_a_worker_with_the_wrong_token_does_not_get_in(worker, other, secret, has):
    """The head has the token, and goes on to the open worker, too: copies pass it."""
    options = ("--token-file", str(other)) if has == "another" else ()
    with caravan.Worker("CPU:1", options=options) as second:
        if has == "another":
            with pytest.raises(AuthenticationError, match=f"{second.endpoint} refused the token"):
                caravan.connect([worker.endpoint, second.endpoint], token=secret)
            return
        with caravan.connect([worker.endpoint, second.endpoint], token=secret) as cluster:
            ways = {pair: route.path.value for pair, route in cluster.routes().items()}
            assert ways["RPC0", "RPC2"] == "direct"
            assert ways["RPC2", "RPC0"] == "relay"
            assert "wants a token" in cluster.routes()["RPC2", "RPC0"].reason


# nobody sees it


def test_the_token_is_in_no_process_list_and_no_log(worker, secret, other):
    with ExtClient(worker.endpoint, token=secret.encode()) as client:
        client.alloc(64)
        with pytest.raises(Closed):
            ExtClient(worker.endpoint, token=other.read_bytes())
        sessions = children(worker.pid)
        assert sessions
        for pid in (worker.pid, *sessions):
            for name in ("cmdline", "environ"):
                assert hidden(secret, Path(f"/proc/{pid}/{name}").read_bytes())
    wait_until(lambda: any("does not know the token" in line for line in worker.messages()))
    assert hidden(secret, "\n".join(worker.messages()).encode())


def test_sessions_do_not_inherit_it(secret, tmp_path):
    """Of a worker that was told it by its environment."""
    path = tmp_path / "socket"
    environment = {**os.environ, "CARAVAN_TOKEN": secret}
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(_worker(f"unix:{path}", environment))
        with pytest.raises(AuthenticationError, match="wants a token"):
            caravan.connect([f"unix:{path}"])
        with caravan.connect([f"unix:{path}"], token=secret) as cluster:
            cluster.check()
            for pid in children(process):
                assert hidden(secret, Path(f"/proc/{pid}/environ").read_bytes())


@contextlib.contextmanager
def _worker(host: str, environment: dict[str, str]) -> Iterator[int]:
    """As a user starts it; its process id."""
    words = [sys.executable, "-m", "caravan", "worker", "-H", host, "-d", "CPU:1", "--no-cache"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    with process.stdout:
        while not process.stdout.readline().startswith(b"worker ready on "):
            assert process.poll() is None
        yield process.pid
        process.terminate()
        assert process.wait(20) == 0


# who else comes


def test_llama_cpps_programs_come_in_from_this_machine(worker):
    with BaseClient(worker.endpoint) as client:
        assert client.call(Base.DEVICE_COUNT) == (2,)


def test_a_head_gets_in_while_strangers_flood(worker, secret):
    """From another address of this machine, which counts as another client."""
    host, _, port = worker.endpoint.rpartition(":")
    before = len(worker.messages())
    strangers = []
    with contextlib.suppress(OSError):
        for n in range(3 * lobby.MOST):
            strangers.append(
                socket.create_connection((host, int(port)), 20, source_address=("127.0.0.2", 0))
            )
            if n % 100 == 99:
                with ExtClient(worker.endpoint, token=secret.encode()) as client:
                    client.fence()
            assert threads(worker.pid) <= lobby.MOST + 8
    assert len(strangers) == 3 * lobby.MOST
    for sock in strangers:
        sock.close()
    with ExtClient(worker.endpoint, token=secret.encode()) as client:
        client.fence()
    wait_until(lambda: descriptors(worker.pid) < 40)
    assert len(worker.messages()) - before <= 20


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


# where other machines can connect


def test_it_does_not_start_without_a_token():
    host = address_elsewhere()
    for where in (host, "0.0.0.0"):
        done = command("worker", "-H", where, "-p", "0", "-d", "CPU:1", "--no-cache")
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert f"--host {where} lets other machines connect: give --token-file FILE" in line
        assert "--insecure" in line and "caravan token new" in line
    both = ("--insecure", "--token-file", "x")
    assert "exclude each other" in command("worker", "-p", "0", *both).stderr


def test_a_worker_with_a_token_in_its_environment_does_not_let_everybody_in(secret):
    """Somebody has asked for both, and would get one of them without a word."""
    environment = {**os.environ, "CARAVAN_TOKEN": secret}
    done = command("worker", "-p", "0", "--insecure", env=environment)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert "CARAVAN_TOKEN is set, and --insecure lets everybody in" in line
    assert hidden(secret, line.encode())


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_on_this_machine_it_does(name):
    with caravan.Worker("CPU:1", host=name) as worker:
        assert worker.messages() == []


def test_insecure_says_so():
    with caravan.Worker("CPU:1", host="0.0.0.0", options=("--insecure",)) as worker:
        said = "\n".join(worker.messages())
    assert "WARNING: Host ('0.0.0.0') is != '127.0.0.1', and there is no token (--insecure)" in said
    assert "whoever can connect can use the devices" in said


def test_llama_cpps_programs_from_elsewhere(file, secret):
    host = address_elsewhere()
    options = ("--token-file", str(file))
    with caravan.Worker("CPU:1", host=host, options=options) as worker:
        with Wire(worker.endpoint) as wire:
            wire.send(codec.hello_request(bytes(extension.CAPS_SIZE)))
            wire.assert_closed()
        wait_until(lambda: any("--allow-llama-cpp" in line for line in worker.messages()))
        (line,) = worker.messages()
        assert f"closing the connection to {host}:" in line
        with caravan.connect([worker.endpoint], token=secret) as cluster:
            cluster.check()
    options = (*options, "--allow-llama-cpp")
    with caravan.Worker("CPU:1", host=host, options=options) as worker:
        with BaseClient(worker.endpoint) as client:
            assert client.call(Base.DEVICE_COUNT) == (1,)
        assert "some need no token (--allow-llama-cpp)" in "\n".join(worker.messages())
        # which is no way round the token for others
        with pytest.raises(AuthenticationError):
            caravan.connect([worker.endpoint])


def test_a_worker_elsewhere_that_asks_for_none_is_told_of(secret):
    host = address_elsewhere()
    with (
        caravan.Worker("CPU:1", host=host, options=("--insecure",)) as worker,
        caravan.connect([worker.endpoint], token=secret) as cluster,
    ):
        assert cluster.notes == [
            f"{worker.endpoint} asks for no token: whoever can connect can use it"
        ]


def test_nobody_is_there():
    with pytest.raises(ConnectError) as caught:
        caravan.connect([closed_port()], token=tokens.new())
    assert not isinstance(caught.value, AuthenticationError)
