"""Opening a way to another worker: the client's side of HELLO and PEER."""

from __future__ import annotations

import time

from caravan.errors import CaravanError, ConnectError, RemoteError
from caravan.transport.base import Connection
from caravan.transport.certificates import TlsClient
from caravan.transport.endpoint import Endpoint
from caravan.transport.tcp import connect
from caravan.trust.entry import Entry
from caravan.trust.token import Token
from caravan.wire import extension
from caravan.wire.commands import Ext
from caravan.wire.extension import PeerRequest, PeerTarget, Status, TlsRequest, public_id

# For each address of a peer: connecting, and each answer of it.
_TIMEOUT = 2.0


def open_way(
    target: PeerTarget, token: Token | None = None, tls: TlsClient | None = None
) -> tuple[Connection, int]:
    """A connection to the first address that is the right worker, and its round trip in ns.

    Args:
        token: this worker's own, which the other one may ask for.
        tls: what this worker has for TLS.

    Raises RemoteError (PEER_LOST) with what every address said.
    """
    reasons: list[str] = []
    for address in target.addresses:
        try:
            return _open(Endpoint.parse(address), target, token, tls)
        except CaravanError as exc:
            text = str(exc)
            reasons.append(text if address in text else f"{address}: {text}")
    raise RemoteError(Status.PEER_LOST, "; ".join(reasons) or "no address to reach it")


def _open(
    endpoint: Endpoint, target: PeerTarget, token: Token | None, tls: TlsClient | None
) -> tuple[Connection, int]:
    transport = connect(endpoint, _TIMEOUT)
    try:
        transport.set_timeout(_TIMEOUT)
        entry = Entry(transport, endpoint, tls)
        entry.hello()
        if not entry.extension:
            raise ConnectError(f"{endpoint} is no Caravan worker")
        entry.satisfy(token, TlsRequest(peer=public_id(target.key)), _TIMEOUT)
        request = PeerRequest(target.route, target.key, target.device)
        start = time.perf_counter_ns()
        entry.ask(Ext.PEER, extension.encode_json(request))
        elapsed = time.perf_counter_ns() - start
        entry.transport.set_timeout(None)
    except BaseException:
        transport.close()
        raise
    return entry.transport, elapsed
