"""`BaseChannel`: a connection that speaks llama.cpp's own RPC, protocol 7 or 8.

It addresses all devices of the worker by number; replies go out in request order, whichever device
finishes first. Any refusal is logged and ends the connection, as the protocol has it.
"""

from __future__ import annotations

from collections.abc import Callable

from caravan.errors import ProtocolError, RemoteError, TransportError
from caravan.transport.base import Transport
from caravan.wire.codec import BASE_REQUEST, base_reply, decode_base_request
from caravan.wire.commands import U8, Base, Command, base_table
from caravan.worker import base_handlers as handlers
from caravan.worker.base_handlers import TensorRef
from caravan.worker.buffers import Buffer, BufferTable
from caravan.worker.channel import BIG, MAX_GRAPH, Channel, Step, Work, as_remote
from caravan.worker.copies import Snapshot
from caravan.worker.executor import Job
from caravan.worker.lane import Lane
from caravan.worker.log import log
from caravan.worker.outlet import Parts
from caravan.worker.pair import ReadingPair
from caravan.worker.replies import NOTHING
from caravan.worker.table import bad, from_base
from caravan.worker.weights import Weights

GRAPHS_8 = 1024
# Their tensors together; an honest client of a large model comes near to a third of it.
KEPT_8 = 1 << 23

_COLLECTIVE = frozenset({Base.COMM_INIT, Base.COMM_ALLREDUCE, Base.COMM_FREE})
_GETS = frozenset({Base.GET_TENSOR, Base.GET_TENSOR_2D})
_QUESTIONS = frozenset(
    {
        Base.DEVICE_COUNT,
        Base.GET_ALIGNMENT,
        Base.GET_MAX_SIZE,
        Base.GET_ALLOC_SIZE,
        Base.GET_DEVICE_MEMORY,
    }
)


