"""The first words on a new connection: HELLO, and in the extension SESSION from a head or PEER from
another worker.

Runs in the supervisor, one short-lived thread a connection, within a bound of time. Reads exactly
these messages, so that the session process finds every later byte still in the socket.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from caravan.errors import ConnectionClosed, RemoteProtocolError, TransportTimeout
from caravan.wire import codec, extension
from caravan.wire.commands import BASE_8, Base, Ext
from caravan.wire.extension import FRAME, PeerRequest, SessionRequest
from caravan.wire.versions import Version, left_after_hello

_FIRST: dict[int, Callable[[bytes], SessionRequest | PeerRequest]] = {
    Ext.SESSION: extension.decode_session_request,
    Ext.PEER: extension.decode_peer_request,
}


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a client asked for; `request` is None for one that speaks the base protocol."""

    request: SessionRequest | PeerRequest | None = None
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
        _await_command(sock, version, deadline)
        return Greeting()
    frame = codec.decode_ext_request(_exactly(sock, FRAME.size, deadline))
    if frame.command.number == Ext.BYE and frame.length <= extension.MAX_ERROR_TEXT:
        text = extension.error_text(_exactly(sock, frame.length, deadline))
        raise RemoteProtocolError(f"the head leaves: {text}")
    decode = _FIRST.get(frame.command.number)
    if decode is None:
        raise RemoteProtocolError(f"the first frame is {frame.command.name}, not SESSION or PEER")
    if frame.length > extension.MAX_QUESTION:
        raise RemoteProtocolError(f"{frame.command.name} of {frame.length} bytes")
    return Greeting(decode(_exactly(sock, frame.length, deadline)), frame.seq)


def _await_command(sock: socket.socket, version: Version, deadline: float) -> None:
    """Wait for the first byte after HELLO, and leave it where it is.

    Who goes on does so at once, or may take its time: then it is served all the same. Raises
    RemoteProtocolError when it leaves: all that there is to see of a client that has refused.
    """
    try:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        gone = not sock.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return
    except OSError:
        gone = True
    if gone:
        raise RemoteProtocolError(left_after_hello(version))


def refuse(sock: socket.socket, greeting: Greeting, status: extension.Status, text: str) -> None:
    """Answer SESSION or PEER with an error, as far as the socket takes it at once."""
    data = text.encode()
    number = Ext.PEER if isinstance(greeting.request, PeerRequest) else Ext.SESSION
    sock.setblocking(False)
    try:
        sock.send(codec.ext_frame(number, greeting.seq, len(data), status) + data)
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
