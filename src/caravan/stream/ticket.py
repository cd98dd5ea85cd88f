"""`Ticket`: a reply that has not arrived yet.

Made by whoever posts a command, resolved once by the stream's receiver (or by its failure). A
ticket may also be a part of a later message on another stream: that is how bytes are relayed
between two workers without anybody waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from caravan.errors import CaravanError, TransportTimeout

_SLICE = 1.0


class Ticket:
    """The future of one reply.

    Attributes:
        name: the command, for messages.
        size: bytes that the reply must have.
        target: where they are to go (one dimension of bytes), or None to keep them in `data`.
        data: the reply once it is done, unless it went to `target`.
        error: why there is no reply, once it failed.
        seq: sequence number of the request in the extension.
        fatal: whether an error reply to it loses the stream; only questions may fail on their own.
    """

    __slots__ = (
        "_lock",
        "_once",
        "_waiters",
        "data",
        "done",
        "error",
        "fatal",
        "name",
        "seq",
        "size",
        "target",
    )

    def __init__(
        self, name: str, size: int, target: memoryview | None = None, fatal: bool = True
    ) -> None:
        self.name = name
        self.size = size
        self.target = target
        self.fatal = fatal
        self.data: bytes | bytearray = b""
        self.error: CaravanError | None = None
        self.done = False
        self.seq = 0
        # popping it decides, atomically, whether the receiver or a failing stream settles it
        self._once = [True]
        self._lock = threading.Lock()
        self._lock.acquire()
        self._waiters: list[Callable[[], None]] | None = []

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done else "waiting"
        return f"<Ticket {self.name} #{self.seq} {self.size} B {state}>"

    def resolve(self, data: bytes | bytearray) -> None:
        """The reply has arrived (in `target` if there is one)."""
        if self._claim():
            self.data = data
            self._finish()

    def fail(self, error: CaravanError) -> None:
        """There will be no reply. A read into caller's memory gives zeros then."""
        if self._claim():
            self.error = error
            if self.target is not None:
                self.target[:] = bytes(len(self.target))
            self._finish()

    def _claim(self) -> bool:
        try:
            return self._once.pop()
        except IndexError:
            return False

    def _finish(self) -> None:
        self.target = None
        self.done = True
        waiters, self._waiters = self._waiters, None
        self._lock.release()
        for waiter in waiters or ():
            waiter()

    def on_done(self, call: Callable[[], None]) -> None:
        """Run `call` once the ticket is done, at once if it is; it must not block or raise."""
        waiters = self._waiters
        if waiters is not None:
            waiters.append(call)
        # the resolver may have taken the list just before the append
        if self.done:
            call()

    def wait(self, timeout: float | None = None) -> bytes | bytearray:
        """The reply; raises its error, or TransportTimeout after `timeout` seconds.

        None leaves the bound to the stream, whose watchdog fails every ticket of a silent peer.
        """
        left = timeout
        while not self.done:
            step = _SLICE if left is None else min(_SLICE, left)
            if self._lock.acquire(timeout=step):
                self._lock.release()
            elif left is not None:
                left -= step
                if left <= 0:
                    raise TransportTimeout(f"no answer to {self.name} within {timeout:g} s")
        if self.error is not None:
            raise self.error
        return self.data

    def settle(self) -> None:
        """Wait until it is done, whichever way."""
        while not self.done:
            if self._lock.acquire(timeout=_SLICE):
                self._lock.release()
