"""`TlsTransport`: TLS 1.3 over a connected socket, as a Transport.

Two threads use a transport at once, and a TLS object of Python must not be: one lock is held while
bytes are encrypted or decrypted, never while anybody waits for the socket. What a certificate must
be is in the context; see `certificates`. Knows nothing of what it carries.
"""

from __future__ import annotations

import contextlib
import hashlib
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from caravan.errors import (
    CaravanError,
    ConnectError,
    ConnectionClosed,
    LinkDamaged,
    TransportTimeout,
)
from caravan.transport.base import Buffer
from caravan.transport.tcp import ENDED, SocketTransport
from caravan.transport.tls_words import DAMAGED, broken, refused

# What a record of TLS carries at most, and how much is encrypted, or read off the socket, at once.
_RECORD = 16 << 10
_BATCH = 256 << 10
# What the other end makes us say besides (answers to key updates) without reading any of it.
_MOST_ASIDE = 64 << 10
_CLOSED = "the connection was closed"
# How long who cannot send waits for whoever reads to come upon the reason.
_LAST_WORDS = 0.2


class TlsTransport:
    """See the module; made by `secure`, which also does the handshake.

    What `send` has not taken must be what the next one begins with: some of it may be encrypted
    already. `wait_readable` may be true of a part of a record, for the rest of which `recv_into`
    then waits.

    Args:
        socket: connected; this owns it from here on.
        server: whether this is the end that accepted.
    """

    def __init__(self, socket: SocketTransport, context: ssl.SSLContext, *, server: bool) -> None:
        self._socket = socket
        self._lock = threading.Lock()
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._left = memoryview(b"")  # encrypted, and not taken by the socket
        self._records: deque[tuple[int, int]] = deque()  # its records: bytes there, and of what
        self._pulled = memoryview(bytearray(_BATCH))
        self._ready = memoryview(b"")  # decrypted, and not read
        self._failure: ConnectionClosed | None = None
        self._over = threading.Event()  # nothing more will be read
        self._closed = False

    @property
    def peer(self) -> str:
        return self._socket.peer

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the other end's certificate (DER); empty where it has shown none."""
        found = self._tls.getpeercert(binary_form=True)
        return hashlib.sha256(found).digest() if found else b""

    def __repr__(self) -> str:
        return f"<TlsTransport to {self.peer}{' closed' if self._closed else ''}>"

    def fileno(self) -> int:
        return self._socket.fileno()

    def set_timeout(self, seconds: float | None) -> None:
        """Bound all `recv_into` from now on together (None: wait for ever)."""
        self._socket.set_timeout(seconds)

    def bound_silence(self, seconds: float) -> None:
        """See `SocketTransport`."""
        self._socket.bound_silence(seconds)

    def bound_unacknowledged(self, seconds: float) -> None:
        """See `SocketTransport`."""
        self._socket.bound_unacknowledged(seconds)

    # the handshake

    def handshake(self, timeout: float) -> None:
        """Agree on keys; raises ConnectError with what is wrong with the other end, or
        TransportTimeout. A client learns what is wrong with itself only when it reads."""
        deadline = time.monotonic() + timeout
        self._socket.set_timeout(timeout)
        done = False
        while not done:
            failure: ssl.SSLError | None = None
            with self._lock:
                try:
                    self._tls.do_handshake()
                    done = True
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLError as exc:
                    failure = exc
                data = self._outgoing.read()
            self._send_all(data, deadline)
            if failure is not None:
                raise ConnectError(refused(failure)) from failure
            if not done:
                self._pull()

    def _send_all(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        while left:
            left = left[self._socket.send([left]) :]
            if left and not self._socket.wait_writable(max(0.0, deadline - time.monotonic())):
                raise TransportTimeout("no answer in time")

    # sending

    def send(self, parts: Sequence[Buffer]) -> int:
        if self._left:
            taken = self._push()
            if taken or self._left:
                return taken
        with self._lock:
            self._encrypt(parts)
        return self._push()

    def _encrypt(self, parts: Sequence[Buffer]) -> None:
        """Make records of the first bytes, behind what TLS itself has to say."""
        if self._closed or self._failure is not None:
            raise self._failure or ConnectionClosed(_CLOSED)
        outgoing, before = self._outgoing, 0
        try:
            for piece in islice(_pieces(parts), _BATCH // _RECORD):
                self._tls.write(piece)
                size = outgoing.pending
                self._records.append((size - before, len(piece)))
                before = size
        except ssl.SSLError as exc:
            raise self._break(exc) from exc
        self._left = memoryview(outgoing.read())

    def _push(self) -> int:
        """Give the socket what it takes; how many bytes are gone by that."""
        try:
            sent = self._socket.send([self._left])
        except ConnectionClosed as exc:
            # its last words may say why
            self._over.wait(_LAST_WORDS)
            raise (self._failure or exc) from exc
        self._left = self._left[sent:]
        taken = 0
        while sent:
            size, plain = self._records[0]
            if sent < size:
                self._records[0] = (size - sent, plain)
                break
            sent -= size
            taken += plain
            self._records.popleft()
        return taken

    def wait_writable(self, timeout: float) -> bool:
        return self._socket.wait_writable(timeout)

    # receiving

    def recv_into(self, buffer: memoryview) -> int:
        while True:
            with self._lock:
                count = self._take(buffer)
            if count:
                return count
            self._pull()

    def _pull(self) -> None:
        """Wait for bytes of the socket; by one thread at a time."""
        try:
            count = self._socket.recv_into(self._pulled)
        except ConnectionClosed:
            self._over.set()
            raise
        with self._lock:
            self._incoming.write(self._pulled[:count])

    def _take(self, buffer: memoryview) -> int:
        """Decrypt what is there, as far as there is room."""
        if self._closed:
            raise ConnectionClosed(_CLOSED)
        done = min(len(self._ready), len(buffer))
        if done:
            buffer[:done] = self._ready[:done]
            self._ready = self._ready[done:]
        while done < len(buffer) and self._failure is None:
            count = self._read(buffer[done:])
            done += count
            if not (count and self._unread()):
                break
        if not done and self._failure is not None:
            raise self._failure
        return done

    def _read(self, buffer: memoryview) -> int:
        """Decrypt a record, or a part of one; 0 when there is none, or an end: see `_failure`."""
        try:
            count = self._tls.read(len(buffer), buffer)
        except ssl.SSLWantReadError:
            if self._outgoing.pending > _MOST_ASIDE:
                self._fail("the other end asks for new keys without end")
            return 0
        except ssl.SSLError as exc:
            self._break(exc)
            return 0
        if not count:
            self._fail(ENDED)
        return int(count)

    def _unread(self) -> bool:
        """Whether there is more than was decrypted, if only a part of a record."""
        return bool(self._tls.pending() or self._incoming.pending)

    def _break(self, exc: ssl.SSLError) -> ConnectionClosed:
        text = broken(exc)
        failure = self._fail(text, LinkDamaged if text.startswith(DAMAGED) else ConnectionClosed)
        failure.__cause__ = exc
        return failure

    def _fail(self, text: str, kind: type[ConnectionClosed] = ConnectionClosed) -> ConnectionClosed:
        if self._failure is None:
            self._failure = kind(text)
        self._over.set()
        return self._failure

    def wait_readable(self, timeout: float, spin: float = 0.0) -> bool:
        with self._lock:
            if not (self._ready or self._failure) and self._unread():
                data = memoryview(bytearray(_RECORD))
                self._ready = data[: self._read(data)]
            if self._ready or self._failure:
                return True
        return self._socket.wait_readable(timeout, spin)

    # the end

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._over.set()
            # only behind whole records
            last = b"" if self._left else self._farewell()
        with contextlib.suppress(CaravanError):
            if last:
                self._socket.send([last])
        self._socket.close()

    def _farewell(self) -> bytes:
        """That this is the end, or what was wrong with what came, for the other end."""
        with contextlib.suppress(ssl.SSLError, ValueError):
            self._tls.unwrap()
        return self._outgoing.read()


def secure(
    socket: SocketTransport, context: ssl.SSLContext, *, server: bool, timeout: float
) -> TlsTransport:
    """TLS on a connection on which both ends know that it comes next.

    Raises ConnectError, ConnectionClosed or TransportTimeout, and closes the connection then.
    """
    transport = TlsTransport(socket, context, server=server)
    try:
        transport.handshake(timeout)
    except BaseException:
        socket.close()
        raise
    return transport


def _pieces(parts: Sequence[Buffer]) -> Iterator[Buffer]:
    """The parts in pieces of a record each: what is short is joined, what is long is not copied."""
    joined = bytearray()
    for part in parts:
        view = memoryview(part)
        if joined or len(view) < _RECORD:
            head = view[: _RECORD - len(joined)]
            joined += head
            if len(joined) < _RECORD:
                continue
            yield joined
            joined, view = bytearray(), view[len(head) :]
        whole = len(view) - len(view) % _RECORD
        for start in range(0, whole, _RECORD):
            yield view[start : start + _RECORD]
        joined += view[whole:]
    if joined:
        yield joined
