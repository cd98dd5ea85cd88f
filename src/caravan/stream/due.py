"""`Due`: the replies that a peer owes, as tickets.

Most come in the order of the requests. Those of commands that are answered aside come when they
like, and are known by their number. A ticket belongs to whoever takes it off: each method is one
atomic step, since the receiver takes tickets off while others add or lose them all.
"""

from __future__ import annotations

import contextlib
from collections import deque

from caravan.stream.ticket import Ticket


class Due:
    """See the module.

    Attributes:
        answered: number of the last request whose turn has come; 0 for none.
    """

    __slots__ = ("_aside", "_ordered", "answered")

    def __init__(self) -> None:
        self.answered = 0
        self._ordered: deque[Ticket] = deque()
        self._aside: dict[int, Ticket] = {}

    def __len__(self) -> int:
        return len(self._ordered) + len(self._aside)

    def add(self, ticket: Ticket, aside: bool = False) -> None:
        """`ticket.seq` must be set."""
        if aside:
            self._aside[ticket.seq] = ticket
        else:
            self._ordered.append(ticket)

    def oldest(self) -> Ticket | None:
        """The one whose turn is next."""
        try:
            return self._ordered[0]
        except IndexError:
            return None

    def newest(self) -> Ticket | None:
        """The last one in order."""
        try:
            return self._ordered[-1]
        except IndexError:
            return None

    def aside(self) -> Ticket | None:
        """Any one of those that are answered aside."""
        with contextlib.suppress(StopIteration, RuntimeError):
            return next(iter(self._aside.values()))
        return None

    def take_oldest(self) -> Ticket | None:
        """The one whose turn it is, off the list."""
        try:
            ticket = self._ordered.popleft()
        except IndexError:
            return None
        self.answered = ticket.seq
        return ticket

    def take_aside(self, seq: int) -> Ticket | None:
        """The one of this number, off the list."""
        return self._aside.pop(seq, None)

    def take_all(self) -> list[Ticket]:
        """All of them, off the list."""
        taken: list[Ticket] = []
        while (ticket := self.take_oldest()) is not None:
            taken.append(ticket)
        with contextlib.suppress(KeyError):
            while True:
                taken.append(self._aside.popitem()[1])
        return taken
