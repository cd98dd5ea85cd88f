"""A relay on loopback that flips a bit of one byte when it is told to, and tells that it has."""

from __future__ import annotations

import threading

from relaying import Relay

TO_WORKER, TO_HEAD = 0, 1


class DamagedLink(Relay):
    """See the module, and `Relay`.

    Attributes:
        passed: bytes that have passed each way, on all connections together.
        damaged: how many bytes were changed.
    """

    def __init__(self, target: str) -> None:
        self._lock = threading.Lock()
        self.passed = [0, 0]
        self.damaged = 0
        self._at: list[int | None] = [None, None]
        super().__init__(target)

    def damage(self, way: int, after: int = 0) -> None:
        """Change the byte that comes after so many more bytes that go this way."""
        with self._lock:
            self._at[way] = self.passed[way] + after

    def passing(self, data: bytes, out: bool) -> bytes:
        way = TO_WORKER if out else TO_HEAD
        with self._lock:
            at, start = self._at[way], self.passed[way]
            self.passed[way] += len(data)
            if at is None or at >= self.passed[way]:
                return data
            self._at[way] = None
            self.damaged += 1
            changed = bytearray(data)
            changed[at - start] ^= 1
            return bytes(changed)
