"""An in-memory Transport pair: what one end sends, the other receives. For tests and docs.

It can be told to hold back (a full pipe) and to break, so that every failure has a test without a
port.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from caravan.errors import ConnectionClosed
from caravan.transport.base import Buffer


class _Pipe:
    def __init__(self, capacity: int) -> None:
        self.changed = threading.Condition()
        self.data = bytearray()
        self.capacity = capacity
        self.closed = False
        self.sends: list[int] = []


class MemoryTransport:
    """One end of a pair; see `pair`.

    Attributes:
        sends: the size of every `send` that moved bytes, to see what was coalesced.
    """

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, peer: str) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._peer = peer
        self._closed = False

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def sends(self) -> list[int]:
        return self._outgoing.sends

    def set_capacity(self, size: int) -> None:
        """How many unread bytes the outgoing direction holds before `send` takes none."""
        with self._outgoing.changed:
            self._outgoing.capacity = size
            self._outgoing.changed.notify_all()

    def send(self, parts: Sequence[Buffer]) -> int:
        pipe = self._outgoing
        with pipe.changed:
            if pipe.closed:
                raise ConnectionClosed("the connection was closed")
            room = pipe.capacity - len(pipe.data)
            data = b"".join(bytes(part) for part in parts)[: max(room, 0)]
            if data:
                pipe.data += data
                pipe.sends.append(len(data))
                pipe.changed.notify_all()
            return len(data)

    def wait_writable(self, timeout: float) -> bool:
        pipe = self._outgoing
        with pipe.changed:
            pipe.changed.wait_for(lambda: pipe.closed or len(pipe.data) < pipe.capacity, timeout)
            if pipe.closed:
                raise ConnectionClosed("the connection was closed")
            return len(pipe.data) < pipe.capacity

    def wait_readable(self, timeout: float, spin: float = 0.0) -> bool:
        pipe = self._incoming
        with pipe.changed:
            return bool(pipe.changed.wait_for(lambda: pipe.data or pipe.closed, timeout))

    def recv_into(self, buffer: memoryview) -> int:
        pipe = self._incoming
        with pipe.changed:
            pipe.changed.wait_for(lambda: pipe.data or pipe.closed)
            if self._closed:
                raise ConnectionClosed("the connection was closed")
            if not pipe.data:
                raise ConnectionClosed("the connection was closed by the other end")
            count = min(len(buffer), len(pipe.data))
            buffer[:count] = pipe.data[:count]
            del pipe.data[:count]
            pipe.changed.notify_all()
            return count

    def close(self) -> None:
        self._closed = True
        for pipe in (self._incoming, self._outgoing):
            with pipe.changed:
                pipe.closed = True
                pipe.changed.notify_all()


def pair(capacity: int = 1 << 20) -> tuple[MemoryTransport, MemoryTransport]:
    """Two connected ends, each direction holding `capacity` unread bytes."""
    one, two = _Pipe(capacity), _Pipe(capacity)
    return MemoryTransport(one, two, "memory:a"), MemoryTransport(two, one, "memory:b")
