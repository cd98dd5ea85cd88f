"""`connect`: workers' devices as devices of this process's engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType

import caravan
from caravan.backend import plugin as plugins
from caravan.backend import timeline
from caravan.backend.connection import Connection
from caravan.backend.device import RemoteDevice
from caravan.backend.opening import Opening
from caravan.engine import layouts
from caravan.errors import UsageError
from caravan.stream.caller import Identity
from caravan.stream.receiver import DEFAULT_POLL, check_poll
from caravan.stream.routes import Route
from caravan.stream.session import CLOSE_SECONDS, Session, open_session
from caravan.stream.telemetry import DeviceStats
from caravan.stream.watchdog import Watchdog
from caravan.transport.certificates import Tls, TlsClient
from caravan.transport.endpoint import Endpoint
from caravan.trust.token import Token, given
from caravan.wire.dtypes import WireType, wire_type
from caravan.wire.extension import Asks

_GRACE_SECONDS = 1.0

# Seconds for what is still on its way to the workers, when nobody needs it any more.
_HURRIED_SECONDS = 0.5


class Cluster:
    """Connected workers. Close it after the models that use its devices.

    Attributes:
        devices: `RPC0`, `RPC1`, … through all workers in the order given, but for those that were
            given a name.
        endpoints: the workers' endpoints.
    """

    def __init__(
        self,
        connections: list[Connection],
        devices: list[RemoteDevice],
        watchdog: Watchdog,
        closing: Callable[[], None],
        open_doors: Sequence[Endpoint] = (),
    ) -> None:
        self.devices = devices
        self.endpoints = [connection.endpoint for connection in connections]
        self._connections = connections
        self._watchdog = watchdog
        self._wire_type = WireType.F32
        self._poll = DEFAULT_POLL
        self._watch = timeline.watch(devices)
        self._closing = closing
        self._open_doors = open_doors

    def __repr__(self) -> str:
        return f"<Cluster of {', '.join(self.endpoints)}: {len(self.devices)} devices>"

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # who presses Ctrl-C waits for no link to take what nobody needs any more
        hurry = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._close(_HURRIED_SECONDS if hurry else CLOSE_SECONDS)

    @property
    def wire_dtype(self) -> str:
        """How activations travel: `f32`, `f16` or `bf16`. It may be set between two decodings."""
        return self._wire_type.word

    @wire_dtype.setter
    def wire_dtype(self, word: str) -> None:
        self._wire_type = wire_type(word)
        for device in self.devices:
            device.wire_type = self._wire_type

    @property
    def poll(self) -> int:
        """0...100: how long a thread that waits for a device looks for the answer before it sleeps.

        It may be set at any time; raises UsageError.
        """
        return self._poll

    @poll.setter
    def poll(self, level: int) -> None:
        self._poll = check_poll(level)
        for device in self.devices:
            device.poll = level

    @property
    def notes(self) -> list[str]:
        """What is not as it was asked for, in lines for people."""
        notes = [
            f"{endpoint} asks for no token: whoever can connect can use it"
            for endpoint in self._open_doors
        ]
        if not self._wire_type:
            return notes
        plain = dict.fromkeys(d.endpoint for d in self.devices if not d.link.extension)
        return [*notes, *(f"{end} speaks llama.cpp's protocol: f32 travels there" for end in plain)]

    def check(self) -> None:
        """Raises WorkerLost once any of the devices is lost."""
        for device in self.devices:
            device.check()

    def routes(self) -> dict[tuple[str, str], Route]:
        """The ways of copies between any two devices, by their names; finds out what they are."""
        return routes_between(self.devices)

    def stats(self) -> dict[str, DeviceStats]:
        """What each device has done so far, by its name, as its worker counted it. Asks and waits.

        Devices of llama.cpp servers are left out: they count nothing. Raises WorkerLost.
        """
        found = {device.name: device.stats() for device in self.devices}
        return {name: stats for name, stats in found.items() if stats is not None}

    def close(self) -> None:
        """Take leave of the workers. Idempotent. What still uses the devices gets errors."""
        self._close(CLOSE_SECONDS)

    def _close(self, seconds: float) -> None:
        if self._watch is not None:
            self._watch.close()
        # one bound for all: several workers that have frozen are no worse than one
        deadline = time.monotonic() + seconds
        for connection in self._connections:
            connection.close(deadline)
        self._watchdog.close()
        for device in self.devices:
            device.plugin.forget(device)
        self._closing()


def connect(
    endpoints: Sequence[str],
    *,
    timeout: float = 30.0,
    extension: bool = True,
    direct_copies: bool = True,
    wire_dtype: str = "f32",
    poll: int = DEFAULT_POLL,
    token: Token | str | None = None,
    tls: Tls | None = None,
    names: Mapping[str, str] | None = None,
    taken: Collection[str] = (),
    closing: Callable[[], None] = lambda: None,
    restart: Callable[[str], None] = lambda endpoint: None,
) -> Cluster:
    """Connect to workers, all at once, and make their devices known to the engine.

    Args:
        endpoints: `HOST:PORT` each (IPv6 in brackets; the port defaults to 50052), or `unix:PATH`.
        timeout: seconds that a worker may be silent while it owes an answer, and that connecting
            may take in all.
        extension: False speaks llama.cpp's plain RPC protocol even with a Caravan worker.
        direct_copies: whether workers that reach each other may copy without passing the head.
        wire_dtype: `f16` or `bf16` let activations travel at half their size, with fewer digits.
        poll: 0...100, how long a thread that waits for a device looks for the answer before it
            sleeps: 0.2 ms for each step, so that short computations are noticed at once.
        token: what workers that ask for one are shown; None: CARAVAN_TOKEN; empty: none.
        tls: the CA of the workers' certificates, without which none is talked to then, and the own
            certificate for those that want to see one. Unix sockets do without.
        names: by endpoint, what the device of a worker is called instead of RPCn.
        taken: names that no device may have.
        closing: called at the end of the cluster's `close`; more than once does no harm.
        restart: called with the endpoint of a worker that was lost, before it is connected to once
            more; starts the worker if that has ended and is ours to start.

    Raises:
        UsageError: an endpoint is none or comes twice, or there is none; an unknown type; a level
            of polling that is none; a token that is too short; a file of `tls` that is
            not what it should be.
        ConnectError: a worker cannot be reached or refuses; AuthenticationError if it and this head
            do not know the same token.
        ProtocolError: what answers does not go together with this head.
    """
    parsed = [Endpoint.parse(text) for text in endpoints]
    if not parsed:
        raise UsageError("no worker given: expected HOST:PORT")
    places = [replace(endpoint, tls=False) for endpoint in parsed]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        # its devices would have equal names and addresses, which the engine takes for the same
        raise UsageError(f"{twice} is given twice; for more devices there, see caravan worker -d")
    wire_type(wire_dtype)
    check_poll(poll)
    if timeout <= 0:
        raise UsageError(f"timeout {timeout:g} s is not above 0")
    secret = given(token)
    if tls is not None and not isinstance(tls, Tls):
        raise UsageError(f"tls is of type {type(tls).__name__}: expected caravan.Tls(ca=...)")
    client = TlsClient(tls) if tls else None
    plugin = plugins.load()
    identity = Identity(caravan.__version__, plugin.engine.version, tuple(layouts.OP_NAMES))
    watchdog = Watchdog(timeout)

    def open_one(endpoint: Endpoint) -> Session:
        return open_session(
            endpoint,
            identity,
            lambda index: f"device {index}",
            watchdog,
            timeout=timeout,
            use_extension=extension,
            direct=direct_copies,
            token=secret,
            tls=client,
        )

    # the steps of a handshake know better what was missing: leave them the first word
    deadline = time.monotonic() + timeout + _GRACE_SECONDS
    openers = [partial(open_one, endpoint) for endpoint in parsed]
    openings = [Opening(opener, where) for opener, where in zip(openers, parsed, strict=True)]
    try:
        for opening in openings:
            opening.wait(deadline)
        sessions = [opening.result() for opening in openings]
    except BaseException:
        for opening in openings:
            opening.give_up()
        watchdog.close()
        raise
    connections = [
        Connection(session, opener, restart)
        for session, opener in zip(sessions, openers, strict=True)
    ]
    devices = _adopt_devices(plugin, connections, names or {}, taken)
    open_routes(devices)
    unasked = open_doors(sessions) if secret is not None else []
    cluster = Cluster(connections, devices, watchdog, closing, unasked)
    cluster.wire_dtype = wire_dtype
    cluster.poll = poll
    return cluster


def open_doors(sessions: Sequence[Session]) -> list[Endpoint]:
    """Workers on other machines that have asked for nothing: with TLS they know by certificates."""
    return [
        session.endpoint
        for session in sessions
        if session.asks == Asks.NOTHING and not session.endpoint.is_here
    ]


def open_routes(devices: Sequence[object]) -> None:
    """Have the ways opened from each device to the next, those of other kinds left out.

    Most copies of a pipeline go there; others find their way at the first one.
    """
    for one, other in itertools.pairwise(devices):
        if isinstance(one, RemoteDevice) and isinstance(other, RemoteDevice):
            one.route_to(other).open()


def routes_between(devices: Sequence[RemoteDevice]) -> dict[tuple[str, str], Route]:
    """The ways between any two devices, by their names; finds out what they are."""
    pairs = list(itertools.permutations(devices, 2))
    for one, other in pairs:
        one.route_to(other).open()
    found = {(one.name, other.name): one.route_to(other) for one, other in pairs}
    for route in found.values():
        route.settle()
    return found


def _adopt_devices(
    plugin: plugins.Plugin,
    connections: list[Connection],
    names: Mapping[str, str],
    taken: Collection[str],
) -> list[RemoteDevice]:
    """The engine's devices for the sessions' links, numbered through all that have no name."""
    devices: list[RemoteDevice] = []
    numbered = (name for n in itertools.count() if (name := f"RPC{n}") not in taken)
    for connection in connections:
        endpoint, session = connection.endpoint, connection.session
        own = [
            RemoteDevice(
                plugin, link, names.get(endpoint) or next(numbered), endpoint, session.engine
            )
            for link in session.links
        ]
        connection.adopt(own)
        devices += own
    return devices
