"""`Session`: serves one head with the worker's devices; it is all that its process does.

Made by `session_process`. It ends, and the process with it, when its last connection has left, or
when one broke; a head that only asked something leaves it to the next one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence

from caravan import __version__
from caravan.engine.layouts import OP_NAMES
from caravan.engine.library import Engine
from caravan.errors import CaravanError, RemoteError, TransportError, TransportTimeout
from caravan.transport.base import Connection
from caravan.transport.certificates import NO_TLS, Tls
from caravan.transport.tcp import SocketTransport
from caravan.trust.token import Token
from caravan.wire.codec import ext_frame
from caravan.wire.commands import Ext
from caravan.wire.extension import GRAPH_LRU, NO_DEVICE, SessionReply, Status, encode_json
from caravan.worker import control
from caravan.worker.base_channel import GRAPHS_8, KEPT_8, BaseChannel
from caravan.worker.buffers import BufferTable
from caravan.worker.channel import Channel
from caravan.worker.device import Device
from caravan.worker.door import Door
from caravan.worker.ext_channel import ExtChannel, error_reply
from caravan.worker.keeper import Keeper
from caravan.worker.lane import GraphStore, Lane
from caravan.worker.library import Library
from caravan.worker.loader import Loader
from caravan.worker.log import log
from caravan.worker.pace import Pace
from caravan.worker.peers import BEAT_SECONDS, WAY_SECONDS, Peers
from caravan.worker.store import Store
from caravan.worker.weights import Weights


class Session:
    """The devices, buffers and connections of one head.

    Args:
        store: the weight cache; None for none.
        model_dirs: where this machine may have the models that are loaded.
        idle: seconds after which a connection counts as broken on which its head, of the
            extension, has said nothing; 0: it never does.
        tls: the worker's certificate and CA.
    """

    def __init__(
        self,
        loaded: Engine,
        devices: list[Device],
        talk: socket.socket,
        store: Store | None = None,
        model_dirs: Sequence[str] = (),
        idle: float = 0.0,
        tls: Tls = NO_TLS,
    ) -> None:
        self._engine = loaded
        self._idle = idle
        library = Library(model_dirs, tell=self._notice) if model_dirs else None
        self._sources = [*(["disk"] if library else []), *(["cache"] if store else [])]
        self._loader = Loader(library, store) if self._sources else None
        self._keeper = Keeper(store, Pace(self._totals)) if store else None
        self._weights = Weights(store) if store else None
        self._devices = devices
        self._control = talk
        self._lock = threading.Lock()
        self._buffers = BufferTable()
        self._door = Door(tls)
        self._peers = Peers(tls)
        self._lanes: list[Lane] = []
        self._taken: dict[int, int] = {}  # device: the connection that has it
        self._open = 0
        self._served = False

    def _notice(self, text: str) -> None:
        """Tell the person who runs the worker what other sessions may have told already."""
        with contextlib.suppress(OSError):
            control.send(self._control, control.Notice(text))

    def trust(self, secrets: control.Secrets) -> None:
        """The token that others have to know, and this process shows to other workers."""
        token = Token(secrets.token) if secrets.token else None
        self._peers.token = self._door.token = token

    def adopt(self, adopt: control.Adopt, fd: int) -> None:
        """Serve a connection on a thread of its own; one from another worker needs none."""
        transport = SocketTransport(socket.socket(fileno=fd), adopt.peer)
        if adopt.route:
            self._adopt_peer(adopt, transport)
            return
        with self._lock:
            self._open += 1
        if self._idle:
            transport.bound_unacknowledged(self._idle)
            # one of the base protocol owes no sign of life
            if not adopt.major:
                transport.bound_silence(self._idle)
        serve = self._let_in if adopt.seconds else self._serve
        threading.Thread(
            target=serve, args=(adopt, transport), name=f"reader {adopt.peer}", daemon=True
        ).start()

    def beat(self) -> None:
        """Show the other workers, now and then, that this process is there; never returns."""
        while True:
            time.sleep(BEAT_SECONDS)
            self._peers.beat()

    def _let_in(self, adopt: control.Adopt, socket: SocketTransport) -> None:
        """Serve a connection that comes by TLS; who does not get in has not been here."""
        try:
            transport, adopt = self._door.enter(socket, adopt)
            control.send(self._control, control.Entered(adopt.connection))
        except Exception as exc:
            socket.close()
            ours = (
                "" if isinstance(exc, CaravanError) else f"internal error: {type(exc).__name__}: "
            )
            self._left(adopt, not self._served, "", f"{ours}{exc}")
            return
        if not adopt.route:
            self._serve(adopt, transport)
            return
        self._adopt_peer(adopt, transport)
        with self._lock:
            self._open -= 1
            over = self._open == 0
        if over:
            # its head has left meanwhile
            self._end(in_order=True)

    def _adopt_peer(self, adopt: control.Adopt, transport: Connection) -> None:
        """A way into one of this session's devices; whoever takes from it reads it."""
        self._served = True
        try:
            if not adopt.device < len(self._devices):
                raise RemoteError(Status.REFUSED, f"this worker has no device {adopt.device}")
            transport.bound_silence(WAY_SECONDS)
            self._peers.add_in(adopt.route, transport)
            transport.send([ext_frame(Ext.PEER, adopt.seq, 0)])
        except (RemoteError, TransportError) as exc:
            if isinstance(exc, RemoteError):
                self._refuse(Ext.PEER, adopt, transport, exc)
            transport.close()
            control.send(self._control, control.Closed(adopt.connection))

    def _make_lanes(self, major: int) -> list[Lane]:
        """One protocol a session, so the rule for stored graphs is the session's too."""
        rule = {0: (GRAPH_LRU, True), 7: (1, False)}.get(major, (GRAPHS_8, False, KEPT_8))
        return [
            Lane(device, self._buffers, GraphStore(*rule), self._peers, self._keeper)
            for device in self._devices
        ]

    def _totals(self) -> tuple[int, int]:
        """Bytes of weights and other payload so far, and nanoseconds of computing."""
        lanes = self._lanes
        arrived = sum(lane.counters.bytes_in + lane.counters.bytes_loaded for lane in lanes)
        return arrived, sum(lane.spans.activity.totals().computing for lane in lanes)

    def _drop_lanes(self) -> None:
        """The next head may speak another protocol."""
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.executor.close()

    def _serve(self, adopt: control.Adopt, transport: Connection) -> None:
        in_order = False
        channel: Channel | None = None
        with self._lock:
            self._served = True
            if not self._lanes:
                self._lanes = self._make_lanes(adopt.major)
        try:
            channel = self._channel(adopt, transport)
            in_order = channel.serve()
        except RemoteError as exc:
            self._refuse(Ext.SESSION, adopt, transport, exc)
            in_order = True
        except Exception as exc:
            log(f"internal error on the connection to {adopt.peer}: {type(exc).__name__}: {exc}")
        finally:
            transport.close()
            if channel is not None:
                channel.replies.close()
            only_asked = channel is not None and channel.only_asked
            self._left(adopt, only_asked, "" if in_order else self._breach(adopt, channel))

    def _breach(self, adopt: control.Adopt, channel: Channel | None) -> str:
        """What a connection's end that was not in order means for the session, in words."""
        broke = channel.broke if channel is not None else None
        if isinstance(broke, TransportTimeout):
            log(f"closing the session of {adopt.peer}: {broke}")
        why = str(broke or "something meaningless came")
        return f"the session has ended, since a connection to its head broke: {why}"

    def _channel(self, adopt: control.Adopt, transport: Connection) -> Channel:
        """Raises RemoteError when the head asks for a device that it cannot have."""
        if adopt.major:
            return BaseChannel(transport, self._lanes, self._buffers, adopt.major, self._weights)
        with self._lock:
            if adopt.device == NO_DEVICE:
                raise RemoteError(Status.BUSY, "the session goes on")
            if not adopt.device < len(self._lanes):
                raise RemoteError(Status.REFUSED, f"this worker has no device {adopt.device}")
            if adopt.device in self._taken:
                raise RemoteError(Status.REFUSED, "the session already uses this device")
            self._taken[adopt.device] = adopt.connection
        lane = self._lanes[adopt.device]
        channel = ExtChannel(transport, lane, self._lanes, self._buffers, self._loader)
        body = encode_json(
            SessionReply(
                session=adopt.key,
                caravan=__version__,
                engine=self._engine.version,
                ops=list(OP_NAMES),
                devices=[device.info() for device in self._devices],
                peer_key=adopt.peer_key,
                peer_addresses=adopt.addresses,
                sources=self._sources,
                idle_ms=int(self._idle * 1000),
            )
        )
        channel.replies.now((ext_frame(Ext.SESSION, adopt.seq, len(body)), body))
        return channel

    def _refuse(
        self, number: Ext, adopt: control.Adopt, transport: Connection, exc: RemoteError
    ) -> None:
        try:
            transport.send(error_reply(number, adopt.seq, exc))
        except CaravanError:
            return

    def _left(self, adopt: control.Adopt, only_asked: bool, breach: str, why: str = "") -> None:
        """A connection is over; with a broken one (`breach`), or the last one, the session is.

        The process is too, unless nothing happened that the next head could notice.
        """
        with self._lock:
            self._open -= 1
            if self._taken.get(adopt.device) == adopt.connection:
                del self._taken[adopt.device]
            pending = any(lane.executor.pending for lane in self._lanes)
            as_new = only_asked and self._open == 0 and not pending
            over = not as_new and (bool(breach) or self._open == 0)
            if as_new:
                self._served = False
                self._drop_lanes()
            try:
                if over and breach:
                    control.send(self._control, control.Leaving(breach))
                control.send(self._control, control.Closed(adopt.connection, as_new, why))
            except OSError:
                over, breach = True, "the supervisor is gone"
        if over:
            self._end(in_order=not breach)

    def _end(self, in_order: bool) -> None:
        """End the process; a head that has left in order waits for nothing any more."""
        if self._keeper is not None:
            if in_order:
                self._keeper.drain()
            self._keeper.close()
        leave(0)


def leave(code: int) -> None:
    """End the process at once: a computation on another thread must not hold it up."""
    sys.stderr.flush()
    os._exit(code)
