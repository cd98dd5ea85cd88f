"""A relay on loopback that carries so many bytes to a worker and then holds all that follow."""

from __future__ import annotations

import threading

from relaying import Relay


class HeldLink(Relay):
    """See the module, and `Relay`.

    Args:
        most: bytes of all connections together that pass before it holds.

    Attributes:
        held: whether there is more that waits to pass.
        passed: bytes that have passed towards the worker.
    """

    def __init__(self, target: str, most: int) -> None:
        self._room = most
        self.passed = 0
        self.held = False
        self._changed = threading.Condition()
        self._ended = False
        super().__init__(target)

    def release(self) -> None:
        """Let everything pass from now on."""
        with self._changed:
            self._room = 1 << 60
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        super().close()

    def passing(self, data: bytes, out: bool) -> bytes | None:
        size = len(data)
        if not (out and size):
            return data
        with self._changed:
            self.held = self._room < size
            self._changed.wait_for(lambda: self._room >= size or self._ended)
            self.held = False
            self._room -= size
            self.passed += size
            return None if self._ended else data
