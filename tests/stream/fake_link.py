"""A device's link without sockets: takes down what is posted, and answers when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable

from caravan.errors import WorkerLost
from caravan.stream.ticket import Ticket
from caravan.wire.extension import Source
from wired import PATIENCE


class FakeStream:
    """Takes everything at once, unless it is `slow`: then `drain` waits for the test."""

    timeout = 30.0

    def __init__(self, device: str, log: list[tuple], lose: Callable[[Exception], None]) -> None:
        self._lose = lose
        self.device = device
        self.taken = threading.Event()
        self.taken.set()
        self._log = log

    def fail(self, cause: Exception, command: str) -> None:
        self._lose(WorkerLost("host:1", self.device, command, cause))

    def flush(self) -> None:
        self._log.append(("flush",))

    def drain(self) -> None:
        self._log.append(("drain",))
        assert self.taken.wait(PATIENCE)


class FakeLink:
    """See the module.

    Attributes:
        log: what was called, in order: (verb, ...).
        found: answers to LOAD by name, at once; None: they wait in `questions`.
        arrives: whether what is brought has arrived at once; else it waits in `flying`.
        most_open: the most questions that were open at any time.
        memory: what has been written, by address.
    """

    extension = True

    def __init__(
        self,
        device: str = "RPC0",
        sources: tuple[str, ...] = ("disk", "cache"),
        found: dict[str, int] | None = None,
        arrives: bool = True,
    ) -> None:
        self.log: list[tuple] = []
        self.stream = FakeStream(device, self.log, self.lose)
        self.sources = frozenset(sources)
        self.found = found
        self.arrives = arrives
        self.questions: list[tuple[list, Ticket]] = []
        self.flying: list[Ticket] = []
        self.in_flight = self.most_in_flight = 0
        self.most_open = 0
        self.memory: dict[int, bytearray] = {}
        self.error: Exception | None = None

    def load(self, wanted) -> Ticket:
        wanted = list(wanted)
        self.log.append(("load", [name for *_, name in wanted]))
        ticket = Ticket("LOAD", len(wanted), fatal=False)
        if self.error is not None:
            ticket.fail(self.error)
        elif self.found is not None:
            ticket.resolve(bytes(self.found.get(name, Source.NONE) for *_, name in wanted))
        else:
            self.questions.append((wanted, ticket))
            still_open = sum(not ticket.done for _, ticket in self.questions)
            self.most_open = max(self.most_open, still_open)
        return ticket

    def bring(self, tensor, offset, data) -> Ticket:
        self.log.append(("bring", tensor.address(), offset, len(data)))
        ticket = Ticket("SET", 0)
        memory = self.memory.setdefault(tensor.address(), bytearray())
        assert len(memory) == offset
        memory += data
        self.in_flight += len(data)
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.error is not None:
            ticket.fail(self.error)
        elif self.arrives:
            self.in_flight -= len(data)
            ticket.resolve(b"")
        else:
            size = len(data)
            ticket.on_done(lambda: self._landed(size))
            self.flying.append(ticket)
        return ticket

    def keep(self, tensor, size, digest) -> None:
        self.log.append(("keep", tensor.address(), size, digest))

    def verbs(self, *names: str) -> list[tuple]:
        """The calls of these verbs, in order."""
        return [call for call in list(self.log) if call[0] in names]

    def lose(self, error: Exception) -> None:
        """Fail everything that is due, and all that comes."""
        self.error = error
        for ticket in [*self.flying, *(ticket for _, ticket in self.questions)]:
            if not ticket.done:
                ticket.fail(error)

    def _landed(self, size: int) -> None:
        self.in_flight -= size


class Place:
    """A tensor of which only the address matters."""

    def __init__(self, address: int) -> None:
        self._address = address

    def address(self) -> int:
        return self._address

    def base_record(self) -> bytes:
        return bytes([self._address & 0xFF]) * 296
