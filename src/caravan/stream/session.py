"""`Session`: the head's connections to one worker, and the handshake that opens them.

One connection a device where both ends speak the extension; one connection for all devices of a
ggml-rpc server, which serves a single client.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from caravan.errors import (
    AuthenticationError,
    CaravanError,
    ConnectError,
    ConnectionClosed,
    ProtocolError,
    RemoteError,
    RemoteProtocolError,
    TransportError,
    TransportTimeout,
    WorkerLost,
)
from caravan.stream.base_link import BaseLink, ask
from caravan.stream.dispatcher import Stream
from caravan.stream.ext_link import ExtLink
from caravan.stream.framing import BaseFraming, ExtFraming
from caravan.stream.inquest import Inquest
from caravan.stream.link import DeviceLink
from caravan.stream.reach import Reach
from caravan.stream.watchdog import Watchdog
from caravan.transport.base import Connection
from caravan.transport.certificates import TlsClient
from caravan.transport.endpoint import Endpoint
from caravan.transport.tcp import ENDED, connect
from caravan.trust.entry import Entry
from caravan.trust.token import Token
from caravan.wire import codec, extension
from caravan.wire.commands import Base, Ext, base_table
from caravan.wire.extension import (
    NO_DEVICE,
    Asks,
    DeviceInfo,
    SessionReply,
    SessionRequest,
    Status,
    TlsRequest,
    public_id,
)
from caravan.wire.versions import Version, check_server

_MAX_DEVICES = 16
CLOSE_SECONDS = 5.0
# A session that is just ending is asked for again after so long.
_AGAIN_SECONDS = 0.05
_BUSY = "a busy llama.cpp server, which serves one client at a time"


@dataclass(frozen=True, slots=True)
class Identity:
    """What this head says of itself: its own version, the engine's, and the engine's op names."""

    caravan: str
    engine: str
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who comes to which worker, and with what.

    Attributes:
        timeout: seconds, for connecting and for every later silence.
        token: what is shown to a worker that asks for it; None for none.
        tls: what there is for TLS.
        asked: what the worker has asked for before, and so asks for again.
    """

    endpoint: Endpoint
    identity: Identity
    timeout: float = 30.0
    token: Token | None = None
    tls: TlsClient | None = None
    asked: Asks = Asks.NOTHING


