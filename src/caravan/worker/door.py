"""`Door`: the worker's side of TLS, on a connection that the supervisor has handed over.

In the session process, on the connection's own thread: the handshake, the proof of the token once
more, now bound to the certificate, and then SESSION or PEER, as elsewhere the supervisor reads
them.
"""

from __future__ import annotations

import secrets
import ssl
import threading
import time
from dataclasses import replace

from caravan.errors import RemoteProtocolError
from caravan.transport.certificates import Tls, fingerprint, server_context
from caravan.transport.tcp import SocketTransport
from caravan.transport.tls import TlsTransport, secure
from caravan.trust.token import Token
from caravan.wire.extension import PeerRequest, Status
from caravan.worker.control import Adopt
from caravan.worker.handshake import (
    INTRODUCTIONS,
    Greeting,
    WrongToken,
    challenge,
    first,
    refuse_on,
    refuse_proof_on,
)
from caravan.worker.line import Line


class Door:
    """See the module. Any thread may call.

    Attributes:
        tls: the worker's certificate, and its CA if clients have to show one of it.
        token: what they have to know; None for nothing.
    """

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self.token: Token | None = None
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._fingerprint = b""

    def enter(self, socket: SocketTransport, adopt: Adopt) -> tuple[TlsTransport, Adopt]:
        """The connection within TLS, and `adopt` with what the client has asked for by now.

        Raises TransportError or RemoteProtocolError, and UsageError when the worker's own files are
        not what they should be; the caller closes the socket then.
        """
        started = time.monotonic()
        context = self._load()
        transport = secure(socket, context, server=True, timeout=adopt.seconds)
        # one that has taken all of its time is late, not wrong
        line = Line(transport, max(0.001, started + adopt.seconds - time.monotonic()))
        if self.token is not None:
            try:
                challenge(line, self.token, self._fingerprint)
            except WrongToken as exc:
                refuse_proof_on(transport, exc)
                raise
        greeting = first(line, INTRODUCTIONS)
        if not _fits(greeting, adopt):
            refuse_on(transport, greeting, Status.REFUSED, "no such session")
            raise RemoteProtocolError("it came for another session")
        transport.set_timeout(None)
        return transport, _completed(adopt, greeting)

    def _load(self) -> ssl.SSLContext:
        """With the first connection, so that a new certificate is there for the next session."""
        with self._lock:
            if self._context is None:
                self._context = server_context(self.tls)
                self._fingerprint = fingerprint(self.tls.cert)
            return self._context


def _fits(greeting: Greeting, adopt: Adopt) -> bool:
    """Whether the client knows the secret of the session that it came for in the clear."""
    request = greeting.request
    if isinstance(request, PeerRequest):
        return not adopt.new and secrets.compare_digest(
            request.key.encode(), adopt.peer_key.encode()
        )
    expected = "" if adopt.new else adopt.key
    key = getattr(request, "session", None)
    return key is not None and secrets.compare_digest(key.encode(), expected.encode())


def _completed(adopt: Adopt, greeting: Greeting) -> Adopt:
    request = greeting.request
    if isinstance(request, PeerRequest):
        return replace(adopt, seq=greeting.seq, device=request.device, route=request.route)
    return replace(adopt, seq=greeting.seq, device=getattr(request, "device", 0))
