"""Questions to a worker about its device: its clock, its totals, its timeline, its memory.

All but that for memory are answered aside, also while the device computes. A worker that does not
know them refuses them, with a RemoteError, and the stream goes on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from caravan.errors import RemoteProtocolError
from caravan.stream.dispatcher import Stream
from caravan.stream.ticket import Ticket
from caravan.trace.clock import Reading, read_clock
from caravan.trace.spans import Span
from caravan.wire.commands import EXT, Command, Ext
from caravan.wire.extension import MAX_SPANS
from caravan.wire.records import SPAN


@dataclass(frozen=True, slots=True)
class DeviceStats:
    """Totals of one device since its session began, as its worker counted them.

    Attributes:
        now: the worker's time, ns, of no meaning but for differences.
        computing, waiting, sending: ns that it spent computing graphs; else receiving input, or
            waiting for a copy from another device; else handing results and copies to the network.
            No moment counts twice, and the rest of the time it was idle.
        bytes_in, bytes_out: payload moved to and from the device.
        graphs: how many graphs it computed.
    """

    now: int
    computing: int
    waiting: int
    sending: int
    bytes_in: int
    bytes_out: int
    graphs: int


def ask_stats(stream: Stream, timeout: float | None = None) -> DeviceStats:
    """The totals up to now. Waits, `timeout` seconds at most (None: as the stream does).

    Raises WorkerLost, RemoteError if the worker has none, TransportTimeout.
    """
    command = EXT[Ext.STATS]
    assert command.reply is not None
    data = _ask(stream, command, b"", command.reply.size, timeout)
    return DeviceStats(*command.reply.unpack(data))


class Question(Ticket):
    """Asked without waiting: look at `done` later, and take the values.

    Attributes:
        at: when it was posted, and `answered` when its answer was read, by time.perf_counter; who
            reads may be late, if others wait for what comes before.
    """

    __slots__ = ("answered", "at")

    def __init__(self, stream: Stream, number: Ext) -> None:
        command = EXT[number]
        assert command.reply is not None
        super().__init__(command.name, command.reply.size, fatal=False)
        self.at = self.answered = time.perf_counter()
        stream.post(command, [], self)

    def resolve(self, data: bytes | bytearray) -> None:
        self.answered = time.perf_counter()
        super().resolve(data)


class StatsQuestion(Question):
    """For `DeviceStats`, as `ask_stats`."""

    __slots__ = ()

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream, Ext.STATS)

    def stats(self) -> DeviceStats:
        """What was answered; waits if nothing is yet. Raises as `ask_stats`."""
        reply = EXT[Ext.STATS].reply
        assert reply is not None
        return DeviceStats(*reply.unpack(self.wait()))


class MemoryQuestion(Question):
    """For the memory of the device. It is answered in its turn, after what was posted before."""

    __slots__ = ()

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream, Ext.MEMORY)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes; waits if nothing is answered yet. Raises as `ask_stats`."""
        reply = EXT[Ext.MEMORY].reply
        assert reply is not None
        free, total = reply.unpack(self.wait())
        return free, total


def ask_clock(stream: Stream, timeout: float | None = None) -> Reading:
    """How far the worker's clock is from ours. Several round trips; raises as `ask_stats`."""
    command = EXT[Ext.CLOCK]
    assert command.reply is not None
    layout = command.reply

    def ask() -> int:
        (now,) = layout.unpack(_ask(stream, command, b"", layout.size, timeout))
        return int(now)

    return read_clock(ask)


def ask_timeline(stream: Stream, on: bool, timeout: float | None = None) -> tuple[list[Span], int]:
    """The spans recorded so far, and how many more there were; goes on recording if `on`.

    Waits; raises as `ask_stats`, and RemoteProtocolError for what are no spans.
    """
    command = EXT[Ext.TIMELINE]
    assert command.reply is not None
    head = command.reply
    most = head.size + MAX_SPANS * SPAN.itemsize
    request = command.request.pack(on)
    data = memoryview(_ask(stream, command, request, most, timeout, at_most=True))
    (dropped,) = head.unpack_from(data)
    rest = data[head.size :]
    if len(rest) % SPAN.itemsize:
        raise RemoteProtocolError(f"a timeline of {len(rest)} bytes")
    return [Span(*values) for values in np.frombuffer(rest, SPAN).tolist()], dropped


def _ask(
    stream: Stream,
    command: Command,
    payload: bytes,
    size: int,
    timeout: float | None,
    at_most: bool = False,
) -> bytes | bytearray:
    ticket = Ticket(command.name, size, fatal=False, at_most=at_most)
    stream.post(command, [payload], ticket)
    return ticket.wait(timeout)
