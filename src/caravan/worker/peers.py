"""`Peers`: the ways by which copies leave a session's devices for others, and come in.

A way (route) leads from one device to another. Between two workers it is a connection that the
first one opens when the head asks for it, and only pushes travel on it; within one session it is
memory. The head posts each copy as PUSH to the source and then as TAKE to the destination, with the
same ticket, so on every way pushes and takes come in the same order.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from caravan.errors import RemoteError
from caravan.trace.recorder import Recorder
from caravan.trace.spans import Kind
from caravan.transport.base import Buffer as Bytes
from caravan.transport.base import Transport
from caravan.transport.certificates import Tls, TlsClient
from caravan.transport.reader import Reader
from caravan.trust.token import Token
from caravan.wire.codec import ext_frame
from caravan.wire.commands import EXT, Ext
from caravan.wire.dtypes import WireType
from caravan.wire.extension import BEAT_TICKET, FRAME, TICKET_BITS, Status
from caravan.worker import outlet
from caravan.worker.buffers import Buffer
from caravan.worker.outlet import Outlet, Parts
from caravan.worker.waiting import Waiting

# Route number of a copy between two devices of one session.
WITHIN = 0

# Bytes on a way that nobody has taken, before a push waits.
_BACKLOG = 256 << 20
# Of all ways of a session together, and the pieces that they are in: beyond it pushes are refused.
_MOST_WAITING = 1 << 30
_MOST_PIECES = 1 << 18
_MAX_ROUTES = 1024
_DATA = EXT[Ext.DATA].request

# Seconds between the signs of life on a way that nothing travels on, and those after which a taker
# that waits gives it up. A head notices a frozen worker earlier: this is for what lies between two.
BEAT_SECONDS = 10.0
WAY_SECONDS = 60.0
_BEAT = ext_frame(Ext.DATA, 0, _DATA.size) + _DATA.pack(BEAT_TICKET)


class Parcels:
    """Copies within a session that were pushed and have not been taken.

    What waits is counted for each way by itself, as between workers: to wait until others have
    taken theirs could be to wait for each other.

    Args:
        limit: bytes on a way beyond which a push waits a while.
        waiting: counts what waits on all ways.
    """

    def __init__(self, limit: int, waiting: Waiting | None = None) -> None:
        self._limit = limit
        self._waiting = waiting if waiting is not None else Waiting()
        self._changed = threading.Condition()
        self._parcels: dict[int, bytes] = {}
        self._sizes: Counter[int] = Counter()

    def put(self, ticket: int, data: bytes) -> None:
        """Wait a while for room, and leave it there; raises RemoteError for a ticket twice."""
        way = ticket >> TICKET_BITS
        with self._changed:
            self._changed.wait_for(lambda: self._sizes[way] <= self._limit, outlet.PATIENCE)
            if ticket in self._parcels:
                raise RemoteError(Status.BAD_REQUEST, f"ticket {ticket} is pushed twice")
            self._parcels[ticket] = data
            self._sizes[way] += len(data)
            self._waiting.add(len(data), 1)
            self._changed.notify_all()

    def take(self, ticket: int) -> bytes:
        """Wait for it; a session that ends does not wait for this."""
        with self._changed:
            self._changed.wait_for(lambda: ticket in self._parcels)
            data = self._parcels.pop(ticket)
            way = ticket >> TICKET_BITS
            self._sizes[way] -= len(data)
            if not self._sizes[way]:
                del self._sizes[way]
            self._waiting.add(-len(data), -1)
            self._changed.notify_all()
        return data


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a copy goes: `size` bytes of a buffer, which travel as `dtype`."""

    buffer: Buffer
    offset: int
    size: int
    dtype: WireType = WireType.F32

    @property
    def travels(self) -> int:
        """Bytes on the way."""
        return self.dtype.travels(self.size)

    @property
    def view(self) -> memoryview | None:
        """The memory itself, where bytes can go into it as they come."""
        native = self.buffer.native
        if self.dtype or native is None or native.view is None:
            return None
        return native.view[self.offset : self.offset + self.size]

    def put(self, data: Bytes) -> None:
        """Write what came."""
        native = self.buffer.native
        if native is None:
            return
        if self.dtype:
            native.widen(self.offset, data, self.dtype)
        else:
            native.write(self.offset, data)


