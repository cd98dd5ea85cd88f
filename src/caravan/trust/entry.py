"""`Entry`: a client's connection to a worker, from HELLO up to SESSION or PEER.

Heads come in by it, and workers that open a way to another one: both show the same things in the
same order. What goes wrong on the way is raised as it is; the caller knows what it was for.
"""

from __future__ import annotations

from caravan.errors import (
    AuthenticationError,
    ConnectError,
    RemoteError,
    RemoteProtocolError,
)
from caravan.transport.endpoint import Endpoint
from caravan.transport.reader import Reader
from caravan.transport.tcp import SocketTransport
from caravan.trust.token import VARIABLE, Token
from caravan.wire import codec, extension
from caravan.wire.commands import EXT, HELLO_REPLY, Ext
from caravan.wire.extension import FRAME, Asks, Status
from caravan.wire.proof import NO_CERTIFICATE, Claim
from caravan.wire.versions import V8, Version


class Entry:
    """A connection that has not introduced itself yet.

    Attributes:
        reader: what has come and was not read; it belongs to whoever goes on.
        version: of the base protocol, as the worker announces it.
        extension: whether both ends speak the extension.
        asks: what the worker asks for.
    """

    def __init__(self, transport: SocketTransport, endpoint: Endpoint) -> None:
        self.transport = transport
        self.endpoint = endpoint
        self.reader = Reader(transport)
        self.version: Version = V8
        self.extension = False
        self.asks = Asks.NOTHING
        self._seq = 0

    def __repr__(self) -> str:
        return f"<Entry at {self.endpoint}>"

    def hello(self, use_extension: bool = True) -> None:
        """Say HELLO. Raises RemoteProtocolError for what is no worker, VersionMismatch for one that
        asks for what is not known here, and TransportError."""
        self.transport.send([codec.hello_request(extension.caps(use_extension))])
        (length,) = codec.BASE_REPLY.unpack(self.reader.read(codec.BASE_REPLY.size))
        if length != HELLO_REPLY.size:
            raise RemoteProtocolError(f"{self.endpoint} answers, but is no RPC worker")
        self.version, caps = codec.decode_hello_reply(self.reader.read(length))
        self.extension = use_extension and extension.agreed(caps) > 0
        self.asks = extension.asked(caps) if self.extension else Asks.NOTHING

    def satisfy(self, token: Token | None) -> None:
        """Show what the worker asks for, and be shown that it knows the token.

        Raises AuthenticationError when one of them does not, ConnectError for what cannot be shown,
        RemoteError for another refusal, and TransportError.
        """
        if Asks.TOKEN in self.asks:
            self.prove(token)
        if Asks.TLS in self.asks:
            raise ConnectError(f"the worker at {self.endpoint} asks for TLS, which is not here yet")

    def prove(self, token: Token | None, certificate: bytes = NO_CERTIFICATE) -> None:
        """AUTH and PROVE; see `satisfy` for what is raised."""
        worker = f"the worker at {self.endpoint}"
        if token is None:
            raise AuthenticationError(f"{worker} wants a token: set {VARIABLE} or --token-file")
        claim = Claim(token.key, certificate)
        nonce = self.ask(Ext.AUTH, claim.nonce)
        try:
            mac = self.ask(Ext.PROVE, claim.prove(nonce))
        except RemoteError as exc:
            if exc.code != Status.REFUSED:
                raise
            raise AuthenticationError(f"{worker} refused the token") from exc
        if not claim.believes(mac):
            raise AuthenticationError(f"{worker} could not prove that it knows the token")

    def ask(self, number: Ext, payload: bytes) -> bytes:
        """One command, and its answer. Raises RemoteError for one that is an error,
        RemoteProtocolError for one that is none, and TransportError."""
        self._seq += 1
        self.transport.send([codec.ext_frame(number, self._seq, len(payload)), payload])
        answered, status, _flags, _seq, length = FRAME.unpack(self.reader.read(FRAME.size))
        if answered != number or length > _most(number, status):
            raise RemoteProtocolError(f"{self.endpoint} answered {number.name} with something else")
        data = self.reader.read(length)
        if status:
            raise RemoteError(status, extension.error_text(data))
        reply = EXT[number].reply
        assert reply is not None
        if not EXT[number].reply_tail and length != reply.size:
            raise RemoteProtocolError(f"{self.endpoint} answered {number.name} with {length} bytes")
        return data


def _most(number: Ext, status: int) -> int:
    """Bytes of an answer that are read at all."""
    reply_tail = EXT[number].reply_tail and not status
    return extension.MAX_JSON if reply_tail else extension.MAX_ERROR_TEXT
