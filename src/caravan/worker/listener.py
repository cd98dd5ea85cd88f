"""Listening sockets: a host name may mean several addresses, and a Unix path is a host too."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from caravan.errors import WorkerStartError
from caravan.transport.endpoint import is_loopback

# Who finds the system's queue full, in a flood of connections, tries again a second later.
_BACKLOG = 512
_UNIX = "unix:"
_MAPPED = "::ffff:"


def listen(host: str, port: int) -> tuple[list[socket.socket], int]:
    """Listening sockets on all addresses of `host`, and the port (a free one for 0).

    Raises WorkerStartError when not even one address can be bound.
    """
    if host.startswith(_UNIX):
        return [_listen_unix(host[len(_UNIX) :])], 0
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    addresses = _addresses(host)
    # "::" is all addresses, and llama.cpp's clients know those of IPv4 only
    both = [address for _, address in addresses] == ["::"]
    for family, address in addresses:
        try:
            sock = _listen_tcp(family, (address, port), both)
        except OSError as exc:
            failure = failure or exc
            if exc.errno == errno.EADDRINUSE and not sockets:
                break
            continue
        sockets.append(sock)
        port = sock.getsockname()[1]
    if not sockets:
        reason = failure.strerror if failure is not None else "no address"
        raise WorkerStartError(f"cannot listen on {host} port {port}: {reason}")
    return sockets, port


def exposed(sockets: list[socket.socket]) -> bool:
    """Whether anybody but this machine can connect to one of them.

    Told by their addresses: what a name stands for is not to be seen in it.
    """
    return any(
        sock.family != socket.AF_UNIX and not is_loopback(sock.getsockname()[0]) for sock in sockets
    )


def plain(address: str) -> str:
    """An address as people know it: one of IPv4 without what IPv6 puts in front of it."""
    return address[len(_MAPPED) :] if address.startswith(_MAPPED) and "." in address else address


def close(sockets: list[socket.socket]) -> None:
    """Close all, and remove the path of a Unix socket."""
    for sock in sockets:
        path = sock.getsockname() if sock.family == socket.AF_UNIX else ""
        sock.close()
        if path:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        raise WorkerStartError(f"cannot listen on {host}: unknown host") from exc
    found = [(info[0], str(info[4][0])) for info in infos]
    # IPv4 first: llama.cpp's clients know no other
    return sorted(dict.fromkeys(found), key=lambda pair: pair[0] != socket.AF_INET)


def _listen_tcp(
    family: socket.AddressFamily, address: tuple[str, int], both: bool
) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        sock.bind(address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _listen_unix(path: str) -> socket.socket:
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as exc:
        sock.close()
        raise WorkerStartError(f"cannot listen on unix:{path}: {exc.strerror or exc}") from exc
    return sock


def _remove_stale(path: str) -> None:
    """A socket file that nobody answers on any more is in the way of a new worker."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                os.unlink(path)
        except OSError:
            return