class Incoming:
    """The end of a way from another worker; read at the device's turn, by whoever has it."""

    def __init__(self, route: int, transport: Transport) -> None:
        self._route = route
        self._transport = transport
        self._reader = Reader(transport)
        self._error: RemoteError | None = None

    def take(self, ticket: int, place: _Place, spans: Recorder) -> None:
        """Wait for the next push and put it where it goes; raises RemoteError."""
        size = place.travels
        if self._error is not None:
            raise self._error
        try:
            with spans.during(Kind.WAIT, size, ticket, self._route):
                self._expect(ticket, size)
            with spans.during(Kind.COPY_IN, size, ticket, self._route):
                self._fill(place, size)
        except Exception as exc:
            # whatever it was: nobody knows where the next push begins
            self._transport.close()
            text = f"a copy from the worker at {self._transport.peer}: {exc}"
            self._error = RemoteError(Status.PEER_LOST, text)
            raise self._error from exc

    def _expect(self, ticket: int, size: int) -> None:
        head = self._reader.read(len(_BEAT))
        while head == _BEAT:
            head = self._reader.read(len(_BEAT))
        number, _status, _flags, _seq, length = FRAME.unpack(head[: FRAME.size])
        (got,) = _DATA.unpack(head[FRAME.size :])
        if number != Ext.DATA or got != ticket or length != _DATA.size + size:
            raise RemoteError(
                Status.BAD_REQUEST,
                f"ticket {ticket} of {size} bytes is due, and {length - _DATA.size} bytes came"
                f" for ticket {got}",
            )

    def _fill(self, place: _Place, size: int) -> None:
        view = place.view
        if view is not None:
            self._reader.read_into(view)
            return
        data = bytearray(size)
        self._reader.read_into(memoryview(data))
        place.put(data)


class Peers:
    """The ways of one session. Pushes and takes happen at their device's turn.

    Attributes:
        token: what is shown to other workers that ask for one; None for none.
    """

    def __init__(self, tls: Tls | None = None) -> None:
        self.token: Token | None = None
        self._tls = tls
        self._client: TlsClient | None = None
        self._lock = threading.Lock()
        self._waiting = Waiting()
        self._parcels = Parcels(_BACKLOG, self._waiting)
        self._out: dict[int, Outlet] = {}
        self._in: dict[int, Incoming] = {}

    @property
    def client(self) -> TlsClient:
        """Raises UsageError when the files are no longer what they should be."""
        self._client = self._client or TlsClient(self._tls)
        return self._client

    def add_out(self, route: int, transport: Transport, spans: Recorder) -> None:
        """A device's way to another worker; raises RemoteError when there cannot be one more."""
        with self._lock:
            _check_new(route, self._out)
            self._out[route] = Outlet(transport, spans, Kind.COPY_OUT, _BACKLOG, self._waiting)

    def add_in(self, route: int, transport: Transport) -> None:
        """A way from another worker; raises RemoteError when there cannot be one more."""
        with self._lock:
            _check_new(route, self._in)
            self._in[route] = Incoming(route, transport)

    def beat(self) -> None:
        """Show on every way that this session is there, also during a long computation."""
        with self._lock:
            ways = list(self._out.values())
        for way in ways:
            way.offer((_BEAT,))

    def push(self, route: int, ticket: int, data: Parts) -> None:
        """Send `data`, which may lie in device memory, on its way; raises RemoteError.

        A way that has broken is no error here: the other end is where something is missing.
        """
        size = sum(map(len, data))
        waiting = self._waiting
        if waiting.size + size > _MOST_WAITING or waiting.pieces >= _MOST_PIECES:
            text = f"{waiting.size} bytes in {waiting.pieces} pieces wait to be taken"
            raise RemoteError(Status.BUSY, f"no room for {size} bytes: {text}")
        if route == WITHIN:
            self._parcels.put(ticket, b"".join(data))
            return
        way = self._out.get(route)
        if way is None:
            raise RemoteError(Status.BAD_REQUEST, f"there is no route {route} out of this worker")
        head = ext_frame(Ext.DATA, 0, _DATA.size + size) + _DATA.pack(ticket)
        way.send((head, *data))

    def take(
        self,
        route: int,
        ticket: int,
        size: int,
        buffer: Buffer,
        offset: int,
        spans: Recorder,
        dtype: WireType = WireType.F32,
    ) -> None:
        """Wait for a push and put it into `size` bytes of the buffer; raises RemoteError.

        `spans` is told of it; `dtype` is the type in which it travels.
        """
        place = _Place(buffer, offset, size, dtype)
        if route != WITHIN:
            incoming = self._in.get(route)
            if incoming is None:
                raise RemoteError(Status.BAD_REQUEST, f"there is no route {route} into this worker")
            incoming.take(ticket, place, spans)
            return
        with spans.during(Kind.WAIT, size, ticket):
            data = self._parcels.take(ticket)
        if len(data) != size:
            raise RemoteError(Status.BAD_REQUEST, f"{size} bytes to take, {len(data)} pushed")
        if buffer.native is not None:
            with spans.during(Kind.COPY_IN, size, ticket):
                buffer.native.write(offset, data)


def _check_new(route: int, routes: dict[int, Outlet] | dict[int, Incoming]) -> None:
    if route in routes or len(routes) >= _MAX_ROUTES:
        raise RemoteError(Status.REFUSED, f"no room for route {route}")
