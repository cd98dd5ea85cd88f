"""Copies between buffers of one session, on one device or across two.

Across: the source's lane takes a snapshot after its earlier work; the destination's lane waits for
it at its own place. The snapshot is always posted first, so two lanes never wait for each other.
"""

from __future__ import annotations

import threading

from caravan.errors import RemoteError
from caravan.trace.spans import Kind
from caravan.transport.base import Buffer as Bytes
from caravan.wire.extension import Status
from caravan.worker.lane import Lane


def copy_within(lane: Lane, src: int, dst: int, size: int) -> None:
    """Copy between two wire addresses of one device; raises RemoteError."""
    source, source_offset = lane.locate(src, size)
    target, target_offset = lane.locate(dst, size)
    if source.native is not None and target.native is not None:
        with lane.spans.during(Kind.COPY, size):
            target.native.copy(target_offset, source.native, source_offset, size)


class Snapshot:
    """Bytes of one device on their way to another."""

    def __init__(self, lane: Lane, address: int, size: int) -> None:
        self._lane = lane
        self._address = address
        self._size = size
        self._data: Bytes = b""
        self._error: RemoteError | None = None
        self._done = threading.Event()

    def post(self) -> None:
        """Take the bytes at the source's place in order, now if it is idle."""
        executor = self._lane.executor
        if executor.try_claim():
            try:
                self._take()
            finally:
                executor.release()
        else:
            executor.submit(self._take)

    def write(self, lane: Lane, address: int) -> None:
        """At the destination's turn: wait for the bytes and write them; raises RemoteError."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        target, offset = lane.locate(address, self._size)
        if target.native is not None:
            target.native.write(offset, self._data)

    def _take(self) -> None:
        try:
            source, offset = self._lane.locate(self._address, self._size)
            if source.native is not None:
                self._data = bytes(source.native.read(offset, self._size))
        except RemoteError as exc:
            self._error = exc
        except MemoryError:
            self._error = RemoteError(Status.OUT_OF_MEMORY, "no memory for a copy")
        finally:
            self._done.set()
