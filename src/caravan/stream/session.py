"""`Session`: the head's connections to one worker, and the handshake that opens them.

One connection a device where both ends speak the extension; one connection for all devices of a
ggml-rpc server, which serves a single client.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from caravan.errors import (
    CaravanError,
    ConnectError,
    ConnectionClosed,
    ProtocolError,
    RemoteError,
    RemoteProtocolError,
    TransportError,
    TransportTimeout,
    VersionMismatch,
    WorkerLost,
)
from caravan.stream.base_link import BaseLink, ask
from caravan.stream.dispatcher import Stream
from caravan.stream.ext_link import ExtLink
from caravan.stream.framing import BaseFraming, ExtFraming
from caravan.stream.link import DeviceLink
from caravan.stream.reach import Reach
from caravan.stream.watchdog import Watchdog
from caravan.transport.endpoint import Endpoint
from caravan.transport.reader import Reader
from caravan.transport.tcp import SocketTransport, connect
from caravan.wire import codec, extension
from caravan.wire.commands import HELLO_REPLY, Base, Ext, base_table
from caravan.wire.extension import DeviceInfo, SessionReply, SessionRequest
from caravan.wire.versions import Version, check_server

_MAX_DEVICES = 16
CLOSE_SECONDS = 5.0
_BUSY = "a busy llama.cpp server, which serves one client at a time"


@dataclass(frozen=True, slots=True)
class Identity:
    """What this head says of itself: its own version, the engine's, and the engine's op names."""

    caravan: str
    engine: str
    ops: tuple[str, ...]


@dataclass(slots=True)
class _Wire:
    """A connection after HELLO."""

    transport: SocketTransport
    reader: Reader
    version: Version
    extension: bool


class Session:
    """Links to the devices of one worker. Made by `open_session`.

    Attributes:
        engine: version of the worker's ggml, where it says.
    """

    def __init__(
        self, endpoint: Endpoint, links: list[DeviceLink], version: Version, engine: str = ""
    ) -> None:
        self.endpoint = endpoint
        self.links = links
        self.version = version
        self.engine = engine

    def __repr__(self) -> str:
        return f"<Session at {self.endpoint}, protocol {self.version}, {len(self.links)} devices>"

    def close(self, deadline: float | None = None) -> None:
        """Take leave and close every connection. Idempotent.

        Args:
            deadline: of time.monotonic, for what is still queued; in a few seconds if it is None.
        """
        if deadline is None:
            deadline = time.monotonic() + CLOSE_SECONDS
        for link in self.links:
            link.bye()
        for stream in dict.fromkeys(link.stream for link in self.links):
            stream.close(timeout=max(0.0, deadline - time.monotonic()))


def open_session(
    endpoint: Endpoint,
    identity: Identity,
    name: Callable[[int], str],
    watchdog: Watchdog,
    *,
    timeout: float = 30.0,
    use_extension: bool = True,
    direct: bool = True,
) -> Session:
    """Connect to the worker at `endpoint`.

    Args:
        name: gives the head's name for the worker's device of a number, for errors.
        timeout: seconds, for connecting and for every later silence.
        direct: whether copies to other workers may go there without passing the head.

    Raises ConnectError when nobody answers, VersionMismatch or RemoteProtocolError when what
    answers is no worker that goes together with this head.
    """
    wire = _hello(endpoint, timeout, use_extension)
    engine = ""
    try:
        if wire.extension:
            reply = _join(endpoint, wire, identity, "", 0, timeout)
            engine = reply.engine
            links = _open_devices(endpoint, wire, identity, reply, name, watchdog, timeout, direct)
        else:
            links = _open_base(endpoint, wire, name, watchdog, timeout)
    except BaseException as exc:
        if wire.extension and isinstance(exc, ProtocolError):
            _leave(wire.transport, exc)
        wire.transport.close()
        raise
    return Session(endpoint, links, wire.version, engine)


def _hello(endpoint: Endpoint, timeout: float, use_extension: bool) -> _Wire:
    try:
        transport = connect(endpoint, timeout)
    except ConnectError as exc:
        if isinstance(exc.__cause__, TimeoutError):
            # also with so many waiting for such a server that its system takes no more
            raise ConnectError(f"{exc}: unreachable, or {_BUSY}") from exc
        raise
    try:
        transport.set_timeout(timeout)
        transport.send([codec.hello_request(extension.caps(use_extension))])
        reader = Reader(transport)
        (length,) = codec.BASE_REPLY.unpack(reader.read(codec.BASE_REPLY.size))
        if length != HELLO_REPLY.size:
            raise RemoteProtocolError(f"{endpoint} answers, but is no RPC worker")
        version, caps = codec.decode_hello_reply(reader.read(length))
        extended = use_extension and extension.agreed(caps) > 0
        spoken = _check_version(transport, endpoint, version, extended)
    except TransportTimeout as exc:
        transport.close()
        raise ConnectError(
            f"{endpoint} accepted the connection but did not answer within {timeout:g} s:"
            f" perhaps {_BUSY}"
        ) from exc
    except ConnectionClosed as exc:
        transport.close()
        raise ConnectError(f"{endpoint} closed the connection instead of answering") from exc
    except BaseException:
        transport.close()
        raise
    return _Wire(transport, reader, spoken, extended)


def _check_version(
    transport: SocketTransport, endpoint: Endpoint, version: Version, extended: bool
) -> Version:
    try:
        return check_server(version, str(endpoint))
    except VersionMismatch as exc:
        if extended:
            _leave(transport, exc)
        raise


def _join(
    endpoint: Endpoint,
    wire: _Wire,
    identity: Identity,
    session: str,
    device: int,
    timeout: float,
) -> SessionReply:
    """The SESSION exchange on a connection that has said HELLO."""
    request = SessionRequest(session, device, identity.caravan, identity.engine)
    payload = extension.encode_json(request)
    try:
        wire.transport.set_timeout(timeout)
        wire.transport.send([codec.ext_frame(Ext.SESSION, 1, len(payload)), payload])
        head = extension.FRAME.unpack(wire.reader.read(extension.FRAME.size))
        number, status, _flags, _seq, length = head
        if number != Ext.SESSION or length > extension.MAX_JSON:
            raise RemoteProtocolError(f"{endpoint} answered SESSION with something else")
        data = wire.reader.read(length)
    except TransportTimeout as exc:
        raise ConnectError(f"{endpoint} did not open a session in time") from exc
    except ConnectionClosed as exc:
        raise ConnectError(f"{endpoint} closed the connection instead of a session") from exc
    if status:
        error = RemoteError(status, extension.error_text(data))
        raise ConnectError(f"{endpoint} refused a session: {error}") from error
    return extension.decode_session_reply(data)


def _leave(transport: SocketTransport, reason: ProtocolError) -> None:
    """Tell the worker, too, why this head does not go together with it."""
    text = str(reason).encode()[: extension.MAX_ERROR_TEXT]
    try:
        transport.send([codec.ext_frame(Ext.BYE, 0, len(text)), text])
    except TransportError:
        return


def _open_devices(
    endpoint: Endpoint,
    first: _Wire,
    identity: Identity,
    reply: SessionReply,
    name: Callable[[int], str],
    watchdog: Watchdog,
    timeout: float,
    direct: bool,
) -> list[DeviceLink]:
    """The session's devices, each on a connection of its own; the first one is open already."""
    _check_ops(endpoint, identity, reply)
    if not 0 < len(reply.devices) <= _MAX_DEVICES:
        raise RemoteProtocolError(f"{endpoint} offers {len(reply.devices)} devices")
    wires = [first]
    try:
        for index in range(1, len(reply.devices)):
            wires.append(_hello(endpoint, timeout, True))
            _join(endpoint, wires[-1], identity, reply.session, index, timeout)
    except BaseException:
        for wire in wires:
            wire.transport.close()
        raise
    links: list[DeviceLink] = []
    reach = Reach(endpoint, reply.peer_key, tuple(reply.peer_addresses), direct)
    for index, (wire, info) in enumerate(zip(wires, reply.devices, strict=True)):
        stream = _stream(endpoint, wire, name(index), watchdog, timeout)
        links.append(ExtLink(stream, info, index, wire.version, reach, reply.sources))
    return links


