"""`Route`: the way of copies from one device to another, of the four that there are.

Within a device the backend copies itself. Within a worker, PUSH and TAKE meet in its memory.
Between workers that reach each other they use a connection of their own, which is opened ahead, or
at the first copy; until it stands, and when it cannot, the copies are relayed: the bytes come to
the head as a ticket, which is the payload of a write to the other device.
"""

from __future__ import annotations

import itertools
import threading
from enum import Enum

from caravan.errors import WorkerLost
from caravan.stream.ext_link import ExtLink
from caravan.stream.link import DeviceLink, TensorRef
from caravan.stream.ticket import Ticket
from caravan.wire.commands import U64
from caravan.wire.dtypes import WireType
from caravan.wire.extension import TICKET_BITS, PeerTarget

_WITHIN = 0
_numbers = itertools.count(1)


class Path(Enum):
    """How copies go."""

    UNKNOWN = "unknown"
    OPENING = "opening"
    DIRECT = "direct"
    RELAY = "relay"


class Route:
    """From one device to another.

    Attributes:
        path: how the next copy goes.
        reason: why it is the relay.
        round_trip: between the two workers, in seconds; None where it was not measured.
    """

    def __init__(self, src: DeviceLink, dst: DeviceLink) -> None:
        self._src = src
        self._dst = dst
        self._number = next(_numbers)
        self._tickets = itertools.count(self._number << TICKET_BITS)
        # both commands of a copy are posted in one go: their order is the same on both sides
        self._lock = threading.Lock()
        self._opened: Ticket | None = None
        self._last_take: int | None = None
        self.round_trip: float | None = None
        self.reason = ""
        self.path = self._first_path()

    def __repr__(self) -> str:
        return f"<Route {self._src.stream.device} to {self._dst.stream.device}: {self.path.value}>"

    def open(self) -> None:
        """Find out whether there is a direct way, without waiting for the answer."""
        with self._lock:
            self._open()

    def settle(self) -> Path:
        """Wait until the way is known."""
        self.open()
        if self._opened is not None:
            self._opened.settle()
            # the receiver may be about to
            self._decide()
        return self.path

    def copy(
        self, src: TensorRef, dst: TensorRef, size: int, dtype: WireType = WireType.F32
    ) -> None:
        """Queue a copy of `size` bytes; nothing waits.

        Args:
            dtype: how they travel, if they are f32: not within a worker, nor where one of the two
                is a llama.cpp server.
        """
        with self._lock:
            self._open()
            if self.path is not Path.DIRECT:
                self._relay(src, dst, size, dtype)
                return
            if self._number == _WITHIN:
                dtype = WireType.F32
            number = next(self._tickets)
            self._links[0].push(src, size, self._number, number, dtype)
            self._last_take = self._links[1].take(dst, size, self._number, number, dtype)
            lost = self._src.stream.lost
        if lost is not None:
            # it may have told of that before there was this one to wait for it
            self._source_lost(lost)

    def _relay(self, src: TensorRef, dst: TensorRef, size: int, dtype: WireType) -> None:
        one, other = self._src, self._dst
        if dtype and isinstance(one, ExtLink) and isinstance(other, ExtLink):
            other.set_cast(dst, size, one.get_cast(src, size, dtype), dtype)
        else:
            other.set_tensor(dst, 0, one.get_tensor(src, 0, size, None))

    def _first_path(self) -> Path:
        src, dst = self._src, self._dst
        if not isinstance(src, ExtLink) or not isinstance(dst, ExtLink):
            self.reason = "a llama.cpp server has no direct copies"
            return Path.RELAY
        self._links = (src, dst)
        if src.reach is dst.reach:
            self._number = _WITHIN
            self._bind()
            return Path.DIRECT
        if not (src.reach.direct and dst.reach.direct):
            self.reason = "direct copies are off"
            return Path.RELAY
        return Path.UNKNOWN

    def _open(self) -> None:
        if self.path is not Path.UNKNOWN:
            return
        src, dst = self._links
        addresses = dst.reach.seen_from(src.reach)
        if not addresses:
            self.reason = f"{dst.reach.endpoint} is an address for this machine alone"
            self.path = Path.RELAY
            return
        target = PeerTarget(self._number, addresses, dst.reach.key, dst.index)
        self.path = Path.OPENING
        self._opened = src.open_peer(target)
        self._opened.on_done(self._decide)

    def _decide(self) -> None:
        """The worker has answered; called by the stream's receiver."""
        ticket = self._opened
        if ticket is None or self.path is not Path.OPENING:
            return
        if ticket.error is not None:
            self.reason = str(ticket.error)
            self.path = Path.RELAY
            return
        self.round_trip = U64.unpack(ticket.data)[0] / 1e9
        self._bind()
        self.path = Path.DIRECT

    def _bind(self) -> None:
        """Whoever waits for bytes of the source is lost with it."""
        src, _ = self._links
        src.stream.on_loss(self._source_lost)

    def _source_lost(self, error: WorkerLost) -> None:
        take = self._last_take
        if take is not None and not self._dst.stream.has_answered(take):
            self._dst.stream.fail(error, "TAKE")
