"""The first words on a new connection: HELLO, a proof of the token, and in the extension SESSION
from a head or PEER from another worker.

Runs in the supervisor, one short-lived thread a connection, within a bound of time; what comes
within TLS, in the session process. Reads exactly these messages, so that whoever serves the
connection finds every later byte still in it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from caravan.errors import RemoteProtocolError, TransportError
from caravan.transport.base import Connection
from caravan.transport.endpoint import is_loopback
from caravan.transport.tcp import SocketTransport
from caravan.trust.token import Token
from caravan.wire import codec, extension
from caravan.wire.commands import BASE_8, Base, Ext
from caravan.wire.extension import FRAME, Asks, PeerRequest, SessionRequest, Status, TlsRequest
from caravan.wire.proof import NO_CERTIFICATE, TLS_FOLLOWS, Challenge
from caravan.wire.versions import V8, Version, left_after_hello
from caravan.worker.line import Line

Request = SessionRequest | PeerRequest | TlsRequest

_FIRST: dict[int, Callable[[bytes], Request]] = {
    Ext.SESSION: extension.decode_session_request,
    Ext.PEER: extension.decode_peer_request,
    Ext.TLS: extension.decode_tls_request,
}
INTRODUCTIONS = (Ext.SESSION, Ext.PEER)
_NUMBERS: dict[type, Ext] = {PeerRequest: Ext.PEER, TlsRequest: Ext.TLS}


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms clients are let in.

    Attributes:
        version: of the base protocol, that is announced.
        extension: offer Caravan's extension.
        timeout: seconds that a client has to introduce itself.
        token: what a client of the extension has to know; None for nothing.
        tls: whether the connection goes on in TLS, if it is none on a Unix socket.
        allow_base: whether clients of the base protocol, which cannot show a token, may come from
            other machines, too.
    """

    version: Version = V8
    extension: bool = True
    timeout: float = 10.0
    token: Token | None = None
    tls: bool = False
    allow_base: bool = False

    def asks(self, address: str) -> Asks:
        """What a client of the extension that comes from `address` is asked for."""
        token = Asks.NOTHING if self.token is None else Asks.TOKEN
        # a Unix socket has no link on which anybody could listen
        return token | Asks.TLS if self.tls and address else token

    def welcomes_base(self, address: str) -> bool:
        """Whether a client of the base protocol may come from `address`; empty: a Unix socket."""
        return self.allow_base or not address or is_loopback(address)


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a client asked for; `request` is None for one that speaks the base protocol."""

    request: Request | None = None
    seq: int = 0

    @property
    def new(self) -> bool:
        """Whether it is for a session that is not there yet."""
        request = self.request
        if isinstance(request, PeerRequest):
            return False
        if isinstance(request, TlsRequest) and request.peer:
            return False
        return request is None or not request.session


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
    line = Line(SocketTransport(sock, address), terms.timeout)
    header = codec.decode_base_request(line.exactly(codec.BASE_REQUEST.size), BASE_8)
    if header.command.number != Base.HELLO:
        raise RemoteProtocolError(f"the first message is {header.command.name}, not HELLO")
    (caps,) = header.command.request.unpack(line.exactly(header.length))
    extended = terms.extension and extension.agreed(caps) > 0
    if not extended and not terms.welcomes_base(address):
        raise RemoteProtocolError(
            "llama.cpp's programs cannot show a token: from other machines they may come only with"
            " --allow-llama-cpp"
        )
    asks = terms.asks(address)
    line.send(codec.hello_reply(terms.version, extension.caps(extended, asks)))
    if not extended:
        _await_command(sock, terms.version, line.left)
        return Greeting()
    secured = Asks.TLS in asks
    if terms.token is not None:
        challenge(line, terms.token, TLS_FOLLOWS if secured else NO_CERTIFICATE)
    return first(line, (Ext.TLS,) if secured else INTRODUCTIONS)


def challenge(line: Line, token: Token, certificate: bytes) -> None:
    """AUTH and PROVE: have the client show that it knows the token, then show it the same.

    Raises WrongToken, RemoteProtocolError when it does anything else, and TransportError.
    """
    seq, nonce = _expect(line, Ext.AUTH)
    asked = Challenge(token.key, nonce, certificate)
    _answer(line, Ext.AUTH, seq, asked.nonce)
    seq, mac = _expect(line, Ext.PROVE)
    answer = asked.answer(mac)
    if answer is None:
        raise WrongToken(seq)
    _answer(line, Ext.PROVE, seq, answer)


def _expect(line: Line, number: Ext) -> tuple[int, bytes]:
    """The sequence number and the payload of this command, which nothing may come before."""
    frame = codec.decode_ext_request(line.exactly(FRAME.size))
    if frame.command.number == number:
        return frame.seq, line.exactly(frame.length)
    if frame.command.number in _FIRST and frame.length <= extension.MAX_QUESTION:
        _turn_down(line, frame, "this worker wants a token")
    if frame.command.number == Ext.BYE:
        raise RemoteProtocolError("it left without showing that it knows the token")
    raise RemoteProtocolError(f"it sent {frame.command.name} without showing a token")


def _turn_down(line: Line, frame: codec.Header, text: str) -> None:
    """For a head of an older version, perhaps: it understands an answer, if all was read."""
    line.exactly(frame.length)
    data = text.encode()
    reply = codec.ext_frame(frame.command.number, frame.seq, len(data), Status.REFUSED)
    line.send(reply + data)


def _answer(line: Line, number: Ext, seq: int, payload: bytes) -> None:
    line.send(codec.ext_frame(number, seq, len(payload)) + payload)


def first(line: Line, wanted: Sequence[Ext]) -> Greeting:
    """What a client begins with, which has to be one of these.

    Raises RemoteProtocolError when it is anything else, and TransportError.
    """
    frame = codec.decode_ext_request(line.exactly(FRAME.size))
    number = frame.command.number
    if number == Ext.BYE and frame.length <= extension.MAX_ERROR_TEXT:
        text = extension.error_text(line.exactly(frame.length))
        raise RemoteProtocolError(f"the head leaves: {text}")
    if number not in wanted:
        if number in _FIRST and frame.length <= extension.MAX_QUESTION and Ext.TLS in wanted:
            _turn_down(line, frame, "this worker wants TLS")
        names = " or ".join(Ext(one).name for one in wanted)
        raise RemoteProtocolError(f"the first frame is {frame.command.name}, not {names}")
    if frame.length > extension.MAX_QUESTION:
        raise RemoteProtocolError(f"{frame.command.name} of {frame.length} bytes")
    return Greeting(_FIRST[number](line.exactly(frame.length)), frame.seq)


def _await_command(sock: socket.socket, version: Version, seconds: float) -> None:
    """Wait for the first byte after HELLO, and leave it where it is.

    Who goes on does so at once, or may take its time: then it is served all the same. Raises
    RemoteProtocolError when it leaves: all that there is to see of a client that has refused.
    """
    try:
        sock.settimeout(max(seconds, 0.001))
        gone = not sock.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return
    except OSError:
        gone = True
    if gone:
        raise RemoteProtocolError(left_after_hello(version))


def accept(sock: socket.socket, greeting: Greeting) -> None:
    """Answer TLS: the worker's side of its handshake is next.

    Another process has the connection already, and sets how it waits; so nothing is set here.
    """
    with contextlib.suppress(OSError):
        sock.send(codec.ext_frame(Ext.TLS, greeting.seq, 0), socket.MSG_DONTWAIT)


def refuse(sock: socket.socket, greeting: Greeting, status: Status, text: str) -> None:
    """Answer SESSION, PEER or TLS with an error, as far as the socket takes it at once."""
    refuse_on(SocketTransport(sock, ""), greeting, status, text)


def refuse_on(connection: Connection, greeting: Greeting, status: Status, text: str) -> None:
    """The same, on a connection of any kind."""
    number = _NUMBERS.get(type(greeting.request), Ext.SESSION)
    _tell(connection, number, greeting.seq, status, text)


def refuse_proof(sock: socket.socket, wrong: WrongToken) -> None:
    """Answer PROVE with an error, as far as the socket takes it at once."""
    refuse_proof_on(SocketTransport(sock, ""), wrong)


def refuse_proof_on(connection: Connection, wrong: WrongToken) -> None:
    """The same, on a connection of any kind."""
    _tell(connection, Ext.PROVE, wrong.seq, Status.REFUSED, "wrong token")


def _tell(connection: Connection, number: Ext, seq: int, status: Status, text: str) -> None:
    data = text.encode()
    with contextlib.suppress(TransportError):
        connection.send([codec.ext_frame(number, seq, len(data), status), data])
