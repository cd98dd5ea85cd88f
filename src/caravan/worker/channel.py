"""`Channel`: one connection of a session, in either protocol: reads requests, posts them to lanes.

Its thread is the connection's reader. Cheap work on an idle device is done right here; everything
else is queued, bounded in bytes. Protocols subclass it: they parse, and say what an error does.
"""

from __future__ import annotations

from collections.abc import Callable

from caravan.errors import (
    AllocationError,
    CaravanError,
    ConnectionClosed,
    DeviceError,
    RemoteError,
    TransportError,
)
from caravan.trace.recorder import Recorder
from caravan.trace.spans import Kind
from caravan.transport.base import Transport
from caravan.transport.reader import Reader
from caravan.wire.extension import Status
from caravan.worker.buffers import Buffer, BufferTable
from caravan.worker.executor import Budget, Job
from caravan.worker.lane import Lane
from caravan.worker.log import log
from caravan.worker.outlet import Parts
from caravan.worker.replies import NOTHING, Replies

QUEUE_LIMIT = 256 << 20
# A payload above this waits for the device rather than for memory of its own.
BIG = 64 << 20
# Of what is too big: on its way to memory that the host cannot reach.
_PIECE = 16 << 20

MAX_GRAPH = 64 << 20

Work = Callable[[], Parts]
Locate = Callable[[], tuple[Buffer, int]]
Step = Callable[[], None]
Guard = Callable[[Step], Parts]
Keep = Callable[[memoryview], None]


