"""`Message`: one command on its way out, as the parts that go to the socket.

Parts are never joined. A part that is a `Ticket` stands for the bytes that another stream is still
waiting for; the message stays in its queue until they are there.
"""

from __future__ import annotations

from caravan.errors import RemoteError
from caravan.stream.ticket import Ticket
from caravan.transport.base import Buffer

Part = Buffer | Ticket


class Message:
    """One command.

    Attributes:
        name: the command, for messages to people.
        parts: header and payload, in order.
        size: bytes in all.
        ticket: what waits for the reply; None for a silent command.
        blockers: the tickets among the parts.
        gates: tickets that must be done before this leaves, without giving bytes (events).
        noted: the ticket that was last asked to tell when it is done.
    """

    __slots__ = ("blockers", "gates", "name", "noted", "parts", "size", "ticket")

    def __init__(
        self, name: str, parts: list[Part], size: int, ticket: Ticket | None = None
    ) -> None:
        self.name = name
        self.parts = parts
        self.size = size
        self.ticket = ticket
        self.blockers = [part for part in parts if isinstance(part, Ticket)]
        self.gates: list[Ticket] = []
        self.noted: Ticket | None = None

    def waits_for(self) -> Ticket | None:
        """The ticket that keeps the message from leaving now."""
        for ticket in self.gates:
            if not ticket.done:
                return ticket
        for ticket in self.blockers:
            if not ticket.done:
                return ticket
        return None

    def failed_source(self) -> Ticket | None:
        """The ticket whose failure means that this message can never be sent as it was meant."""
        for ticket in self.blockers:
            if ticket.error is not None:
                return ticket
        for ticket in self.gates:
            # a question that was answered with "no" has been answered: the event has happened
            refused = not ticket.fatal and isinstance(ticket.error, RemoteError)
            if ticket.error is not None and not refused:
                return ticket
        return None

    def buffers(self) -> list[Buffer]:
        """The parts as bytes; only once `waits_for` gives None."""
        return [part.data if isinstance(part, Ticket) else part for part in self.parts]


def length(part: Part) -> int:
    """Bytes of a part."""
    return part.size if isinstance(part, Ticket) else len(part)
