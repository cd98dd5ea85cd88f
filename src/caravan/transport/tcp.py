"""Stream sockets (TCP and Unix) as a Transport, and how they are opened.

TCP_NODELAY everywhere: a decode step is a few small messages that must leave at once. Keep-alive
probes notice a machine that vanished; silence of a live one is the stream's affair.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

from caravan.errors import ConnectError, ConnectionClosed, TransportTimeout
from caravan.transport.base import Buffer
from caravan.transport.endpoint import Endpoint

_TIMEVAL = struct.Struct("@ll")
# What is said of an end that is none of this one's doing.
ENDED = "the connection was closed by the other end"

# The kernel takes at most IOV_MAX parts a call; fewer keep one call short.
_MAX_PARTS = 64


class SocketTransport:
    """A connected stream socket; owns it."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._sock = sock
        self._peer = peer
        self._closed = False
        self._deadline: float | None = None
        self._silence = 0.0
        self._close_lock = threading.Lock()
        sock.settimeout(None)
        _tune(sock)

    @property
    def peer(self) -> str:
        return self._peer

    def __repr__(self) -> str:
        return f"<SocketTransport to {self._peer}{' closed' if self._closed else ''}>"

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, parts: Sequence[Buffer]) -> int:
        try:
            return self._sock.sendmsg(parts[:_MAX_PARTS], (), _AT_ONCE)
        except BlockingIOError:
            return 0
        except TimeoutError as exc:
            raise TransportTimeout("the other end does not take what it is sent") from exc
        except OSError as exc:
            raise ConnectionClosed(_reason(exc)) from exc

    def wait_writable(self, timeout: float) -> bool:
        return self._wait(select.POLLOUT, timeout)

    def wait_readable(self, timeout: float, spin: float = 0.0) -> bool:
        return self._wait(select.POLLIN, timeout, spin)

    def _wait(self, event: int, timeout: float, spin: float = 0.0) -> bool:
        try:
            poll = select.poll()
            poll.register(self._sock.fileno(), event)
            return (spin > 0 and _spin(poll, min(spin, timeout))) or bool(poll.poll(timeout * 1000))
        except (OSError, ValueError) as exc:
            raise ConnectionClosed("the connection was closed") from exc

    def recv_into(self, buffer: memoryview) -> int:
        try:
            if self._deadline is not None:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                self._sock.settimeout(left)
            count = self._sock.recv_into(buffer)
        except TimeoutError as exc:
            raise TransportTimeout("no answer in time") from exc
        except BlockingIOError as exc:
            raise TransportTimeout(f"nothing came for {self._silence:g} s") from exc
        except OSError as exc:
            raise ConnectionClosed(_reason(exc)) from exc
        if count == 0:
            raise ConnectionClosed(ENDED)
        return count

    def set_timeout(self, seconds: float | None) -> None:
        """Bound all `recv_into` from now on together (None: wait for ever); for handshakes."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._sock.settimeout(seconds)

    def bound_silence(self, seconds: float) -> None:
        """From now on `recv_into` raises TransportTimeout when nothing comes for so long.

        The system counts, while somebody waits there; it costs no call.
        """
        self._silence = seconds
        with contextlib.suppress(OSError):
            value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)

    def bound_unacknowledged(self, seconds: float) -> None:
        """The connection breaks when what was sent is not taken by the other machine for so long:
        the system itself would go on for a quarter of an hour."""
        option = getattr(socket, "TCP_USER_TIMEOUT", None)
        if option is not None and self._sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):
                self._sock.setsockopt(socket.IPPROTO_TCP, option, max(1, int(seconds * 1000)))

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        # shutdown first: it wakes a thread that waits in recv, which close alone does not
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


# Giving way returns at once where nobody else wants the processor.
_yield = getattr(os, "sched_yield", lambda: time.sleep(0))
_LET_IN = 0.0003

# Plain numbers: the sum of two flags is a matter of several calls.
_AT_ONCE = int(socket.MSG_DONTWAIT) | int(getattr(socket, "MSG_NOSIGNAL", 0))


def _spin(poll: select.poll, seconds: float) -> bool:
    """Look for an event without sleeping, `seconds` at most, or until the processor is wanted."""
    last = time.monotonic()
    end = last + seconds
    while not poll.poll(0):
        _yield()
        now = time.monotonic()
        # to get on took that long: somebody else was let in
        if now > end or now - last > _LET_IN:
            return False
        last = now
    return True


def _reason(exc: OSError) -> str:
    return exc.strerror.lower() if exc.strerror else str(exc)


def _tune(sock: socket.socket) -> None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(endpoint: Endpoint, timeout: float) -> SocketTransport:
    """A connection to `endpoint`; raises ConnectError within about `timeout` seconds."""
    try:
        if endpoint.path:
            sock = _connect_unix(endpoint.path, timeout)
        else:
            sock = socket.create_connection((endpoint.host, endpoint.port), timeout)
    except socket.gaierror as exc:
        raise ConnectError(f"cannot connect to {endpoint}: unknown host {endpoint.host!r}") from exc
    except TimeoutError as exc:
        raise ConnectError(f"cannot connect to {endpoint}: no answer within {timeout:g} s") from exc
    except (OSError, ValueError) as exc:  # a name with NUL or an overlong label
        reason = _reason(exc) if isinstance(exc, OSError) else "not a name"
        raise ConnectError(f"cannot connect to {endpoint}: {reason}") from exc
    return SocketTransport(sock, str(endpoint))


def _connect_unix(path: str, timeout: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock
