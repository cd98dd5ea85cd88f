"""`Delivery`: brings a model's weights to one device, each the shortest way that there is.

The worker is asked for those whose digest is known; what it does not have is read from the file and
sent, a piece at a time, by a thread of the device's own: so all devices are filled at once. The
bytes in flight are bounded by what the link carries in a second, wherever they are: in sockets, in
relays, or with the worker. Knows nothing of files or the engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from caravan.errors import CaravanError
from caravan.stream.ext_link import ExtLink
from caravan.stream.link import DeviceLink, TensorRef
from caravan.stream.ticket import Ticket
from caravan.wire.extension import MAX_LOAD, Source

# Bytes of one write.
PIECE = 1 << 20
# Bytes that have been sent and have not arrived: at the start, at least, and at most. A question of
# the watchdog waits behind them, so they must not take as long as its timeout.
_WINDOW = 8 << 20
_LEAST_WINDOW = 2 << 20
_MOST_WINDOW = 64 << 20
_SECONDS = 1.0
_PERIOD = 0.25
# A question is about so many bytes at most, if not about one tensor: answers tell of progress.
_QUESTION = 64 << 20
_MOST_ASKED = 4

# Fills memory with a part of a weight: (weight, offset, memory).
Read = Callable[["Weight", int, memoryview], None]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a model's file that belongs on a device.

    Attributes:
        name: in the file.
        target: where it belongs.
        size: bytes.
        file, offset: the number of its file, and where it begins there.
    """

    name: str
    target: TensorRef
    size: int
    file: int
    offset: int


@dataclass(slots=True)
class Brought:
    """Bytes that have got to a device, by where they come from; `total` is what belongs there."""

    total: int = 0
    disk: int = 0
    cache: int = 0
    network: int = 0

    @property
    def done(self) -> int:
        return self.disk + self.cache + self.network


