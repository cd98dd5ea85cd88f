"""`Receiver`: reads a stream's replies, on a thread of its own or on that of whoever waits for one.

Who waits and reads has its reply without a change of threads, and may look for it without sleeping:
to wake a processor that has gone idle takes longer than much else in a decode step. The thread
stays away meanwhile and for a moment afterwards, and is fetched when it is missed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from caravan import interrupt
from caravan.errors import TransportError, UsageError
from caravan.stream.ticket import Ticket
from caravan.transport.base import Transport
from caravan.transport.reader import Reader

# How long the thread leaves the reading to others after one of them has read.
_LINGER = 0.05
# What a polling level of 100 stands for.
_MOST_POLLING = 0.02
DEFAULT_POLL = 50


def check_poll(level: int) -> int:
    """The level; raises UsageError when it is none."""
    if not 0 <= level <= 100:
        raise UsageError(f"polling level {level} is not in 0...100")
    return level


class Receiver:
    """See the module.

    Args:
        reader: of the transport, with what came with the handshake.
        read_one: reads one reply and settles its ticket; a failure ends the stream, and is not
            raised.
        ended: whether nothing is to be read any more.
        missed: whether replies are due that somebody may wait for.
        at_end: called at the end, on the thread.

    Attributes:
        poll: 0...100, how long a waiting thread looks for the reply before it sleeps; see
            `wait_readable`. Longer waits than that are not begun that way.
    """

    def __init__(
        self,
        transport: Transport,
        reader: Reader,
        *,
        name: str,
        read_one: Callable[[], None],
        ended: Callable[[], bool],
        missed: Callable[[], bool],
        at_end: Callable[[], None],
    ) -> None:
        self.poll = DEFAULT_POLL
        self._transport = transport
        self._reader = reader
        self._read_one = read_one
        self._ended = ended
        self._missed = missed
        self._at_end = at_end
        # whoever holds it reads; the thread takes it only when there is something to read
        self._turn = threading.Lock()
        self._others_until = 0.0
        self._look = threading.Event()
        self._waited = 0.0
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def serve(self, ticket: Ticket, seconds: float) -> bool:
        """Read on the caller's thread until the ticket is done, `seconds` at most.

        False when that must be left to the thread: somebody reads already, or an exception could
        come out of nowhere in the middle of a reply.
        """
        if not interrupt.shielded() or not self._turn.acquire(blocking=False):
            return False
        start = time.monotonic()
        deadline = start + seconds
        self._others_until = deadline + _LINGER
        try:
            spin = self.poll * _MOST_POLLING / 100
            if self._waited > spin:
                spin = 0.0
            while not ticket.done and not self._ended():
                if not self._readable(deadline - time.monotonic(), spin):
                    break
                self._read_one()
        finally:
            now = time.monotonic()
            self._waited = now - start
            self._others_until = now + _LINGER
            self._turn.release()
            # who leaves without it comes back, or has given it up
            if ticket.done and self._missed():
                self.hurry()
        return ticket.done or not self._ended()

    def hurry(self) -> None:
        """The thread is to read now, unless somebody else is just reading."""
        if not self._turn.locked():
            self._others_until = 0.0
        self._look.set()

    def wrap(self, transport: Transport) -> None:
        """Wait for `transport` from now on."""
        self._transport = transport

    def _run(self) -> None:
        while not self._ended():
            left_to_others = self._others_until - time.monotonic()
            if left_to_others > 0:
                self._look.wait(min(left_to_others, _LINGER))
                self._look.clear()
            elif self._readable(1.0) and self._turn.acquire(blocking=False):
                try:
                    # they may have read it meanwhile
                    while not self._ended() and self._readable(0.0):
                        self._read_one()
                finally:
                    self._turn.release()
        self._at_end()

    def _readable(self, seconds: float, spin: float = 0.0) -> bool:
        """Whether there is something to read, if only the end."""
        if self._reader.buffered():
            return True
        try:
            return self._transport.wait_readable(max(0.0, seconds), spin)
        except TransportError:
            # reading says why
            return True
