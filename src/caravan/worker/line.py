"""`Line`: what a handshake reads and writes: exactly what is asked for, within a bound of time.

Reads nothing ahead, so that whoever serves the connection finds every later byte still in it.
"""

from __future__ import annotations

import time

from caravan.errors import ConnectionClosed, TransportTimeout
from caravan.transport.base import Connection
from caravan.transport.tcp import ENDED


class Line:
    """A connection that is known only so long.

    Args:
        seconds: for all that is read and written.
    """

    def __init__(self, connection: Connection, seconds: float) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + seconds
        connection.set_timeout(seconds)

    @property
    def left(self) -> float:
        """Seconds."""
        return self._deadline - time.monotonic()

    def exactly(self, size: int) -> bytes:
        """Raises TransportTimeout and ConnectionClosed."""
        data = bytearray(size)
        left = memoryview(data)
        try:
            while left:
                left = left[self._connection.recv_into(left) :]
        except TransportTimeout as exc:
            raise TransportTimeout("the client was silent for too long") from exc
        except ConnectionClosed as exc:
            if str(exc) != ENDED:
                raise
            raise ConnectionClosed("the client left before it was served") from exc
        return bytes(data)

    def send(self, data: bytes) -> None:
        """Raises TransportTimeout and ConnectionClosed."""
        left = memoryview(data)
        while left:
            left = left[self._connection.send([left]) :]
            if left and not self._connection.wait_writable(max(0.0, self.left)):
                raise TransportTimeout("the client was silent for too long")
