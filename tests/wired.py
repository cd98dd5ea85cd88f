"""Connected pairs of every transport, for the tests that all of them must pass."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from caravan.transport import memory
from caravan.transport.base import Transport
from caravan.transport.endpoint import Endpoint
from caravan.transport.tcp import SocketTransport, connect
from tls_ends import tls_pair

PATIENCE = 30.0


@contextmanager
def tcp_pair(tmp_path: Path) -> Iterator[tuple[Transport, Transport]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = connect(Endpoint("127.0.0.1", server.getsockname()[1]), PATIENCE)
        accepted, _ = server.accept()
    two = SocketTransport(accepted, "the client")
    yield one, two
    one.close()
    two.close()


@contextmanager
def unix_pair(tmp_path: Path) -> Iterator[tuple[Transport, Transport]]:
    path = str(tmp_path / "worker.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen()
        one = connect(Endpoint.parse(f"unix:{path}"), PATIENCE)
        accepted, _ = server.accept()
    two = SocketTransport(accepted, "the client")
    yield one, two
    one.close()
    two.close()


@contextmanager
def memory_pair(tmp_path: Path) -> Iterator[tuple[Transport, Transport]]:
    one, two = memory.pair(1 << 16)
    yield one, two
    one.close()
    two.close()


KINDS = {"tcp": tcp_pair, "unix": unix_pair, "memory": memory_pair, "tls": tls_pair}


def send_all(transport: Transport, data: bytes) -> int:
    """Every byte, waiting where the pipe is full; the number of sends that it took."""
    view, sends = memoryview(data), 0
    while view:
        sent = transport.send([view])
        sends += 1
        view = view[sent:]
        if not sent:
            assert transport.wait_writable(PATIENCE)
    return sends


def receive(transport: Transport, size: int) -> bytes:
    """Exactly `size` bytes."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        view = view[transport.recv_into(view) :]
    return bytes(data)


class Side:
    """A call on a thread of its own, and how it ended."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.result: object = None
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, name="test-side", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as exc:
            self.error = exc

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> object:
        """What the call returned; raises what it raised."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the call did not end"
        if self.error is not None:
            raise self.error
        return self.result


def wait_until(condition: Callable[[], object]) -> None:
    """For what no event tells."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.001)