class BaseChannel(Channel):
    """See the module.

    Args:
        major: 7 or 8.
        weights: the weight cache, if the worker has one.
    """

    def __init__(
        self,
        transport: Transport,
        lanes: list[Lane],
        buffers: BufferTable,
        major: int,
        weights: Weights | None = None,
    ) -> None:
        super().__init__(transport, lanes, buffers)
        self._weights = weights
        self._table = base_table(major)
        self._failed = False
        # set by the thread that reads, unset by the one that has computed
        self._computing = False
        # llama.cpp's client connects anew for every question until it has a buffer
        self.only_asked = True

    def _read(self) -> bool:
        ReadingPair(self._read_on, "reader").run()
        return False

    def _read_on(self) -> Job | None:
        """Read up to something long that a device is free for; None at the end."""
        try:
            while not self._failed:
                job = self._read_request()
                if job is not None:
                    return job
            self.replies.drain(1.0)
        except TransportError as exc:
            self.note_broken(exc)
        except MemoryError:
            self.starve()
        return None

    def _read_request(self) -> Job | None:
        data = self.reader.read(BASE_REQUEST.size)
        try:
            header = decode_base_request(data, self._table)
            return self._take(header.command, header.length)
        except (RemoteError, ProtocolError) as exc:
            self._fail(exc)
            return None

    def _fail(self, exc: Exception) -> None:
        """The first failure is told; all end the connection."""
        self.only_asked = False
        if not self._failed:
            self._failed = True
            log(f"closing the connection to {self.transport.peer}: {as_remote(exc)}")
            self.transport.close()

    def _take(self, command: Command, length: int) -> Job | None:
        """Do or queue one request; what is long and can be done at once is returned instead."""
        number = command.number
        if number not in _QUESTIONS:
            self.only_asked = False
        if number == Base.HELLO:
            raise bad("a second HELLO")
        if number in (Base.SET_TENSOR, Base.SET_TENSOR_2D):
            self._set(command, length)
            return None
        if length > MAX_GRAPH:
            raise bad(f"{command.name} of {length} bytes is too big")
        payload = self.reader.read(length)
        if number in _COLLECTIVE:
            self._collective(command)
        elif number == Base.SET_TENSOR_HASH and self._weights is not None:
            self._set_cached(command, payload, self._weights)
        elif number in handlers.NOW:
            parts = handlers.NOW[number](self.lanes, self.buffers, payload)
            self.answer_now((base_reply(sum(map(len, parts))), *parts))
        elif number == Base.GRAPH_COMPUTE:
            return self._graph(command, payload)
        elif number == Base.COPY_TENSOR:
            self._copy(command, payload)
        else:
            return self._on_device(command, payload)
        return None

    def _collective(self, command: Command) -> None:
        """Not offered: INIT is answered with no, after which a client adds up by itself."""
        text = f"{command.name}: collective operations are not offered by this worker"
        if command.number == Base.COMM_ALLREDUCE:
            raise bad(text)
        if command.number == Base.COMM_INIT:
            log(f"{self.transport.peer}: {text}; the client goes on without them")
            self.answer_now((base_reply(U8.size), U8.pack(0)))

    def _on_device(self, command: Command, payload: bytes) -> Job | None:
        number = command.number
        lane = handlers.LANES[number](self.lanes, self.buffers, payload)
        lane.counters.count(command.name)
        handler = handlers.HANDLERS[number]
        if number == Base.FREE_BUFFER:
            lane.frees_posted += 1
        work = self._answer(command, lambda: handler(lane, payload))
        if number == Base.GRAPH_RECOMPUTE:
            return self._compute(lane, work)
        self.post(lane, work, owed=self._owed(command, payload))
        return None

    def _compute(self, lane: Lane, work: Work, held: int = 0) -> Job | None:
        """One of the two reading threads may compute; the other one reads for all devices."""
        if self._computing:
            self.post(lane, work, inline=False, held=held)
            return None
        job = self.long(lane, work, held)
        if job is None:
            return None
        self._computing = True

        def compute() -> None:
            try:
                job()
            finally:
                self._computing = False

        return compute

    def _owed(self, command: Command, payload: bytes) -> int:
        """Bytes of a GET's answer, so that unread answers are bounded; raises RemoteError."""
        if command.number not in _GETS:
            return 0
        record, offset, size, *rows = command.request.unpack(payload)
        span = handlers.span_2d(size, *rows) if rows else size
        self.buffers.locate(TensorRef.parse(record).part(offset, span), span)
        return int(span)

    def _answer(self, command: Command, body: Callable[[], Parts]) -> Work:
        """`body` as work that never raises and returns a whole reply."""

        def work() -> Parts:
            if self._failed:
                return NOTHING
            try:
                parts = body()
            except Exception as exc:
                self._fail(exc)
                return NOTHING
            return NOTHING if command.silent else (base_reply(sum(map(len, parts))), *parts)

        return work

    def _guard(self, step: Step) -> Parts:
        try:
            step()
        except Exception as exc:
            self._fail(exc)
        return NOTHING

    def _set(self, command: Command, length: int) -> None:
        payload = self.reader.read(command.request.size)
        size = length - command.request.size
        if command.number == Base.SET_TENSOR_2D:
            self._set_2d(command, payload, size)
            return
        record, flagged, offset = command.request.unpack(payload)
        lane = handlers.of_tensor(self.lanes, self.buffers, payload)
        lane.counters.count(command.name)
        address = TensorRef.parse(record).part(offset, size)

        def locate() -> tuple[Buffer, int]:
            return lane.locate(address, size)

        locate()
        keep = self._weights.store if flagged and self._weights is not None else None
        self.receive(lane, size, locate, self._guard, keep)

    def _set_cached(self, command: Command, payload: bytes, weights: Weights) -> None:
        lane = handlers.of_tensor(self.lanes, self.buffers, payload)
        lane.counters.count(command.name)
        self.post(
            lane,
            self._answer(command, lambda: handlers.set_tensor_cached(lane, payload, weights)),
        )

    def _set_2d(self, command: Command, payload: bytes, size: int) -> None:
        record, offset, row, n_rows, stride = command.request.unpack(payload)
        span = handlers.span_2d(row, n_rows, stride)
        if row * n_rows != size:
            raise bad(f"{n_rows} rows of {row} bytes are not {size} bytes")
        lane = handlers.of_tensor(self.lanes, self.buffers, payload)
        lane.counters.count(command.name)
        address = TensorRef.parse(record).part(offset, span)
        lane.locate(address, span)
        if size > BIG:
            with lane.executor.turn():
                buffer, at = lane.locate(address, span)
                for i in range(n_rows):
                    self.take_pieces(lane, buffer, at + i * stride, row)
            return
        data = bytearray(size)
        self.reader.read_into(memoryview(data))

        def body() -> Parts:
            buffer, at = lane.locate(address, span)
            if buffer.native is not None:
                handlers.write_rows(buffer.native, at, row, stride, data)
            return NOTHING

        self.post(lane, self._answer(command, body), held=size)

    def _copy(self, command: Command, payload: bytes) -> None:
        src, dst = (TensorRef.parse(record) for record in command.request.unpack(payload))
        size = src.nbytes
        source = self.lanes[self.buffers.locate(src.part(0, size), size)[0].device]
        lane = self.lanes[self.buffers.locate(dst.part(0, size), size)[0].device]
        lane.counters.count(command.name)
        if source is lane:
            body = self._answer(
                command, lambda: handlers.copy_tensor(lane, src.data, dst.data, size)
            )
            self.post(lane, body)
            return
        snapshot = Snapshot(source, src.data, size)
        snapshot.post()

        def across() -> Parts:
            snapshot.write(lane, dst.data)
            return (U8.pack(1),)

        self.post(lane, self._answer(command, across), inline=False, held=size)

    def _graph(self, command: Command, payload: bytes) -> Job | None:
        """Check and build on this thread, while the device computes what came before."""
        head = command.request.size
        device, *uid, n_nodes = command.request.unpack(payload[:head])
        if device >= len(self.lanes):
            raise bad(f"there is no device {device}")
        lane = self.lanes[device]
        lane.counters.count(command.name)
        table = from_base(n_nodes, memoryview(payload)[head:])
        key = uid[0] if uid else 0
        ready = lane.build_ahead(table)

        def body() -> Parts:
            graph = ready if ready is not None and lane.current(ready) else lane.build(table)
            if key or not uid:
                lane.graphs.put(key, graph)
            lane.compute(graph)
            return NOTHING

        return self._compute(lane, self._answer(command, body), len(payload))
