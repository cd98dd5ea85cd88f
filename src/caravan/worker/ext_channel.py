"""`ExtChannel`: a connection that speaks Caravan's extension; it serves one device of a session.

Every failure is answered with a status and a text at its place in order, and the connection goes
on; only a frame that cannot be skipped ends it. A refusal is answered before the rest is skipped,
which may never come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from caravan.errors import RemoteError, TransportError
from caravan.transport.base import Transport
from caravan.wire.codec import MAX_PAYLOAD, ext_frame
from caravan.wire.commands import EXT, LOAD_ENTRY, Command, Ext
from caravan.wire.dtypes import MAX_CAST
from caravan.wire.extension import (
    FRAME,
    MAX_ERROR_TEXT,
    MAX_LOAD,
    MAX_QUESTION,
    MAX_SET_MANY,
    Status,
    error_text,
)
from caravan.wire.records import EXT_TENSOR
from caravan.worker.buffers import BufferTable
from caravan.worker.channel import MAX_GRAPH, Channel, Step, Work, as_remote
from caravan.worker.executor import Job
from caravan.worker.handlers import ASIDE, HANDLERS, MAX_RECORDS, Handler
from caravan.worker.lane import Lane
from caravan.worker.loader import Loader, wishes
from caravan.worker.log import log
from caravan.worker.outlet import Parts
from caravan.worker.pair import ReadingPair
from caravan.worker.replies import NOTHING
from caravan.worker.table import bad, from_extension

_SHORT = 64
# They compute or wait (a PUSH for room), so they are not for the thread that reads.
_LONG = (Ext.GRAPH_RECOMPUTE, Ext.PUSH, Ext.TAKE)
_MAX_OPENING = 32
# Tensors that a device's connection may have asked for and not been told of yet.
MAX_LOADING = 8192
NOT_HERE = (Ext.SESSION, Ext.PEER, Ext.DATA, Ext.AUTH, Ext.PROVE, Ext.TLS)
_LIMITS: dict[int, int] = {
    Ext.GRAPH_COMPUTE: MAX_GRAPH,
    Ext.SET_MANY: MAX_SET_MANY,
    Ext.LOAD: EXT[Ext.LOAD].request.size + MAX_LOAD * LOAD_ENTRY.size,
    Ext.SET_CAST: EXT[Ext.SET_CAST].request.size + MAX_CAST,
    Ext.PEER_OPEN: MAX_QUESTION,
    Ext.INIT_TENSOR: MAX_RECORDS * EXT_TENSOR.itemsize,
    Ext.ALLOC_SIZE: MAX_RECORDS * EXT_TENSOR.itemsize,
}


def error_reply(number: int, seq: int, error: RemoteError) -> Parts:
    """A reply with a status and a text."""
    text = error.text.encode()[:MAX_ERROR_TEXT]
    return (ext_frame(number, seq, len(text), error.code), text)


class ExtChannel(Channel):
    """See the module.

    Args:
        loader: of the session; None where this machine has no weights of its own.
    """

    def __init__(
        self,
        transport: Transport,
        lane: Lane,
        lanes: list[Lane],
        buffers: BufferTable,
        loader: Loader | None = None,
    ) -> None:
        super().__init__(transport, lanes, buffers, lane.spans)
        self.lane = lane
        self._loader = loader
        self._loading = 0
        self._loads = threading.Lock()
        self._in_order = False
        self._opening = threading.BoundedSemaphore(_MAX_OPENING)

    def _read(self) -> bool:
        ReadingPair(self._read_on, "reader").run()
        return self._in_order

    def _read_on(self) -> Job | None:
        """Read up to something long that the device is free for; None at the end."""
        try:
            return self._read_requests()
        except TransportError as exc:
            self.note_broken(exc)
            return None
        except MemoryError:
            self.starve()
            return None

    def _read_requests(self) -> Job | None:
        while True:
            number, _status, _flags, seq, length = FRAME.unpack(self.reader.read(FRAME.size))
            command = EXT.get(number)
            if length > MAX_PAYLOAD:
                self._refuse(number, seq, bad(f"a payload of {length} bytes"))
                self.replies.drain(5.0)
                return None
            if number == Ext.BYE:
                self._in_order = True
                self._bye(length)
                return None
            job = self._take(command, number, seq, length)
            if job is not None:
                return job

    def _bye(self, length: int) -> None:
        """The head leaves; what it says may be why it does not go together with this worker."""
        if 0 < length <= MAX_ERROR_TEXT:
            log(f"{self.transport.peer} leaves: {error_text(self.reader.read(length))}")

    def _take(self, command: Command | None, number: int, seq: int, length: int) -> Job | None:
        """Do or queue one request; what is long and can be done at once is returned instead."""
        if command is None or number in NOT_HERE:
            self._refuse(number, seq, RemoteError(Status.UNKNOWN_COMMAND, f"command {number}"))
            self.reader.skip(length)
            return None
        self.lane.counters.count(command.name)
        if not command.fits(length) or length > _LIMITS.get(number, MAX_PAYLOAD):
            self._refuse(number, seq, bad(f"{command.name} cannot have {length} bytes"))
            self.reader.skip(length)
        elif number == Ext.SET:
            self._set(command, seq, length)
        elif command.aside:
            self._aside(command, seq, self.reader.read(length))
        else:
            return self._simple(command, seq, self.reader.read(length))
        return None

    def _aside(self, command: Command, seq: int, payload: bytes) -> None:
        """Answer now, whatever the device is at and whatever is still to be answered."""
        if command.number == Ext.LOAD:
            self._load(command, seq, payload)
        elif command.number != Ext.PEER_OPEN:
            self._answer_aside(command, seq, payload)
        elif self._opening.acquire(blocking=False):
            threading.Thread(
                target=self._open_peer, args=(command, seq, payload), name="peer", daemon=True
            ).start()
        else:
            text = f"{_MAX_OPENING} peers are being connected"
            self.replies.now(error_reply(command.number, seq, RemoteError(Status.BUSY, text)))

    def _load(self, command: Command, seq: int, payload: bytes) -> None:
        """Check on this thread; the answer comes from one of the loader's."""
        try:
            wanted = wishes(self.lane, payload)
            self._count_loads(len(wanted))
        except RemoteError as exc:
            self.replies.now(error_reply(command.number, seq, exc))
            return

        def answer(sources: bytes) -> None:
            with self._loads:
                self._loading -= len(wanted)
            self.replies.now((ext_frame(command.number, seq, len(sources)), sources))

        if self._loader is None:
            answer(bytes(len(wanted)))
        else:
            self._loader.load(self.lane, wanted, answer)

    def _count_loads(self, count: int) -> None:
        """Raises RemoteError when too many are being looked for."""
        with self._loads:
            if self._loading + count > MAX_LOADING:
                raise RemoteError(Status.BUSY, f"{self._loading} tensors are being looked for")
            self._loading += count

    def _open_peer(self, command: Command, seq: int, payload: bytes) -> None:
        try:
            self._answer_aside(command, seq, payload)
        finally:
            self._opening.release()

    def _answer_aside(self, command: Command, seq: int, payload: bytes) -> None:
        try:
            parts = ASIDE[command.number](self.lane, payload)
        except Exception as exc:
            self.replies.now(error_reply(command.number, seq, as_remote(exc)))
        else:
            self.replies.now((ext_frame(command.number, seq, sum(map(len, parts))), *parts))

    def _simple(self, command: Command, seq: int, payload: bytes) -> Job | None:
        if command.number == Ext.GRAPH_COMPUTE:
            return self._graph(command, seq, payload)
        self.lane.frees_posted += command.number == Ext.FREE
        handler = HANDLERS[command.number]
        work = self._answer(command, seq, lambda: handler(self.lane, payload))
        held = len(payload) if len(payload) > _SHORT else 0
        if command.number in _LONG:
            return self.long(self.lane, work, held)
        if command.silent and self._at_once(command, seq, handler, payload):
            return None
        self.post(self.lane, work, held=held, owed=self._owed(command, payload))
        return None

    def _at_once(self, command: Command, seq: int, handler: Handler, payload: bytes) -> bool:
        """Do a silent command here and now; False when the device is not idle."""
        executor = self.lane.executor
        if not executor.try_claim():
            return False
        error: RemoteError | None = None
        try:
            handler(self.lane, payload)
        except Exception as exc:
            error = as_remote(exc)
        finally:
            executor.release()
        if error is not None:
            self._refuse(command.number, seq, error)
        return True

    def _owed(self, command: Command, payload: bytes) -> int:
        """Bytes of a GET's answer, so that unread answers are bounded."""
        if command.number not in (Ext.GET, Ext.GET_CAST):
            return 0
        address, size, *cast = command.request.unpack(payload)
        try:
            self.lane.locate(address, size)
        except RemoteError:
            return 0
        return int(size) // (2 if cast else 1)

    def _answer(self, command: Command, seq: int, body: Callable[[], Parts]) -> Work:
        """`body` as work that never raises and returns a whole reply."""

        silent = command.silent

        def work() -> Parts:
            try:
                parts = body()
            except Exception as exc:
                return error_reply(command.number, seq, as_remote(exc))
            if silent:
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
            self._refuse(command.number, seq, exc)
            self.reader.skip(size)
            return

        def guard(step: Step) -> Parts:
            try:
                step()
            except Exception as exc:
                return error_reply(command.number, seq, as_remote(exc))
            return NOTHING

        self.receive(self.lane, size, lambda: self.lane.locate(address, size), guard)

    def _graph(self, command: Command, seq: int, payload: bytes) -> Job | None:
        """Check and build on this thread, while the device computes what came before."""
        lane = self.lane
        head = command.request.size
        uid, n_nodes, n_tensors = command.request.unpack(payload[:head])
        try:
            table = from_extension(n_nodes, n_tensors, memoryview(payload)[head:])
        except RemoteError as exc:
            self._refuse(command.number, seq, exc)
            return None
        ready = lane.build_ahead(table)

        def body() -> Parts:
            graph = ready if ready is not None and lane.current(ready) else lane.build(table)
            if uid:
                lane.graphs.put(uid, graph)
            lane.compute(graph, uid)
            return NOTHING

        return self.long(lane, self._answer(command, seq, body), len(payload))
