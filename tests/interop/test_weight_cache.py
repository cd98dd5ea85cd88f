"""llama.cpp's own client finds weights in our cache, and its own server shares the directory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from caravan.wire.fnv import fnv1a_64
from caravan.worker.local import Worker
from interop.peers import CppClient, CppServer
from wired import PATIENCE, wait_until

# The client asks for tensors above this; the sample model has one, its token embedding.
BIG = 10 << 20
PROMPT = list(range(100, 140))

Server = Worker | CppServer


class Relay:
    """Passes connections on to `endpoint`, and counts what clients send.

    Attributes:
        endpoint: where it listens.
        sent: bytes from all clients so far.
    """

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            for ends in ((client, server, True), (server, client, False)):
                self._threads.append(threading.Thread(target=self._pass, args=ends, daemon=True))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        try:
            while data := source.recv(1 << 18):
                target.sendall(data)
                self.sent += len(data) if counted else 0
            target.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            target.close()
        if not counted:
            source.close()
            target.close()


def evaluate(server: Server, folder: Path, model: Path) -> tuple[str, int]:
    """The logits that llama.cpp's client gets, and how many bytes it has sent for them."""
    with Relay(server.endpoint) as relay:
        with CppClient(folder) as client:
            client.ask("connect", endpoints=[relay.endpoint])
            client.ask("load", path=str(model))
            client.ask("open", n_ctx=256)
            client.ask("decode", tokens=PROMPT)
            logits = client.ask("logits")["logits"]
        return logits, relay.sent


@pytest.fixture(scope="module", autouse=True)
def one_engine(folder) -> Iterator[None]:
    """Another one would compute other digits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARAVAN_LIBRARY", str(folder))
        yield


@pytest.fixture
def directory(tmp_path) -> Path:
    return tmp_path


@pytest.fixture(scope="module")
def plain(one_engine, folder, smollm2) -> tuple[str, int]:
    """Without a cache."""
    with Worker("CPU:1") as worker:
        return evaluate(worker, folder, smollm2)


def ours(directory: Path) -> AbstractContextManager[Server]:
    return Worker("CPU:1", options=("--cache", str(directory)))


def theirs(directory: Path) -> AbstractContextManager[Server]:
    return CppServer(cache=directory)


def only(directory: Path) -> Path:
    (file,) = directory.iterdir()
    assert file.stat().st_size > BIG
    return file


def version(file: Path) -> tuple[int, int]:
    """Another one when it has been replaced. Its time is that of its last use."""
    return file.stat().st_ino, file.stat().st_size


def test_the_second_time_it_is_there_already(directory, folder, smollm2, plain):
    logits, usual = plain
    with ours(directory) as worker:
        first, sent = evaluate(worker, folder, smollm2)
        file = only(directory)
        assert file.name == f"{fnv1a_64(file.read_bytes()):016x}"
        stored = version(file)
        again, resent = evaluate(worker, folder, smollm2)
        assert version(only(directory)) == stored
        assert sum("saved to" in line for line in worker.messages()) == 1
    assert first == again == logits
    # one question more
    assert usual <= sent < usual + 10_000
    assert resent < sent - file.stat().st_size + 10_000


@pytest.mark.parametrize(("writer", "reader"), [(ours, theirs), (theirs, ours)])
def test_the_directory_serves_both_workers(writer, reader, directory, folder, smollm2, plain):
    with writer(directory) as server:
        first, sent = evaluate(server, folder, smollm2)
    file = only(directory)
    stored = version(file)
    with reader(directory) as server:
        again, resent = evaluate(server, folder, smollm2)
    assert version(only(directory)) == stored
    assert resent < sent - BIG
    assert first == again == plain[0]


def test_a_damaged_file_is_noticed_and_replaced(directory, folder, smollm2, plain):
    with ours(directory) as worker:
        evaluate(worker, folder, smollm2)
        file = only(directory)
        content = file.read_bytes()
        file.write_bytes(content[:1000] + bytes(1000) + content[2000:])
        logits, sent = evaluate(worker, folder, smollm2)
        assert logits == plain[0]
        assert sent > BIG
        wait_until(lambda: any(f"removed '{file}'" in line for line in worker.messages()))
        assert only(directory).read_bytes() == content
