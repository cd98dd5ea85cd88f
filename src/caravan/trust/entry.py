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
from caravan.transport.base import Connection
from caravan.transport.certificates import TlsClient
from caravan.transport.endpoint import Endpoint
from caravan.transport.reader import Reader
from caravan.transport.tcp import SocketTransport
from caravan.transport.tls import secure
from caravan.trust.token import VARIABLE, Token
from caravan.wire import codec, extension
from caravan.wire.commands import EXT, HELLO_REPLY, Ext
from caravan.wire.extension import FRAME, Asks, Status, TlsRequest
from caravan.wire.proof import NO_CERTIFICATE, TLS_FOLLOWS, Claim
from caravan.wire.versions import V8, Version

_NEW = TlsRequest()


class Entry:
    """A connection that has not introduced itself yet.

    Args:
        tls: what there is for TLS.

    Attributes:
        transport: what SESSION or PEER goes on, and all that follows.
        reader: what has come and was not read; it belongs to whoever goes on.
        version: of the base protocol, as the worker announces it.
        extension: whether both ends speak the extension.
        asks: what the worker asks for.
    """

    def __init__(
        self, transport: SocketTransport, endpoint: Endpoint, tls: TlsClient | None = None
    ) -> None:
        self.transport: Connection = transport
        self.endpoint = endpoint
        self._socket = transport
        self._tls = tls
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

    def satisfy(
        self, token: Token | None, request: TlsRequest = _NEW, timeout: float = 30.0
    ) -> None:
        """Show what the worker asks for, and be shown that it is the right one.

        Args:
            request: which of the worker's processes the connection is for.
            timeout: seconds for the handshake of TLS.

        Raises AuthenticationError when one of them does not know the token, ConnectError for what
        cannot be shown or is not what this end wants, RemoteError for another refusal, and
        TransportError.
        """
        self._check_tls(token)
        secured = Asks.TLS in self.asks
        if Asks.TOKEN in self.asks:
            self.prove(token, TLS_FOLLOWS if secured else NO_CERTIFICATE)
        if secured:
            certificate = self._secure(request, timeout)
            if Asks.TOKEN in self.asks:
                self._prove_again(token, certificate)

    def _check_tls(self, token: Token | None) -> None:
        """Raises ConnectError where TLS is wanted and not to be had, or would show nothing."""
        worker = f"the worker at {self.endpoint}"
        knows_ca = self._tls is not None and self._tls.knows_ca
        if Asks.TLS not in self.asks:
            if self.endpoint.tls or (knows_ca and not self.endpoint.path):
                wanted = "tls://" if self.endpoint.tls else "--tls-ca"
                raise ConnectError(
                    f"{worker} does not speak TLS, which {wanted} asks for: a worker needs"
                    " --tls-cert and --tls-key for that"
                )
        elif not knows_ca and (token is None or Asks.TOKEN not in self.asks):
            raise ConnectError(
                f"{worker} asks for TLS, and nothing here tells whether it is the right one: give"
                " the CA of its certificate (--tls-ca), or the worker a token"
            )

    def _secure(self, request: TlsRequest, timeout: float) -> bytes:
        """TLS, and the fingerprint of the worker's certificate."""
        self.ask(Ext.TLS, extension.encode_json(request))
        if self.reader.buffered():
            raise RemoteProtocolError(f"{self.endpoint} went on in the clear instead of TLS")
        context = (self._tls or TlsClient()).context
        try:
            transport = secure(self._socket, context, server=False, timeout=timeout)
        except ConnectError as exc:
            raise ConnectError(f"the worker at {self.endpoint}: {exc}") from exc
        transport.set_timeout(timeout)
        self.transport, self.reader = transport, Reader(transport)
        return transport.fingerprint

    def _prove_again(self, token: Token | None, certificate: bytes) -> None:
        try:
            self.prove(token, certificate)
        except AuthenticationError as exc:
            # what was shown in the clear was right
            raise AuthenticationError(
                f"the worker at {self.endpoint} does not know the certificate that came from there:"
                " somebody sits in the middle"
            ) from exc

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
            raise AuthenticationError(
                f"{worker} refused the token: its own is another one"
            ) from exc
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
