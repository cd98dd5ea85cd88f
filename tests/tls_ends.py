"""Certificates for tests, made once, and connected pairs that speak TLS."""

from __future__ import annotations

import atexit
import functools
import shutil
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from caravan.transport import authority
from caravan.transport.certificates import Tls, client_context, server_context
from caravan.transport.tcp import SocketTransport
from caravan.transport.tls import TlsTransport, secure

PATIENCE = 30.0


class Certificates:
    """What `caravan tls init` writes, in a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        authority.init(directory, authority.usual())
        authority.add(directory, [authority.Wanted("expired")], days=0)

    def path(self, name: str) -> str:
        return str(self.directory / f"{name}.pem")

    def tls(self, name: str = "", ca: bool = False) -> Tls:
        """Of the machine of that name; an empty one has no certificate."""
        pair = (self.path(name), self.path(f"{name}-key")) if name else ("", "")
        return Tls(self.path("ca") if ca else "", *pair)


@functools.cache
def certificates(number: int = 0) -> Certificates:
    """One CA for all tests, and others, if need be."""
    directory = tempfile.mkdtemp(prefix="caravan-tls-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Certificates(Path(directory))


def sockets() -> tuple[SocketTransport, SocketTransport]:
    """Connected over TCP: the one that connected, and the one that accepted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        two, _ = server.accept()
    return SocketTransport(one, "the server"), SocketTransport(two, "the client")


def shake(
    ends: tuple[SocketTransport, SocketTransport], client: ssl.SSLContext, server: ssl.SSLContext
) -> tuple[TlsTransport, TlsTransport]:
    """Both ends of a connection, after the handshake."""
    served: list[TlsTransport] = []

    def serve() -> None:
        served.append(secure(ends[1], server, server=True, timeout=PATIENCE))

    thread = threading.Thread(target=serve)
    thread.start()
    one = secure(ends[0], client, server=False, timeout=PATIENCE)
    thread.join()
    for end in (one, *served):
        end.set_timeout(None)
    return one, served[0]


@contextmanager
def tls_pair(tmp_path: Path) -> Iterator[tuple[TlsTransport, TlsTransport]]:
    own = certificates()
    context = client_context(own.tls(ca=True)), server_context(own.tls("worker"))
    one, two = shake(sockets(), *context)
    yield one, two
    one.close()
    two.close()