class Channel:
    """See the module; `serve` returns when the connection is over.

    Attributes:
        only_asked: nothing was allocated or computed, so the process is as it was before.
        broke: how the connection broke, if it did.
    """

    only_asked = False
    broke: TransportError | None = None

    def __init__(
        self,
        transport: Transport,
        lanes: list[Lane],
        buffers: BufferTable,
        recorder: Recorder | None = None,
    ) -> None:
        self.transport = transport
        self.lanes = lanes
        self.buffers = buffers
        self.reader = Reader(transport)
        self.replies = Replies(transport, recorder)
        self._budget = Budget(QUEUE_LIMIT)

    def serve(self) -> bool:
        """Read until the end; True when the peer left in order."""
        try:
            return self._read()
        except TransportError as exc:
            self.note_broken(exc)
            return False

    def _read(self) -> bool:
        raise NotImplementedError

    def note_broken(self, exc: TransportError) -> None:
        """Keep what happened, and not the error: its frames, and its cause's, hold this channel."""
        self.broke = type(exc)(str(exc))

    def starve(self) -> None:
        """There is no memory for what comes: nobody knows where the next message begins."""
        self.broke = ConnectionClosed("the worker has no memory for what its head sends")
        log(f"closing the connection to {self.transport.peer}: out of memory")

    def post(
        self, lane: Lane, work: Work, *, inline: bool = True, held: int = 0, owed: int = 0
    ) -> None:
        """Do `work` (which never raises) at its place in the lane and reply with what it returns.

        Args:
            held: payload bytes that `work` keeps, counted against the queue's bound.
            owed: size of the reply, if it is worth counting.
        """
        executor = lane.executor
        if inline and executor.try_claim():
            try:
                self._finish(work, owed)
            finally:
                executor.release()
            return
        executor.submit(self.job(work, held, owed))

    def long(self, lane: Lane, work: Work, held: int = 0) -> Job | None:
        """Queue what may take long; when the device is free for it, return what sets it going."""
        executor = lane.executor
        return executor.work_off if executor.enlist(self.job(work, held)) else None

    def job(self, work: Work, held: int = 0, owed: int = 0) -> Job:
        """`work` with its place among the replies, for an executor."""
        if held:
            self._budget.acquire(held)
        slot = self.replies.reserve(owed)

        def job() -> None:
            try:
                self.replies.complete(slot, work())
            finally:
                if held:
                    self._budget.release(held)

        return job

    def _finish(self, work: Work, owed: int) -> None:
        """Work done on this thread: its place is right after everything that came before."""
        parts = work()
        if parts:
            self.replies.complete(self.replies.reserve(owed), parts)

    def answer_now(self, parts: Parts) -> None:
        """A reply that no device is needed for, at its place."""
        self.replies.complete(self.replies.reserve(), parts)

    def receive(
        self, lane: Lane, size: int, locate: Locate, guard: Guard, keep: Keep | None = None
    ) -> None:
        """Take `size` payload bytes to where `locate` says, straight into device memory if it can.

        `guard` runs a step and turns its error into the protocol's answer. The caller has checked
        once that the place exists; it is looked up again at the device's turn. `keep` is shown the
        payload when it has arrived, on this thread, and must not raise.
        """
        executor = lane.executor
        if executor.try_claim():
            try:
                self._finish(lambda: self._fill(lane, size, locate, guard, keep), 0)
            finally:
                executor.release()
        elif size > BIG:
            loan = executor.lend()
            try:
                self._finish(lambda: self._fill(lane, size, locate, guard, keep), 0)
            finally:
                loan.end()
        else:
            data = bytearray(size)
            self._read_into(lane, memoryview(data), keep)
            self.post(
                lane,
                lambda: guard(lambda: _write(lane, data, locate)),
                inline=False,
                held=size,
            )

    def _fill(
        self, lane: Lane, size: int, locate: Locate, guard: Guard, keep: Keep | None
    ) -> Parts:
        """Read the payload at the device's turn; it is consumed whatever happens."""
        places: list[tuple[Buffer, int]] = []
        parts = guard(lambda: places.append(locate()))
        if not places:
            self.reader.skip(size)
            return parts
        buffer, offset = places[0]
        if buffer.native is not None and buffer.native.view is not None:
            self._read_into(lane, buffer.native.view[offset : offset + size], keep)
            lane.counters.bytes_in += size
            return NOTHING
        if size > BIG:
            return guard(lambda: self.take_pieces(lane, buffer, offset, size))
        data = bytearray(size)
        self._read_into(lane, memoryview(data), keep)
        return guard(lambda: _write(lane, data, locate))

    def take_pieces(self, lane: Lane, buffer: Buffer, offset: int, size: int) -> None:
        """Take payload to a place that has been checked, at the device's turn.

        A failure comes when all has been read.
        """
        native = buffer.native
        if native is not None and native.view is not None:
            self._read_into(lane, native.view[offset : offset + size], None)
            lane.counters.bytes_in += size
            return
        failure: Exception | None = None
        for done in range(0, size, _PIECE):
            data = bytearray(min(_PIECE, size - done))
            self._read_into(lane, memoryview(data), None)
            try:
                if native is not None and failure is None:
                    native.write(offset + done, data)
            except Exception as exc:
                failure = exc
            lane.counters.bytes_in += len(data)
        if failure is not None:
            raise failure

    def _read_into(self, lane: Lane, target: memoryview, keep: Keep | None) -> None:
        """Receive a payload for a device: unless it computes meanwhile, it is waiting for it."""
        with lane.spans.during(Kind.SET, len(target)):
            self.reader.read_into(target)
        if keep is not None:
            keep(target)


def _write(lane: Lane, data: bytearray, locate: Locate) -> None:
    buffer, offset = locate()
    if buffer.native is not None:
        buffer.native.write(offset, data)
    lane.counters.bytes_in += len(data)


def as_remote(exc: Exception) -> RemoteError:
    """Any error of a handler as what the wire can say."""
    if isinstance(exc, RemoteError):
        return exc
    if isinstance(exc, AllocationError | MemoryError):
        return RemoteError(Status.OUT_OF_MEMORY, str(exc) or "out of memory")
    if isinstance(exc, DeviceError):
        return RemoteError(Status.COMPUTE_FAILED, str(exc))
    if isinstance(exc, CaravanError):
        return RemoteError(Status.BAD_REQUEST, str(exc))
    return RemoteError(Status.INTERNAL, f"internal error: {type(exc).__name__}: {exc}")
