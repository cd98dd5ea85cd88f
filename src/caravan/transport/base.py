"""The contract of a byte pipe: a handful of methods that every transport has, fakes included.

Errors above this floor are only ConnectError, ConnectionClosed and TransportTimeout; an OSError is
translated where it happens. After any of them the stream position is unknown: close, never resend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class Transport(Protocol):
    """A connected, ordered, reliable byte pipe."""

    def send(self, parts: Sequence[Buffer]) -> int:
        """Hand over what fits without waiting; the number of bytes taken, 0 when it is full.

        What was not taken must be what the next `send` begins with, if there is one: it may have
        been made ready to leave.
        """

    def wait_writable(self, timeout: float) -> bool:
        """Wait until `send` can take something, `timeout` seconds at most; False when it cannot."""

    def recv_into(self, buffer: memoryview) -> int:
        """Wait for bytes and put them into `buffer`; how many. ConnectionClosed at the end."""

    def wait_readable(self, timeout: float, spin: float = 0.0) -> bool:
        """Wait until `recv_into` would not, `timeout` seconds at most; False when it still would.

        For the first `spin` seconds it looks again and again rather than sleep, as long as nobody
        else wants the processor.
        """

    def close(self) -> None:
        """End both directions at once and wake whoever waits in the other methods. Idempotent."""

    @property
    def peer(self) -> str:
        """The other end, for messages."""


class Connection(Transport, Protocol):
    """A transport on which hands are shaken: its reads can be bounded."""

    def set_timeout(self, seconds: float | None) -> None:
        """Bound all `recv_into` from now on together (None: wait for ever): TransportTimeout."""

    def bound_silence(self, seconds: float) -> None:
        """From now on `recv_into` raises TransportTimeout when nothing comes for so long."""

    def bound_unacknowledged(self, seconds: float) -> None:
        """The connection breaks when the other machine does not take what was sent for so long."""
