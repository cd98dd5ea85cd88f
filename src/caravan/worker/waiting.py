"""`Waiting`: what a session keeps in its own memory for others to take: bytes and pieces of them.

Shared by all ways of a session, so that the sum has a bound and not only each of them.
"""

from __future__ import annotations

import threading


class Waiting:
    """A count of bytes and pieces; any thread may add, also less than nothing."""

    __slots__ = ("_lock", "pieces", "size")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.size = 0
        self.pieces = 0

    def __repr__(self) -> str:
        return f"<Waiting: {self.size} bytes in {self.pieces} pieces>"

    def add(self, size: int, pieces: int) -> None:
        with self._lock:
            self.size += size
            self.pieces += pieces