class Session:
    """Links to the devices of one worker. Made by `open_session`.

    Attributes:
        engine: version of the worker's ggml, where it says.
        asks: what the worker has asked for.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        links: list[DeviceLink],
        version: Version,
        engine: str = "",
        asks: Asks = Asks.NOTHING,
        inquest: Inquest | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.links = links
        self.version = version
        self.engine = engine
        self.asks = asks
        self._inquest = inquest

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
        if self._inquest is not None:
            self._inquest.join(max(0.0, deadline - time.monotonic()))


def open_session(
    endpoint: Endpoint,
    identity: Identity,
    name: Callable[[int], str],
    watchdog: Watchdog,
    *,
    timeout: float = 30.0,
    use_extension: bool = True,
    direct: bool = True,
    token: Token | None = None,
    tls: TlsClient | None = None,
) -> Session:
    """Connect to the worker at `endpoint`.

    Args:
        name: gives the head's name for the worker's device of a number, for errors.
        timeout: seconds, for connecting and for every later silence.
        direct: whether copies to other workers may go there without passing the head.
        token: what is shown to a worker that asks for it.
        tls: what there is for TLS with it.

    Raises ConnectError when nobody answers, or TLS is not to be had as it is wanted,
    AuthenticationError when the two do not know the same token, VersionMismatch or
    RemoteProtocolError when what answers is no worker that goes together with this head.
    """
    caller = Caller(endpoint, identity, timeout, token, tls)
    entry = enter(caller, use_extension)
    caller = replace(caller, asked=entry.asks)
    engine, inquest = "", None
    try:
        if entry.extension:
            reply = _join(caller, entry, "", 0)
            engine = reply.engine
            inquest = Inquest(str(endpoint), partial(_ask_why, caller, reply.session))
            links = _open_devices(caller, entry, reply, name, watchdog, direct)
            for link in links:
                link.stream.allowance = reply.idle_ms / 1000
                inquest.watch(link.stream)
        else:
            links = _open_base(endpoint, entry, name, watchdog, timeout)
    except BaseException as exc:
        if entry.extension and isinstance(exc, ProtocolError):
            _leave(entry.transport, exc)
        entry.transport.close()
        raise
    return Session(endpoint, links, entry.version, engine, entry.asks, inquest)


def enter(caller: Caller, use_extension: bool = True, session: str = "") -> Entry:
    """A connection on which the next is SESSION, or the first command of the base protocol.

    Args:
        session: the key of the one that is to be joined; empty for a new one.

    Raises as `open_session` does.
    """
    try:
        transport = connect(caller.endpoint, caller.timeout)
    except ConnectError as exc:
        if isinstance(exc.__cause__, TimeoutError):
            # also with so many waiting for such a server that its system takes no more
            raise ConnectError(f"{exc}: unreachable, or {_BUSY}") from exc
        raise
    entry = Entry(transport, caller.endpoint, caller.tls)
    try:
        transport.set_timeout(caller.timeout)
        _hello(caller, entry, use_extension)
        require_asked(caller.endpoint, caller.asked, entry.asks)
        _satisfy(caller, entry, session)
    except (ProtocolError, ConnectError) as exc:
        if entry.extension:
            _leave(entry.transport, exc)
        transport.close()
        raise
    except BaseException:
        transport.close()
        raise
    return entry


def _hello(caller: Caller, entry: Entry, use_extension: bool) -> None:
    endpoint = caller.endpoint
    try:
        entry.hello(use_extension)
    except TransportTimeout as exc:
        raise ConnectError(
            f"{endpoint} accepted the connection but did not answer within {caller.timeout:g} s:"
            f" perhaps {_BUSY}"
        ) from exc
    except ConnectionClosed as exc:
        raise ConnectError(f"{endpoint} closed the connection instead of answering") from exc
    entry.version = check_server(entry.version, str(endpoint))


def require_asked(endpoint: object, before: Asks, now: Asks) -> None:
    """Raises AuthenticationError when who answers wants less than the worker that was there before:
    it is let in nowhere, but it would be told what is for that worker alone."""
    for what, words in ((Asks.TOKEN, "a token"), (Asks.TLS, "TLS")):
        if what in before & ~now:
            raise AuthenticationError(
                f"the worker at {endpoint} asked for {words} before, and whoever answers there now"
                " does not: another worker, or somebody in the middle"
            )


def _satisfy(caller: Caller, entry: Entry, session: str) -> None:
    endpoint = caller.endpoint
    what = "TLS" if Asks.TLS in entry.asks else "a proof"
    try:
        entry.satisfy(
            caller.token, TlsRequest(session=public_id(session) if session else ""), caller.timeout
        )
    except TransportTimeout as exc:
        raise ConnectError(f"{endpoint} asked for {what} and did not answer in time") from exc
    except ConnectionClosed as exc:
        raise ConnectError(
            f"{endpoint} asked for {what} and closed the connection{_why(exc)}"
        ) from exc
    except RemoteError as exc:
        raise ConnectError(f"{endpoint} refused the connection: {exc}") from exc


def _join(caller: Caller, entry: Entry, session: str, device: int) -> SessionReply:
    """The SESSION exchange on a connection that may."""
    endpoint, identity = caller.endpoint, caller.identity
    request = SessionRequest(session, device, identity.caravan, identity.engine)
    try:
        entry.transport.set_timeout(caller.timeout)
        data = entry.ask(Ext.SESSION, extension.encode_json(request))
    except TransportTimeout as exc:
        raise ConnectError(f"{endpoint} did not open a session in time") from exc
    except ConnectionClosed as exc:
        raise ConnectError(
            f"{endpoint} closed the connection instead of a session{_why(exc)}"
        ) from exc
    except RemoteError as exc:
        raise ConnectError(f"{endpoint} refused a session: {exc}") from exc
    return extension.decode_session_reply(data)


def _ask_why(caller: Caller, key: str, deadline: float) -> str:
    """What the worker says of the end of its session `key`; empty if it does not say.

    Raises CaravanError when it cannot be asked.
    """
    while (left := deadline - time.monotonic()) > 0:
        hurried = replace(caller, timeout=left)
        entry: Entry | None = None
        try:
            entry = enter(hurried, session=key)
            _join(hurried, entry, key, NO_DEVICE)
        except ConnectError as exc:
            answer = exc.__cause__
            if isinstance(answer, ConnectionRefusedError | FileNotFoundError):
                return "the connection closed, and no worker listens there any more"
            if isinstance(answer, RemoteError) and answer.code != Status.BUSY:
                return answer.text if answer.code == Status.ENDED else ""
            if not isinstance(answer, RemoteError | ConnectionClosed):
                raise
        finally:
            if entry is not None:
                entry.transport.close()
        # it has not noticed yet, or is about to end
        time.sleep(_AGAIN_SECONDS)
    return ""


def _why(exc: ConnectionClosed) -> str:
    """What else is known: within TLS the other end says what it did not like."""
    return "" if str(exc) == ENDED else f": {exc}"


def _leave(transport: Connection, reason: CaravanError) -> None:
    """Tell the worker, too, why this head does not go together with it."""
    text = str(reason).encode()[: extension.MAX_ERROR_TEXT]
    try:
        transport.send([codec.ext_frame(Ext.BYE, 0, len(text)), text])
    except TransportError:
        return


def _open_devices(
    caller: Caller,
    first: Entry,
    reply: SessionReply,
    name: Callable[[int], str],
    watchdog: Watchdog,
    direct: bool,
) -> list[DeviceLink]:
    """The session's devices, each on a connection of its own; the first one is open already."""
    endpoint, timeout = caller.endpoint, caller.timeout
    _check_ops(endpoint, caller.identity, reply)
    if not 0 < len(reply.devices) <= _MAX_DEVICES:
        raise RemoteProtocolError(f"{endpoint} offers {len(reply.devices)} devices")
    entries = [first]
    try:
        for index in range(1, len(reply.devices)):
            entries.append(enter(caller, session=reply.session))
            _join(caller, entries[-1], reply.session, index)
    except BaseException:
        for entry in entries:
            entry.transport.close()
        raise
    links: list[DeviceLink] = []
    reach = Reach(endpoint, reply.peer_key, tuple(reply.peer_addresses), direct)
    for index, (entry, info) in enumerate(zip(entries, reply.devices, strict=True)):
        stream = _stream(endpoint, entry, name(index), watchdog, timeout)
        links.append(ExtLink(stream, info, index, entry.version, reach, reply.sources))
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
    endpoint: Endpoint, entry: Entry, device: str, watchdog: Watchdog, timeout: float
) -> Stream:
    entry.transport.set_timeout(None)
    entry.transport.bound_unacknowledged(timeout)
    framing = ExtFraming() if entry.extension else BaseFraming()
    stream = Stream(entry.transport, framing, str(endpoint), device, timeout, entry.reader)
    stream.keep_alive = entry.extension
    watchdog.watch(stream)
    return stream


def _open_base(
    endpoint: Endpoint,
    entry: Entry,
    name: Callable[[int], str],
    watchdog: Watchdog,
    timeout: float,
) -> list[DeviceLink]:
    """The devices of a ggml-rpc server, all on the one connection."""
    stream = _stream(endpoint, entry, name(0), watchdog, timeout)
    table = base_table(entry.version.major)
    links: list[BaseLink] = []
    lock = threading.Lock()
    try:
        (count,) = ask(stream, table[Base.DEVICE_COUNT])
        if not 0 < count <= _MAX_DEVICES:
            raise RemoteProtocolError(f"{endpoint} offers {count} devices")
        for index in range(count):
            info = _base_info(endpoint, stream, entry.version, index)
            links.append(BaseLink(stream, info, index, entry.version, links, lock))
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
    if not extension.is_alignment(alignment) or max_size == 0:
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
