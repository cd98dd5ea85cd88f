"""`Lobby`: connections that have not introduced themselves yet, each with a thread that listens.

Anybody can make a connection, so there are so many of them at a time and no more: for each address,
and in all. One more shows out the one that has been here longest, of the address that has most of
them: who knows what to say is through in a moment. Called by the supervisor's main thread.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from caravan.errors import CaravanError
from caravan.worker.handshake import Greeting, Terms, WrongToken, greet, refuse_proof
from caravan.worker.throttle import Throttle, group

MOST_OF_ONE = 64
MOST = 128


@dataclass(frozen=True, slots=True)
class Arrival:
    """A client that has been greeted, or not (`greeting` None)."""

    connection: int
    sock: socket.socket
    peer: str
    source: str
    greeting: Greeting | None
    error: str = ""


@dataclass(eq=False, slots=True)
class _Guest:
    """A connection that is being greeted.

    Attributes:
        address, peer: the other end's, in numbers (empty: a Unix socket) and for messages.
        source: whose it counts as.
        failed: whether it waits for the answer to a wrong token.
        shown_out: set when it has to go.
    """

    connection: int
    sock: socket.socket
    address: str
    peer: str
    source: str
    failed: bool = False
    shown_out: threading.Event = field(default_factory=threading.Event)


class Lobby:
    """See the module.

    Args:
        arrived: called on the thread of a connection when it is known what it wants, or that it may
            not have it. The socket is the callee's then.
    """

    def __init__(self, terms: Terms, arrived: Callable[[Arrival], None]) -> None:
        self._terms = terms
        self._arrived = arrived
        self._throttle = Throttle()
        self._lock = threading.Lock()
        # in the order in which they came
        self._guests: dict[int, _Guest] = {}

    def __repr__(self) -> str:
        return f"<Lobby of {len(self._guests)} connections>"

    def take(self, connection: int, sock: socket.socket, address: str, peer: str) -> str:
        """Greet a new connection on a thread of its own; or why not, and then it is closed."""
        guest = _Guest(connection, sock, address, peer, group(address))
        with self._lock:
            room = self._make_room(guest.source)
            if room:
                self._guests[connection] = guest
        if not room:
            sock.close()
            return "its address has too many connections that wait for an answer"
        thread = threading.Thread(
            target=self._greet, args=(guest,), name=f"greet {peer}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as exc:
            with self._lock:
                self._guests.pop(connection, None)
            sock.close()
            return str(exc)
        return ""

    def _make_room(self, source: str) -> bool:
        """Show out one guest if there are too many; False if nobody can be."""
        crowds = Counter(guest.source for guest in self._guests.values())
        if crowds[source] >= MOST_OF_ONE:
            # who waits for the answer to a wrong token keeps the place: else it would not wait
            return self._show_out(source, sparing_failed=True)
        if len(self._guests) >= MOST:
            ((largest, _),) = crowds.most_common(1)
            return self._show_out(largest, True) or self._show_out(largest, False)
        return True

    def _show_out(self, source: str, sparing_failed: bool) -> bool:
        for guest in self._guests.values():
            if guest.source == source and not (guest.failed and sparing_failed):
                del self._guests[guest.connection]
                guest.shown_out.set()
                with contextlib.suppress(OSError):
                    guest.sock.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def _greet(self, guest: _Guest) -> None:
        """On a thread of its own."""
        greeting, error = None, ""
        try:
            greeting = greet(guest.sock, self._terms, guest.address)
        except WrongToken as exc:
            error = str(exc)
            self._punish(guest, exc)
        except CaravanError as exc:
            error = str(exc)
        except Exception as exc:
            error = f"internal error: {type(exc).__name__}"
        with self._lock:
            here = self._guests.pop(guest.connection, None) is not None
        if not here:
            greeting, error = None, "it did not introduce itself before too many others came"
        elif greeting is not None and greeting.request is not None and self._terms.token:
            self._throttle.succeeded(guest.source)
        self._arrived(
            Arrival(guest.connection, guest.sock, guest.peer, guest.source, greeting, error)
        )

    def _punish(self, guest: _Guest, wrong: WrongToken) -> None:
        """Let it wait for the answer, whether or not it still does."""
        with self._lock:
            guest.failed = True
        if not guest.shown_out.wait(self._throttle.failed(guest.source)):
            refuse_proof(guest.sock, wrong)