def _check_ops(endpoint: Endpoint, identity: Identity, reply: SessionReply) -> None:
    """Ops travel as numbers: both engines must mean the same by each."""
    for number, (ours, theirs) in enumerate(zip(identity.ops, reply.ops, strict=False)):
        if ours != theirs:
            raise ProtocolError(
                f"the engine at {endpoint} (ggml {reply.engine}) calls op {number} {theirs}, this"
                f" head's (ggml {identity.engine}) calls it {ours}: use the same engine on both"
            )
    if len(identity.ops) != len(reply.ops):
        raise ProtocolError(
            f"the engine at {endpoint} (ggml {reply.engine}) has {len(reply.ops)} ops, this head's"
            f" (ggml {identity.engine}) has {len(identity.ops)}: use the same engine on both"
        )


def _stream(
    endpoint: Endpoint, wire: _Wire, device: str, watchdog: Watchdog, timeout: float
) -> Stream:
    wire.transport.set_timeout(None)
    framing = ExtFraming() if wire.extension else BaseFraming()
    stream = Stream(wire.transport, framing, str(endpoint), device, timeout, wire.reader)
    watchdog.watch(stream)
    return stream


def _open_base(
    endpoint: Endpoint,
    wire: _Wire,
    name: Callable[[int], str],
    watchdog: Watchdog,
    timeout: float,
) -> list[DeviceLink]:
    """The devices of a ggml-rpc server, all on the one connection."""
    stream = _stream(endpoint, wire, name(0), watchdog, timeout)
    table = base_table(wire.version.major)
    links: list[BaseLink] = []
    lock = threading.Lock()
    try:
        (count,) = ask(stream, table[Base.DEVICE_COUNT])
        if not 0 < count <= _MAX_DEVICES:
            raise RemoteProtocolError(f"{endpoint} offers {count} devices")
        for index in range(count):
            info = _base_info(endpoint, stream, wire.version, index)
            links.append(BaseLink(stream, info, index, wire.version, links, lock))
    except WorkerLost as exc:
        stream.close()
        # nothing was entrusted to it yet
        if isinstance(exc.cause, TransportError):
            raise ConnectError(f"{endpoint} answered, but then: {exc.cause}") from exc
        raise RemoteProtocolError(f"{endpoint}: {exc.cause}") from exc
    except CaravanError:
        stream.close()
        raise
    return list(links)


def _base_info(endpoint: Endpoint, stream: Stream, version: Version, index: int) -> DeviceInfo:
    table = base_table(version.major)
    (alignment,) = ask(stream, table[Base.GET_ALIGNMENT], index)
    (max_size,) = ask(stream, table[Base.GET_MAX_SIZE], index)
    free, total = ask(stream, table[Base.GET_DEVICE_MEMORY], index)
    if alignment <= 0 or alignment & (alignment - 1) or max_size == 0:
        raise RemoteProtocolError(
            f"{endpoint} answers alignment {alignment}, maximal buffer size {max_size}"
        )
    # such a server does not say what kind of device it is: a GPU that may pad
    return DeviceInfo(
        name=f"device {index}",
        description=str(endpoint),
        type=1,
        threads=0,
        memory_free=free,
        memory_total=total,
        alignment=alignment,
        max_size=max_size,
        pads=True,
    )
