"""`ExtChannel`: a connection that speaks Caravan's extension; it serves one device of a session.

Every failure is answered with a status and a text at its place in order, and the connection goes
on; only a frame that cannot be skipped ends it.
"""

from __future__ import annotations

from collections.abc import Callable

from caravan.errors import RemoteError
from caravan.transport.base import Transport
from caravan.wire.codec import MAX_PAYLOAD, ext_frame
from caravan.wire.commands import EXT, Command, Ext
from caravan.wire.extension import FRAME, MAX_ERROR_TEXT, MAX_SET_MANY, Status
from caravan.wire.records import EXT_TENSOR
from caravan.worker.buffers import BufferTable
from caravan.worker.channel import MAX_GRAPH, Channel, Step, Work, as_remote
from caravan.worker.copies import Snapshot
from caravan.worker.handlers import HANDLERS, MAX_RECORDS
from caravan.worker.lane import Lane
from caravan.worker.replies import NOTHING, Parts
from caravan.worker.table import bad, from_extension

_SHORT = 64
_LIMITS = {
    Ext.GRAPH_COMPUTE: MAX_GRAPH,
    Ext.SET_MANY: MAX_SET_MANY,
    Ext.INIT_TENSOR: MAX_RECORDS * EXT_TENSOR.itemsize,
    Ext.ALLOC_SIZE: MAX_RECORDS * EXT_TENSOR.itemsize,
}
# What holds the device too long for the thread that also answers PING.
_QUEUED = frozenset({Ext.GRAPH_RECOMPUTE})


def error_reply(number: int, seq: int, error: RemoteError) -> Parts:
    """A reply with a status and a text."""
    text = error.text.encode()[:MAX_ERROR_TEXT]
    return (ext_frame(number, seq, len(text), error.code), text)


class ExtChannel(Channel):
    """See the module."""

    def __init__(
        self, transport: Transport, lane: Lane, lanes: list[Lane], buffers: BufferTable
    ) -> None:
        super().__init__(transport, lanes, buffers)
        self.lane = lane

    def _read(self) -> bool:
        while True:
            number, _status, _flags, seq, length = FRAME.unpack(self.reader.read(FRAME.size))
            command = EXT.get(number)
            if length > MAX_PAYLOAD:
                self._refuse(number, seq, bad(f"a payload of {length} bytes"))
                self.replies.drain(5.0)
                return False
            if number == Ext.BYE:
                return True
            self._take(command, number, seq, length)

    def _take(self, command: Command | None, number: int, seq: int, length: int) -> None:
        if command is None or number == Ext.SESSION:
            self.reader.skip(length)
            self._refuse(number, seq, RemoteError(Status.UNKNOWN_COMMAND, f"command {number}"))
            return
        self.lane.counters.count(command.name)
        if not command.fits(length) or length > _LIMITS.get(Ext(number), MAX_PAYLOAD):
            self.reader.skip(length)
            self._refuse(number, seq, bad(f"{command.name} cannot have {length} bytes"))
        elif number == Ext.SET:
            self._set(command, seq, length)
        elif number == Ext.PING:
            self.replies.now((ext_frame(number, seq, 0),))
        else:
            self._simple(command, seq, self.reader.read(length))

    def _simple(self, command: Command, seq: int, payload: bytes) -> None:
        if command.number == Ext.GRAPH_COMPUTE:
            self._graph(command, seq, payload)
        elif command.number == Ext.COPY and self._copy_across(command, seq, payload):
            return
        else:
            owed = self._owed(command, payload)
            self.lane.frees_posted += command.number == Ext.FREE
            handler = HANDLERS[command.number]
            inline = command.number not in _QUEUED
            self.post(
                self.lane,
                self._answer(command, seq, lambda: handler(self.lane, payload)),
                inline=inline,
                held=len(payload),
                owed=owed,
            )

    def _owed(self, command: Command, payload: bytes) -> int:
        """Bytes of a GET's answer, so that unread answers are bounded."""
        if command.number != Ext.GET:
            return 0
        address, size = command.request.unpack(payload)
        try:
            self.lane.locate(address, size)
        except RemoteError:
            return 0
        return int(size)

    def _answer(self, command: Command, seq: int, body: Callable[[], Parts]) -> Work:
        """`body` as work that never raises and returns a whole reply."""

        def work() -> Parts:
            try:
                parts = body()
            except Exception as exc:
                return error_reply(command.number, seq, as_remote(exc))
            if command.silent:
                return NOTHING
            return (ext_frame(command.number, seq, sum(map(len, parts))), *parts)

        return work

    def _refuse(self, number: int, seq: int, error: RemoteError) -> None:
        """An error at its place among the device's replies."""
        self.answer_now(error_reply(number & 0xFF, seq, error))

    def _set(self, command: Command, seq: int, length: int) -> None:
        (address,) = command.request.unpack(self.reader.read(command.request.size))
        size = length - command.request.size
        try:
            self.lane.locate(address, size)
        except RemoteError as exc:
            self.reader.skip(size)
            self._refuse(command.number, seq, exc)
            return

        def guard(step: Step) -> Parts:
            try:
                step()
            except Exception as exc:
                return error_reply(command.number, seq, as_remote(exc))
            return NOTHING

        self.receive(self.lane, size, lambda: self.lane.locate(address, size), guard)

    def _copy_across(self, command: Command, seq: int, payload: bytes) -> bool:
        """Start a copy from another device of the session; False when it is not one."""
        src, dst, size = command.request.unpack(payload)
        try:
            index = self.buffers.locate(src, size)[0].device
        except RemoteError:
            return False
        if index == self.lane.device.index:
            return False
        snapshot = Snapshot(self.lanes[index], src, size)
        snapshot.post()

        def body() -> Parts:
            snapshot.write(self.lane, dst)
            return NOTHING

        self.post(self.lane, self._answer(command, seq, body), inline=False, held=size)
        return True

    def _graph(self, command: Command, seq: int, payload: bytes) -> None:
        """Check and build on this thread, while the device computes what came before."""
        lane = self.lane
        head = command.request.size
        uid, n_nodes, n_tensors = command.request.unpack(payload[:head])
        try:
            table = from_extension(n_nodes, n_tensors, memoryview(payload)[head:])
        except RemoteError as exc:
            self._refuse(command.number, seq, exc)
            return
        ready = lane.build_ahead(table)

        def body() -> Parts:
            graph = ready if ready is not None and lane.current(ready) else lane.build(table)
            if uid:
                lane.graphs.put(uid, graph)
            lane.compute(graph)
            return NOTHING

        self.post(lane, self._answer(command, seq, body), inline=False, held=len(payload))
