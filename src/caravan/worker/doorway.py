"""`Doorway`: connections by TLS of whom nothing is known yet, and for whom a session process waits.

Where certificates alone are asked for, whoever can connect gets as far as a session process, which
does the handshake. So there are so many places there and no more, and who stays long makes room for
others, those first whose address has fewest. Belongs to the supervisor's main thread.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from caravan.worker.lobby import Arrival

# Session processes that are busy with strangers.
PLACES = 8
# Connections that have a place or wait for one; those of the address that has most go first.
MOST = 64
# Who knows what to say needs a few round trips. Who takes longer has to go when others wait.
SECONDS = 1.0
_LOOK_AGAIN = 0.1


@dataclass(eq=False, slots=True)
class _Guest:
    """A connection.

    Attributes:
        since: it has a place; 0: it waits for one.
        leaving: it has been shown out, and its process does not know that yet.
    """

    arrival: Arrival
    since: float = 0.0
    leaving: bool = False


class Doorway:
    """See the module."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # in the order in which they came
        self._guests: dict[int, _Guest] = {}

    def __repr__(self) -> str:
        return f"<Doorway of {len(self._guests)} connections, {len(self._inside)} with a process>"

    def __contains__(self, connection: int) -> bool:
        return connection in self._guests

    @property
    def _inside(self) -> list[_Guest]:
        return [guest for guest in self._guests.values() if guest.since]

    def add(self, arrival: Arrival) -> Arrival | None:
        """One more; another one that has to go for it, and has no process that would notice."""
        self._guests[arrival.connection] = _Guest(arrival)
        here = [guest for guest in self._guests.values() if not guest.leaving]
        if len(here) <= MOST:
            return None
        ((largest, _),) = Counter(guest.arrival.source for guest in here).most_common(1)
        first = next(guest for guest in here if guest.arrival.source == largest)
        if first.since:
            self._show_out(first)
            return None
        del self._guests[first.arrival.connection]
        return first.arrival

    def remove(self, connection: int) -> None:
        """It has come in, or gone; its socket is closed here."""
        guest = self._guests.pop(connection, None)
        if guest is not None:
            guest.arrival.sock.close()

    def may_enter(self, connection: int) -> bool:
        """Whether it is this one's turn for a place; if not, one may have been made."""
        guest = self._guests[connection]
        inside = self._inside
        if len(inside) >= PLACES:
            self.make_room()
            return False
        places = Counter(other.arrival.source for other in inside)
        own = places[guest.arrival.source]
        return all(
            other.since or places[other.arrival.source] >= own for other in self._guests.values()
        )

    def enter(self, connection: int) -> None:
        """It has a session process now."""
        self._guests[connection].since = self._clock()

    def make_room(self) -> bool:
        """Whether a session process will be free again soon; show out who keeps one, if need be."""
        inside = self._inside
        if inside and not any(guest.leaving for guest in inside):
            oldest = min(inside, key=lambda guest: guest.since)
            if self._clock() - oldest.since >= SECONDS:
                self._show_out(oldest)
        return bool(inside)

    def _show_out(self, guest: _Guest) -> None:
        guest.leaving = True
        # its process has the connection, too, and sees its end
        with contextlib.suppress(OSError):
            guest.arrival.sock.shutdown(socket.SHUT_RDWR)

    def patience(self) -> float | None:
        """Seconds until it may be somebody's turn; None while nobody has a place."""
        return _LOOK_AGAIN if self._inside else None
