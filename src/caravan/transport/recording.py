"""`RecordingTransport`: a transport that tells when bytes went and came; for timelines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from caravan.transport.base import Buffer, Transport

Noted = Callable[[int, int], None]
"""Told when it began (ns of time.perf_counter_ns), and how many bytes it moved."""


class RecordingTransport:
    """`inner`, with a note of each send and of each arrival."""

    def __init__(self, inner: Transport, sent: Noted, received: Noted) -> None:
        self._inner = inner
        self._sent = sent
        self._received = received

    def send(self, parts: Sequence[Buffer]) -> int:
        start = time.perf_counter_ns()
        count = self._inner.send(parts)
        if count:
            self._sent(start, count)
        return count

    def wait_writable(self, timeout: float) -> bool:
        return self._inner.wait_writable(timeout)

    def wait_readable(self, timeout: float, spin: float = 0.0) -> bool:
        return self._inner.wait_readable(timeout, spin)

    def recv_into(self, buffer: memoryview) -> int:
        count = self._inner.recv_into(buffer)
        self._received(time.perf_counter_ns(), count)
        return count

    def close(self) -> None:
        self._inner.close()

    @property
    def peer(self) -> str:
        return self._inner.peer
