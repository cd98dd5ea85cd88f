"""`Reader`: exact reads from a Transport through one small buffer.

Several short messages cost one system call; a long payload goes from the kernel straight into the
caller's memory, except for what the buffer already holds.
"""

from __future__ import annotations

from collections.abc import Callable

from caravan.transport.base import Transport

# A decode step's commands fit; of a long payload little goes through here.
_SIZE = 16 << 10
# A message of which not more was promised has memory before it has arrived.
_TRUSTED = 4 << 20


class Reader:
    """Reads from `transport`; used by one thread at a time.

    Attributes:
        received: bytes read so far, also of a message that is still arriving.
    """

    __slots__ = ("_buffer", "_end", "_start", "_transport", "_view", "received")

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._buffer = bytearray(_SIZE)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self.received = 0

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes; raises ConnectionClosed when the pipe ends before."""
        if self._end - self._start < size <= _SIZE:
            self._fill(size)
        if size <= self._end - self._start:
            start = self._start
            self._start = start + size
            return bytes(self._view[start : start + size])
        if size > _TRUSTED:
            return self._read_grown(size)
        data = bytearray(size)
        self.read_into(memoryview(data))
        return bytes(data)

    def _read_grown(self, size: int) -> bytes:
        """Memory grows with what arrives: who only promises bytes costs none."""
        data = bytearray()
        while len(data) < size:
            part = bytearray(min(size - len(data), max(_TRUSTED, len(data))))
            self.read_into(memoryview(part))
            data += part
        return bytes(data)

    def read_into(self, target: memoryview) -> None:
        """Fill `target` (one dimension of bytes); raises ConnectionClosed when the pipe ends."""
        done = min(len(target), self._end - self._start)
        target[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < len(target):
            if len(target) - done <= _SIZE // 2:
                self._fill(len(target) - done)
                target[done:] = self._view[self._start : self._start + len(target) - done]
                self._start += len(target) - done
                return
            count = self._transport.recv_into(target[done:])
            self.received += count
            done += count

    def wrap(self, wrapped: Callable[[Transport], Transport]) -> None:
        """Read from `wrapped` of the transport from the next wait on."""
        self._transport = wrapped(self._transport)

    def skip(self, size: int) -> None:
        """Drop `size` bytes."""
        while size:
            chunk = min(size, _SIZE)
            self.read(chunk)
            size -= chunk

    def buffered(self) -> int:
        """Bytes that have arrived and not been read."""
        return self._end - self._start

    def _fill(self, size: int) -> None:
        """Make at least `size` bytes available in the buffer."""
        have = self._end - self._start
        if self._start + size > _SIZE or have == 0:
            self._buffer[:have] = self._buffer[self._start : self._end]
            self._start, self._end = 0, have
        while self._end - self._start < size:
            count = self._transport.recv_into(self._view[self._end :])
            self._end += count
            self.received += count
