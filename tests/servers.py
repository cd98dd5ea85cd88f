"""Scripted servers over TCP: what a connection is answered is written down before it comes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from caravan.errors import CaravanError
from caravan.transport.endpoint import Endpoint, is_loopback
from caravan.transport.tcp import SocketTransport
from caravan.wire import codec, extension
from caravan.wire.commands import BASE_8
from caravan.wire.versions import V8, Version
from stream.scripted import Peer
from wired import PATIENCE


def address_elsewhere() -> str:
    """An address of this machine under which it counts as another one; skips where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        host = str(probe.getsockname()[0])
    if is_loopback(host):
        pytest.skip("this machine has no network")
    return host


Script = Callable[[Peer], None]


class Server:
    """Answers its first connection with the first script, and so on; then accepts silently."""

    def __init__(self, *scripts: Script) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self.socket.getsockname()[1])
        self.peers: list[Peer] = []
        self.seen: list[object] = []
        self._scripts = list(scripts)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.socket.accept()
            except OSError:
                return
            peer = Peer(SocketTransport(sock, "head"), BASE_8)
            number = len(self.peers)
            self.peers.append(peer)
            if number < len(self._scripts):
                thread = threading.Thread(target=self._serve, args=(number, peer), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, number: int, peer: Peer) -> None:
        try:
            self._scripts[number](peer)
        except CaravanError as exc:
            self.seen.append(exc)

    def finish(self) -> None:
        """Wait until the scripts of all that have come are through, or their connections ended."""
        for thread in self._threads[1:]:
            thread.join(PATIENCE)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        for peer in self.peers:
            peer.close()
        for thread in self._threads:
            thread.join(PATIENCE)


@contextmanager
def starting() -> Iterator[Callable[..., Server]]:
    """What starts servers, which are closed at the end."""
    servers: list[Server] = []

    def start(*scripts: Script) -> Server:
        servers.append(Server(*scripts))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def drain(peer: Peer) -> None:
    """Read to the end of the connection, which the other end must have closed."""
    try:
        while True:
            peer.transport.recv_into(memoryview(bytearray(4096)))
    except CaravanError:
        pass


# steps


def hello(version: Version = V8, caps: bytes | None = None) -> Script:
    def step(peer: Peer) -> None:
        peer.request("HELLO")
        peer.raw(codec.hello_reply(version, extension.caps() if caps is None else caps))

    return step


def steps(*parts: Script) -> Script:
    def script(peer: Peer) -> None:
        for part in parts:
            part(peer)

    return script


def close(peer: Peer) -> None:
    peer.close()


def raw(data: bytes) -> Script:
    return lambda peer: peer.raw(data)
