"""The first words on a new connection: HELLO, a proof of the token, and in the extension SESSION
from a head or PEER from another worker.

Runs in the supervisor, one short-lived thread a connection, within a bound of time. Reads exactly
these messages, so that the session process finds every later byte still in the socket.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from caravan.errors import ConnectionClosed, RemoteProtocolError, TransportTimeout
from caravan.transport.endpoint import is_loopback
from caravan.trust.token import Token
from caravan.wire import codec, extension
from caravan.wire.commands import BASE_8, Base, Ext
from caravan.wire.extension import FRAME, Asks, PeerRequest, SessionRequest, Status
from caravan.wire.proof import NO_CERTIFICATE, Challenge
from caravan.wire.versions import V8, Version, left_after_hello

_FIRST: dict[int, Callable[[bytes], SessionRequest | PeerRequest]] = {
    Ext.SESSION: extension.decode_session_request,
    Ext.PEER: extension.decode_peer_request,
}


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms clients are let in.

    Attributes:
        version: of the base protocol, that is announced.
        extension: offer Caravan's extension.
        timeout: seconds that a client has to introduce itself.
        token: what a client of the extension has to know; None for nothing.
        allow_base: whether clients of the base protocol, which cannot show a token, may come from
            other machines, too.
    """

    version: Version = V8
    extension: bool = True
    timeout: float = 10.0
    token: Token | None = None
    allow_base: bool = False

    @property
    def asks(self) -> Asks:
        """What a client of the extension is asked for."""
        return Asks.NOTHING if self.token is None else Asks.TOKEN

    def welcomes_base(self, address: str) -> bool:
        """Whether a client of the base protocol may come from `address`; empty: a Unix socket."""
        return self.allow_base or not address or is_loopback(address)


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a client asked for; `request` is None for one that speaks the base protocol."""

    request: SessionRequest | PeerRequest | None = None
    seq: int = 0


class WrongToken(RemoteProtocolError):
    """The client does not know the token. It is still to be told so, with `refuse_proof`.

    Attributes:
        seq: of its PROVE.
    """

    def __init__(self, seq: int) -> None:
        super().__init__("it does not know the token")
        self.seq = seq


def greet(sock: socket.socket, terms: Terms, address: str = "") -> Greeting:
    """Hear what a client wants, and whether it may.

    Args:
        address: where it comes from; empty: a Unix socket.

    Raises WrongToken, RemoteProtocolError or TransportError; the caller closes the socket then.
    """
    deadline = time.monotonic() + terms.timeout
    header = codec.decode_base_request(_exactly(sock, codec.BASE_REQUEST.size, deadline), BASE_8)
    if header.command.number != Base.HELLO:
        raise RemoteProtocolError(f"the first message is {header.command.name}, not HELLO")
    (caps,) = header.command.request.unpack(_exactly(sock, header.length, deadline))
    extended = terms.extension and extension.agreed(caps) > 0
    if not extended and not terms.welcomes_base(address):
        raise RemoteProtocolError(
            "llama.cpp's programs cannot show a token: from other machines they may come only with"
            " --allow-llama-cpp"
        )
    _send(sock, codec.hello_reply(terms.version, extension.caps(extended, terms.asks)), deadline)
    if not extended:
        _await_command(sock, terms.version, deadline)
        return Greeting()
    if terms.token is not None:
        challenge(sock, terms.token, deadline)
    return _first(sock, deadline)


def challenge(
    sock: socket.socket, token: Token, deadline: float, certificate: bytes = NO_CERTIFICATE
) -> None:
    """AUTH and PROVE: have the client show that it knows the token, then show it the same.

    Raises WrongToken, RemoteProtocolError when it does anything else, and TransportError.
    """
    seq, nonce = _expect(sock, Ext.AUTH, deadline)
    asked = Challenge(token.key, nonce, certificate)
    _answer(sock, Ext.AUTH, seq, asked.nonce, deadline)
    seq, mac = _expect(sock, Ext.PROVE, deadline)
    answer = asked.answer(mac)
    if answer is None:
        raise WrongToken(seq)
    _answer(sock, Ext.PROVE, seq, answer, deadline)


def _expect(sock: socket.socket, number: Ext, deadline: float) -> tuple[int, bytes]:
    """The sequence number and the payload of this command, which nothing may come before."""
    frame = codec.decode_ext_request(_exactly(sock, FRAME.size, deadline))
    if frame.command.number == number:
        return frame.seq, _exactly(sock, frame.length, deadline)
    if frame.command.number in _FIRST and frame.length <= extension.MAX_QUESTION:
        # a head of an older version, perhaps: it understands an answer, if all was read
        _exactly(sock, frame.length, deadline)
        text = b"this worker wants a token"
        reply = codec.ext_frame(frame.command.number, frame.seq, len(text), Status.REFUSED)
        _send(sock, reply + text, deadline)
    if frame.command.number == Ext.BYE:
        raise RemoteProtocolError("it left without showing that it knows the token")
    raise RemoteProtocolError(f"it sent {frame.command.name} without showing a token")


def _answer(sock: socket.socket, number: Ext, seq: int, payload: bytes, deadline: float) -> None:
    _send(sock, codec.ext_frame(number, seq, len(payload)) + payload, deadline)


def _first(sock: socket.socket, deadline: float) -> Greeting:
    """SESSION or PEER."""
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


def refuse(sock: socket.socket, greeting: Greeting, status: Status, text: str) -> None:
    """Answer SESSION or PEER with an error, as far as the socket takes it at once."""
    number = Ext.PEER if isinstance(greeting.request, PeerRequest) else Ext.SESSION
    _refuse(sock, number, greeting.seq, status, text)


def refuse_proof(sock: socket.socket, wrong: WrongToken) -> None:
    """Answer PROVE with an error, as far as the socket takes it at once."""
    _refuse(sock, Ext.PROVE, wrong.seq, Status.REFUSED, "wrong token")


def _refuse(sock: socket.socket, number: Ext, seq: int, status: Status, text: str) -> None:
    data = text.encode()
    try:
        sock.setblocking(False)
        sock.send(codec.ext_frame(number, seq, len(data), status) + data)
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
