"""`Session`: the head's connections to one worker, and how they are opened; `caller` shakes hands.

One connection a device where both ends speak the extension; one connection for all devices of a
ggml-rpc server, which serves a single client.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from caravan.errors import (
    CaravanError,
    ConnectError,
    ProtocolError,
    RemoteProtocolError,
    TransportError,
    WorkerLost,
)
from caravan.stream.base_link import BaseLink, ask
from caravan.stream.caller import Caller, Identity, leave
from caravan.stream.dispatcher import Stream
from caravan.stream.ext_link import ExtLink
from caravan.stream.framing import BaseFraming, ExtFraming
from caravan.stream.inquest import Inquest
from caravan.stream.link import DeviceLink
from caravan.stream.reach import Reach
from caravan.stream.watchdog import Watchdog
from caravan.transport.certificates import TlsClient
from caravan.transport.endpoint import Endpoint
from caravan.trust.entry import Entry
from caravan.trust.token import Token
from caravan.wire import extension
from caravan.wire.commands import Base, base_table
from caravan.wire.extension import Asks, DeviceInfo, SessionReply
from caravan.wire.versions import Version

_MAX_DEVICES = 16
CLOSE_SECONDS = 5.0


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
        if self._inquest is not None:
            self._inquest.end()
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
    entry = caller.enter(use_extension)
    caller = replace(caller, asked=entry.asks)
    engine, inquest = "", None
    try:
        if entry.extension:
            reply = caller.join(entry, "", 0)
            engine = reply.engine
            inquest = Inquest(str(endpoint), partial(caller.ask_why, reply.session))
            links = _open_devices(caller, entry, reply, name, watchdog, direct)
            for link in links:
                link.stream.allowance = reply.idle_ms / 1000
                inquest.watch(link.stream)
        else:
            links = _open_base(endpoint, entry, name, watchdog, timeout)
    except BaseException as exc:
        if entry.extension and isinstance(exc, ProtocolError):
            leave(entry.transport, exc)
        entry.transport.close()
        raise
    return Session(endpoint, links, entry.version, engine, entry.asks, inquest)


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
            entries.append(caller.enter(session=reply.session))
            caller.join(entries[-1], reply.session, index)
        links: list[DeviceLink] = []
        reach = Reach(endpoint, reply.peer_key, tuple(reply.peer_addresses), direct)
        for index, (entry, info) in enumerate(zip(entries, reply.devices, strict=True)):
            stream = _stream(endpoint, entry, name(index), watchdog, timeout)
            links.append(ExtLink(stream, info, index, entry.version, reach, reply.sources))
        return links
    except BaseException:
        # that ends the threads of streams, too
        for entry in entries:
            entry.transport.close()
        raise


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
