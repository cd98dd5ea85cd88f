"""A stream and the worker's end of it, which the test's own thread moves step by step."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from caravan.stream.dispatcher import Stream
from caravan.stream.framing import BaseFraming, ExtFraming
from caravan.stream.ticket import Ticket
from caravan.transport import memory
from caravan.transport.base import Transport
from caravan.transport.memory import MemoryTransport
from caravan.transport.reader import Reader
from caravan.wire import codec
from caravan.wire.commands import BASE_7, BASE_8, EXT, Command, Ext
from caravan.wire.extension import FRAME
from wired import send_all

SET, GET, CLEAR, ALLOC = EXT[Ext.SET], EXT[Ext.GET], EXT[Ext.CLEAR], EXT[Ext.ALLOC]
RECOMPUTE, MEMORY = EXT[Ext.GRAPH_RECOMPUTE], EXT[Ext.MEMORY]


@dataclass(frozen=True)
class Request:
    """What came in."""

    command: Command
    seq: int
    payload: bytes

    @property
    def name(self) -> str:
        return self.command.name


class Peer:
    """The worker's end of one connection; `table` None means the extension."""

    def __init__(self, transport: Transport, table: dict[int, Command] | None = None) -> None:
        self.transport = transport
        self.reader = Reader(transport)
        self.table = table

    def request(self, name: str | None = None) -> Request:
        """The next request; of that name."""
        if self.table is None:
            header = codec.decode_ext_request(self.reader.read(FRAME.size))
        else:
            header = codec.decode_base_request(self.reader.read(9), self.table)
        request = Request(header.command, header.seq, self.reader.read(header.length))
        assert name is None or request.name == name
        return request

    def reply(self, request: Request, payload: bytes = b"", status: int = 0) -> None:
        if self.table is None:
            head = codec.ext_frame(request.command.number, request.seq, len(payload), status)
        else:
            head = codec.base_reply(len(payload))
        self.raw(head + payload)

    def raw(self, data: bytes) -> None:
        send_all(self.transport, data)

    def close(self) -> None:
        self.transport.close()


@dataclass
class Rig:
    """A stream over a memory pair."""

    stream: Stream
    peer: Peer
    near: MemoryTransport

    def get(self, size: int, target: memoryview | None = None, fatal: bool = True) -> Ticket:
        """Post a read of `size` bytes."""
        ticket = Ticket("GET", size, target, fatal)
        self.stream.post(GET, [GET.request.pack(0, size)], ticket)
        return ticket

    def set(self, data: bytes | Ticket, *, cork: bool = False, wait_sent: bool = False) -> None:
        """Post a write."""
        self.stream.post(SET, [SET.request.pack(0), data], cork=cork, wait_sent=wait_sent)

    def take_leave(self) -> None:
        self.peer.close()
        self.stream.close()


def make_rig(
    protocol: str = "ext", timeout: float = 30.0, capacity: int = 1 << 20, device: str = "RPC0"
) -> Rig:
    """`protocol` is ext, 7 or 8."""
    near, far = memory.pair(capacity)
    table = {"ext": None, "7": BASE_7, "8": BASE_8}[protocol]
    framing = ExtFraming() if table is None else BaseFraming()
    stream = Stream(near, framing, "host:50052", device, timeout)
    return Rig(stream, Peer(far, table), near)


def stream_threads() -> list[str]:
    return [
        t.name for t in threading.enumerate() if t.name.startswith(("caravan-recv", "caravan-send"))
    ]


class Clock:
    """Stands in for the time module of the dispatcher: time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        time.sleep(0)