class Delivery:
    """See the module. Its methods may be called on any thread; none of them waits.

    Args:
        link: of the device.
        read: reads the files; what it raises ends the delivery.
        changed: called when there is news: progress, the end, an error. It must not wait.

    Attributes:
        link: as given.
        brought: what has been done so far.
        error: why it has ended before its time.
    """

    def __init__(self, link: DeviceLink, read: Read, changed: Callable[[], None]) -> None:
        self.link = link
        self.brought = Brought()
        self.error: BaseException | None = None
        self._read = read
        self._changed = changed
        self._questions: deque[tuple[Weight, bytes]] = deque()
        self._asked = 0
        self._to_send: deque[tuple[Weight, bytes | None]] = deque()
        self._backlog = 0
        self._window = Window()
        self._expecting = True
        self._news = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, name=f"caravan-weights {link.stream.device}", daemon=True
        )
        self._thread.start()

    def __repr__(self) -> str:
        brought = self.brought
        return f"<Delivery to {self.link.stream.device}: {brought.done} of {brought.total} bytes>"

    @property
    def asks(self) -> bool:
        """Whether there is anything to be asked, so that digests are of use."""
        return bool(self.link.sources)

    @property
    def backlog(self) -> int:
        """Bytes that wait to be sent."""
        return self._backlog

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def expect(self, weight: Weight) -> None:
        """It will be asked for, or sent, before `seal`."""
        with self._news:
            self.brought.total += weight.size

    def ask(self, weight: Weight, digest: bytes) -> None:
        """Let the worker find it; it is sent if that cannot."""
        with self._news:
            self._questions.append((weight, digest))
            self._news.notify()

    def send(self, weight: Weight, digest: bytes | None = None) -> None:
        """Send it, with nothing asked; with a digest the worker may keep it."""
        with self._news:
            self._to_send.append((weight, digest))
            self._backlog += weight.size
            self._news.notify()

    def seal(self) -> None:
        """Nothing more will come: it ends when all has been brought."""
        with self._news:
            self._expecting = False
            self._news.notify()

    def cancel(self) -> None:
        """End with the piece that is being sent; what has not been brought never will be."""
        self._end(CaravanError("loading was stopped"))

    # what was posted before `cancel` is all that ever will be: the memory there may be freed then

    def join(self) -> None:
        """Wait until its thread has ended: for a piece, once it was cancelled."""
        self._thread.join()

    def _end(self, error: BaseException) -> None:
        with self._news:
            if self.error is None:
                self.error = error
            self._news.notify()

    # the thread

    def _run(self) -> None:
        piece = memoryview(bytearray(PIECE))
        try:
            while self._step(piece):
                pass
            # that tensors may be kept is in no hurry, but must be said
            self.link.stream.flush()
        except BaseException as exc:
            self._end(exc)
        self._changed()

    def _step(self, piece: memoryview) -> bool:
        """Ask what can be asked, and send one weight; False at the end."""
        with self._news:
            self._news.wait_for(self._due)
            if self.error is not None:
                return False
            question = self._next_question()
            parcel = self._to_send.popleft() if self._to_send else None
            if not question and parcel is None and not (self._asked or self._window.used):
                return self._expecting
            if question:
                ticket = self._post(question)
        if question:
            # not under the lock: if it has failed already, this is answered here
            ticket.on_done(_Once(lambda: self._answered(question, ticket)))
        if parcel is not None:
            self._send(*parcel, piece)
        return True

    def _due(self) -> bool:
        if self.error is not None or self._to_send:
            return True
        if self._questions and self._asked < _MOST_ASKED:
            return True
        return not (self._expecting or self._questions or self._asked or self._window.used)

    def _next_question(self) -> list[tuple[Weight, bytes]]:
        question: list[tuple[Weight, bytes]] = []
        if self._asked >= _MOST_ASKED:
            return question
        size = 0
        while self._questions and len(question) < MAX_LOAD:
            size += self._questions[0][0].size
            if question and size > _QUESTION:
                break
            question.append(self._questions.popleft())
        self._asked += bool(question)
        return question

    def _post(self, question: list[tuple[Weight, bytes]]) -> Ticket:
        assert isinstance(self.link, ExtLink)
        return self.link.load(
            [(w.target.address(), w.size, digest, w.name) for w, digest in question]
        )

    def _answered(self, question: list[tuple[Weight, bytes]], ticket: Ticket) -> None:
        """On the receiver's thread."""
        answers = bytes(ticket.data) if ticket.error is None else bytes(len(question))
        with self._news:
            self._asked -= 1
            for (weight, digest), source in zip(question, answers, strict=True):
                if source == Source.DISK:
                    self.brought.disk += weight.size
                elif source == Source.CACHE:
                    self.brought.cache += weight.size
                else:
                    self._to_send.append((weight, digest))
                    self._backlog += weight.size
            self._news.notify()
        self._changed()

    def _send(self, weight: Weight, digest: bytes | None, piece: memoryview) -> None:
        for offset in range(0, weight.size, PIECE):
            data = piece[: min(PIECE, weight.size - offset)]
            self._read(weight, offset, data)
            with self._news:
                self._news.wait_for(self._may_send)
                if self.error is not None:
                    return
                self._window.sent(len(data))
                ticket = self.link.bring(weight.target, offset, data)
                self._backlog -= len(data)
            ticket.on_done(_Once(partial(self._arrived, len(data), ticket)))
            self.link.stream.drain()
        if digest is not None and "cache" in self.link.sources:
            assert isinstance(self.link, ExtLink)
            with self._news:
                if self.error is None:
                    self.link.keep(weight.target, weight.size, digest)

    def _may_send(self) -> bool:
        return self.error is not None or not self._window.full

    def _arrived(self, size: int, ticket: Ticket) -> None:
        """On the receiver's thread."""
        with self._news:
            self._window.arrived(size)
            if ticket.error is None:
                self.brought.network += size
            elif self.error is None:
                self.error = ticket.error
            self._news.notify()
        self._changed()


class Window:
    """How many bytes may be in flight: what arrives in about a second.

    Attributes:
        used: bytes that have been sent and have not arrived.
        size: bytes that may be.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.used = 0
        self.size = _WINDOW
        self._since = 0.0
        self._count = 0

    @property
    def full(self) -> bool:
        return self.used >= self.size

    def sent(self, size: int) -> None:
        if not self.used:
            # what was idle tells nothing of the link
            self._since, self._count = self._clock(), 0
        self.used += size

    def arrived(self, size: int) -> None:
        self.used -= size
        self._count += size
        seconds = self._clock() - self._since
        if seconds >= _PERIOD:
            rate = self._count / seconds
            self.size = int(min(max(rate * _SECONDS, _LEAST_WINDOW), _MOST_WINDOW))
            self._since, self._count = self._clock(), 0


class _Once:
    """A call that may be wanted twice."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._calls = [call]

    def __call__(self) -> None:
        if self._calls:
            self._calls.pop()()
