"""`Ticket`: a reply that has not arrived yet.

Made by whoever posts a command, resolved once by the stream's receiver (or by its failure). A
ticket may also be a part of a later message on another stream: that is how bytes are relayed
between two workers without anybody waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from caravan.errors import CaravanError, TransportTimeout

_SLICE = 1.0
_STOP_SLICE = 0.1


class Receives(Protocol):
    """Who reads the replies of a stream; see `Receiver`."""

    def serve(self, ticket: Ticket, seconds: float) -> bool:
        """Read on the caller's thread until it is done, `seconds` at most; False: wait for it."""

    def hurry(self) -> None:
        """Somebody is waiting who does not read."""


class Ticket:
    """The future of one reply.

    Attributes:
        name: the command, for messages.
        size: bytes that the reply must have; at most, if `at_most`.
        data: the reply once it is done, unless it went to the caller's memory.
        error: why there is no reply, once it failed.
        seq: sequence number of the request in the extension.
        receiver: who reads it, once it was posted.
        fatal: whether an error reply to it loses the stream; only questions may fail on their own.
    """

    __slots__ = (
        "_abandoned",
        "_lock",
        "_once",
        "_target",
        "_waiters",
        "at_most",
        "data",
        "done",
        "error",
        "fatal",
        "name",
        "receiver",
        "seq",
        "size",
    )

    def __init__(
        self,
        name: str,
        size: int,
        target: memoryview | None = None,
        fatal: bool = True,
        at_most: bool = False,
    ) -> None:
        self.name = name
        self.size = size
        # whoever pops it, a receiver or a caller who gives up, is alone in touching that memory
        self._target = [] if target is None else [target]
        self.fatal = fatal
        self.at_most = at_most
        self.data: bytes | bytearray = b""
        self.error: CaravanError | None = None
        self.done = False
        self.receiver: Receives | None = None
        self._abandoned = False
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
            self.abandon()
            self._finish()

    def take_target(self) -> memoryview | None:
        """The caller's memory, for the one who fills it; None when it is to be left alone."""
        try:
            return self._target.pop()
        except IndexError:
            return None

    def abandon(self) -> None:
        """Put zeros into the caller's memory, and never write to it again.

        The reply, when it comes, is kept in `data`. Without effect while it is just arriving.
        """
        target = self.take_target()
        if target is not None:
            target[:] = bytes(len(target))
            self._abandoned = True

    def _claim(self) -> bool:
        try:
            return self._once.pop()
        except IndexError:
            return False

    def _finish(self) -> None:
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
            if self.receiver is not None:
                self.receiver.hurry()
        # the resolver may have taken the list just before the append
        if self.done:
            call()

    def wait(
        self, timeout: float | None = None, stop: Callable[[], bool] | None = None
    ) -> bytes | bytearray:
        """The reply; raises its error, or TransportTimeout after `timeout` seconds.

        None leaves the bound to the stream, whose watchdog fails every ticket of a silent peer.
        Once `stop` says so, which is asked a few times a second, it raises CaravanError.
        """
        left = timeout
        most = _SLICE if stop is None else _STOP_SLICE
        while not self.done:
            if stop is not None and stop():
                raise CaravanError(f"{self.name} is not waited for any longer")
            step = most if left is None else min(most, left)
            if not self._rest(step) and left is not None:
                left -= step
                if left <= 0:
                    raise TransportTimeout(f"no answer to {self.name} within {timeout:g} s")
        if self.error is not None:
            # often the stream's, which many are told: it must not keep the frames of them all
            raise self.error.with_traceback(None)
        return self.data

    def settle(self, stop: Callable[[], bool] | None = None) -> None:
        """Wait until it is done, whichever way.

        Once `stop` says so, which is asked a few times a second, the wait ends early and the
        caller's memory is left with zeros, for good.
        """
        while not self.done and not self._abandoned:
            if not self._rest(_SLICE if stop is None else _STOP_SLICE) and stop and stop():
                self.abandon()

    def _rest(self, seconds: float) -> bool:
        """Wait until it is done, `seconds` at most; whether it is."""
        receiver = self.receiver
        if receiver is not None:
            if receiver.serve(self, seconds):
                return self.done
            receiver.hurry()
        if not self._lock.acquire(timeout=seconds):
            return False
        self._lock.release()
        return True
