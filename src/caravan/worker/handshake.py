"""The first words on a new connection: HELLO, and SESSION from a head that speaks the extension.

Runs in the supervisor, one short-lived thread a connection, within a bound of time. Reads exactly
these messages, so that the session process finds every later byte still in the socket.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from caravan.errors import ConnectionClosed, RemoteProtocolError, TransportTimeout
from caravan.wire import codec, extension
from caravan.wire.commands import BASE_8, EXT, Base, Ext
from caravan.wire.extension import FRAME, SessionRequest
from caravan.wire.versions import Version


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a client asked for; `request` is None for one that speaks the base protocol."""

    request: SessionRequest | None = None
    seq: int = 0


def greet(sock: socket.socket, version: Version, offer: bool, timeout: float) -> Greeting:
    """Raises TransportError or RemoteProtocolError; the caller closes the socket then."""
    deadline = time.monotonic() + timeout
    header = codec.decode_base_request(_exactly(sock, codec.BASE_REQUEST.size, deadline), BASE_8)
    if header.command.number != Base.HELLO:
        raise RemoteProtocolError(f"the first message is {header.command.name}, not HELLO")
    (caps,) = header.command.request.unpack(_exactly(sock, header.length, deadline))
    extended = offer and extension.agreed(caps) > 0
    _send(sock, codec.hello_reply(version, extension.caps(extended)), deadline)
    if not extended:
        return Greeting()
    frame = codec.decode_ext_request(_exactly(sock, FRAME.size, deadline))
    if frame.command is not EXT[Ext.SESSION]:
        raise RemoteProtocolError(f"the first frame is {frame.command.name}, not SESSION")
    if frame.length > extension.MAX_JSON:
        raise RemoteProtocolError(f"a SESSION of {frame.length} bytes")
    payload = _exactly(sock, frame.length, deadline)
    return Greeting(extension.decode_session_request(payload), frame.seq)


def refuse(sock: socket.socket, seq: int, status: extension.Status, text: str) -> None:
    """Answer SESSION with an error, as far as the socket takes it at once."""
    data = text.encode()
    sock.setblocking(False)
    try:
        sock.send(codec.ext_frame(Ext.SESSION, seq, len(data), status) + data)
    except OSError:
        return


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            part = sock.recv(min(size - len(data), 64 << 10))
        except TimeoutError as exc:
            raise TransportTimeout("the client was silent for too long") from exc
        except OSError as exc:
            raise ConnectionClosed(str(exc)) from exc
        if not part:
            raise ConnectionClosed("the client left before it was served")
        data += part
    return bytes(data)


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    try:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.sendall(data)
    except TimeoutError as exc:
        raise TransportTimeout("the client was silent for too long") from exc
    except OSError as exc:
        raise ConnectionClosed(str(exc)) from exc
