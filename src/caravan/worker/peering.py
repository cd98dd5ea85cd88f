"""Opening a way to another worker: the client's side of HELLO and PEER."""

from __future__ import annotations

import time

from caravan.errors import CaravanError, ConnectError, RemoteError, RemoteProtocolError
from caravan.transport.endpoint import Endpoint
from caravan.transport.reader import Reader
from caravan.transport.tcp import SocketTransport, connect
from caravan.wire import codec, extension
from caravan.wire.commands import HELLO_REPLY, Ext
from caravan.wire.extension import FRAME, PeerRequest, PeerTarget, Status

# For each address of a peer: connecting, and each answer of it.
_TIMEOUT = 2.0


def open_way(target: PeerTarget) -> tuple[SocketTransport, int]:
    """A connection to the first address that is the right worker, and its round trip in ns.

    Raises RemoteError (PEER_LOST) with what every address said.
    """
    reasons: list[str] = []
    for address in target.addresses:
        try:
            return _open(Endpoint.parse(address), target)
        except CaravanError as exc:
            text = str(exc)
            reasons.append(text if address in text else f"{address}: {text}")
    raise RemoteError(Status.PEER_LOST, "; ".join(reasons) or "no address to reach it")


def _open(endpoint: Endpoint, target: PeerTarget) -> tuple[SocketTransport, int]:
    transport = connect(endpoint, _TIMEOUT)
    try:
        transport.set_timeout(_TIMEOUT)
        reader = Reader(transport)
        _hello(transport, reader, endpoint)
        start = time.perf_counter_ns()
        _introduce(transport, reader, PeerRequest(target.route, target.key, target.device))
        elapsed = time.perf_counter_ns() - start
        transport.set_timeout(None)
    except BaseException:
        transport.close()
        raise
    return transport, elapsed


def _hello(transport: SocketTransport, reader: Reader, endpoint: Endpoint) -> None:
    transport.send([codec.hello_request(extension.caps())])
    (length,) = codec.BASE_REPLY.unpack(reader.read(codec.BASE_REPLY.size))
    if length != HELLO_REPLY.size:
        raise RemoteProtocolError(f"{endpoint} answers, but is no RPC worker")
    _version, caps = codec.decode_hello_reply(reader.read(length))
    if not extension.agreed(caps):
        raise ConnectError(f"{endpoint} is no Caravan worker")


def _introduce(transport: SocketTransport, reader: Reader, request: PeerRequest) -> None:
    payload = extension.encode_json(request)
    transport.send([codec.ext_frame(Ext.PEER, 1, len(payload)), payload])
    number, status, _flags, _seq, length = FRAME.unpack(reader.read(FRAME.size))
    if number != Ext.PEER or length > extension.MAX_ERROR_TEXT:
        raise RemoteProtocolError("the peer answered PEER with something else")
    text = reader.read(length)
    if status:
        raise RemoteError(status, extension.error_text(text))
