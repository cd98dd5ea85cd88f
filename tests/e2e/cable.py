"""A relay on loopback that is a cable: it can be cut, pulled, which nobody is told of, or bad."""

from __future__ import annotations

import threading

from relaying import Relay

_FOR_EVER = 1 << 60


class Cable(Relay):
    """See the module, and `Relay`.

    Attributes:
        held: set once something waits to pass.
    """

    def __init__(self, target: str) -> None:
        self._changed = threading.Condition()
        self._room = _FOR_EVER
        self._pulled = self._ended = False
        self._good: int | None = None  # pieces that pass as they are before one that does not
        self.held = threading.Event()
        super().__init__(target)

    def hold_after(self, size: int) -> None:
        """Let so many more bytes pass to the worker, and then pull it."""
        with self._changed:
            self._room = size

    def pull(self) -> None:
        """Let nothing pass any more, either way."""
        with self._changed:
            self._pulled = True

    def plug(self) -> None:
        """Let everything pass, also what has waited."""
        with self._changed:
            self._room, self._pulled = _FOR_EVER, False
            self.held.clear()
            self._changed.notify_all()

    def damage(self, after: int = 0) -> None:
        """Change a bit of what passes to the worker, after so many pieces."""
        with self._changed:
            self._good = after

    def cut(self) -> None:
        self.plug()
        super().cut()

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        super().close()

    def passing(self, data: bytes, out: bool) -> bytes | None:
        # who has pulled it is told nothing of an end either
        if not self._may_pass(len(data), out):
            return None
        return self._damaged(data) if out and data else data

    def _damaged(self, data: bytes) -> bytes:
        with self._changed:
            if self._good is None:
                return data
            self._good = self._good - 1 if self._good else None
            if self._good is not None:
                return data
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        return bytes(changed)

    def _may_pass(self, size: int, out: bool) -> bool:
        with self._changed:
            if out and size > self._room:
                self._pulled = True
            if self._pulled:
                self.held.set()
            self._changed.wait_for(lambda: self._ended or not self._pulled)
            self._room -= size if out else 0
            return not self._ended
