"""`Delivery`: brings a model's weights to one device, each the shortest way that there is.

The worker is asked for those whose digest is known; what it does not have is read from the file and
sent, a piece at a time, by a thread of the device's own: so all devices are filled at once. The
bytes in flight are bounded by what the link carries in a second, wherever they are: in sockets, in
relays, or with the worker. Knows nothing of files or the engine.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from caravan.errors import CaravanError, TransportTimeout
from caravan.stream.link import DeviceLink, TensorRef
from caravan.stream.ticket import Ticket
from caravan.wire.extension import MAX_LOAD, Source

# Bytes of one write: at least, and where the link is fast, since each costs the same work.
PIECE = 1 << 20
_MOST_PIECE = 4 << 20
# Bytes that have been sent and have not arrived: at the start, at least, and at most. A question of
# the watchdog waits behind them, so they must not take as long as its timeout.
_WINDOW = 8 << 20
_LEAST_WINDOW = 2 << 20
_MOST_WINDOW = 64 << 20
_SECONDS = 1.0
_LOOK_SECONDS = 1.0
_PERIOD = 0.05
# A question is about so many bytes at most, if not about one tensor: answers tell of progress.
_QUESTION = 64 << 20
_MOST_ASKED = 4
# Bytes a second that a disk of a worker reads at least, not counting the stream's timeout.
_LEAST_DISK = 1e6

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
    """See the module. Its methods may be called on any thread; none of them waits for a peer.

    Args:
        link: of the device.
        read: reads the files; what it raises ends the delivery.
        changed: called when there is news: progress, the end, an error. It must not wait.

    Attributes:
        link: as given.
        brought: what has been done so far.
        error: why it has ended before its time.
        done: whether it has ended, well or not.
    """

    def __init__(self, link: DeviceLink, read: Read, changed: Callable[[], None]) -> None:
        self.link = link
        self.brought = Brought()
        self.error: BaseException | None = None
        self.done = False
        self._read = read
        self._changed = changed
        # what others have to say; a receiver that holds its stream's lock must not wait here
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # held while something is posted, so that nothing is after `cancel`
        self._posting = threading.Lock()
        self._questions: deque[tuple[Weight, bytes]] = deque()
        self._asked = 0
        self._largest = 0  # bytes of one question
        self._answer_due = math.inf  # time.monotonic, of the next answer
        self._to_send: deque[tuple[Weight, bytes | None]] = deque()
        self._offset = 0  # of the first one of these
        self._window = Window()
        self._expecting = True
        self._backlog = 0
        self._counting = threading.Lock()
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
        """Bytes that wait to be sent, as far as is known: of what was asked for, all but what was
        found."""
        return self._backlog

    def expect(self, weight: Weight) -> None:
        """It will be asked for, or sent, before `seal`. On one thread only."""
        self.brought.total += weight.size

    def ask(self, weight: Weight, digest: bytes) -> None:
        """Let the worker find it; it is sent if that cannot."""
        self._add_backlog(weight.size)
        self._inbox.put(lambda: self._questions.append((weight, digest)))

    def send(self, weight: Weight) -> None:
        """Send it, with nothing asked."""
        self._add_backlog(weight.size)
        self._inbox.put(lambda: self._to_send.append((weight, None)))

    def seal(self) -> None:
        """Nothing more will come: it ends when all has been brought."""
        self._inbox.put(self._seal)

    def cancel(self) -> None:
        """Post nothing more from here on: the memory that weights were to go to may be freed."""
        with self._posting:
            self.error = self.error or CaravanError("loading was stopped")
        self._inbox.put(lambda: None)

    def join(self) -> None:
        """Wait until its thread has ended: for a piece, once it was cancelled."""
        self._thread.join()

    # the thread

    def _run(self) -> None:
        memory = memoryview(bytearray(_MOST_PIECE))
        try:
            while self._listen():
                self._ask_more()
                if self._to_send and not self._window.full:
                    self._send_piece(memory)
            # that tensors may be kept is in no hurry, but must be said
            self.link.stream.flush()
        except BaseException as exc:
            self.error = self.error or exc
        self.done = True
        self._changed()

    def _listen(self) -> bool:
        """Hear all that others have to say, and wait for it if there is nothing to do; False at
        the end."""
        while True:
            try:
                patience = _LOOK_SECONDS if self._asked else None
                self._inbox.get(not self._can_work(), patience)()
            except Empty:
                self._check_answers()
                if self._can_work():
                    return self.error is None and not self._over()

    def _can_work(self) -> bool:
        return (
            self.error is not None
            or self._over()
            or bool(self._to_send and not self._window.full)
            or bool(self._questions and self._asked < _MOST_ASKED)
        )

    def _over(self) -> bool:
        open_ends = self._questions or self._asked or self._to_send or self._window.used
        return not (self._expecting or open_ends)

    def _check_answers(self) -> None:
        """A worker that lives, as its PING says, may wait for a disk that does not answer."""
        if self._asked and time.monotonic() > self._answer_due:
            self.link.stream.fail(TransportTimeout("its disk does not answer"), "LOAD")

    def _expect_answer(self) -> None:
        patience = self.link.stream.timeout + _MOST_ASKED * self._largest / _LEAST_DISK
        self._answer_due = time.monotonic() + patience if self._asked else math.inf

    def _seal(self) -> None:
        self._expecting = False

    def _add_backlog(self, size: int) -> None:
        with self._counting:
            self._backlog += size

    def _ask_more(self) -> None:
        while self._questions and self._asked < _MOST_ASKED:
            question = self._next_question()
            with self._posting:
                if self.error is not None:
                    return
                ticket = self.link.load(
                    [(w.target.address(), w.size, digest, w.name) for w, digest in question]
                )
            self._asked += 1
            self._largest = max(self._largest, sum(weight.size for weight, _ in question))
            self._expect_answer()
            self._hear(ticket, partial(self._answered, question, ticket))

    def _next_question(self) -> list[tuple[Weight, bytes]]:
        question: list[tuple[Weight, bytes]] = []
        size = 0
        while self._questions and len(question) < MAX_LOAD:
            size += self._questions[0][0].size
            if question and size > _QUESTION:
                break
            question.append(self._questions.popleft())
        return question

    def _hear(self, ticket: Ticket, call: Callable[[], None]) -> None:
        """Have `call` made on this thread once the ticket is done; a ticket may tell that twice."""
        calls = [call]

        def done() -> None:
            with contextlib.suppress(IndexError):
                self._inbox.put(calls.pop())

        ticket.on_done(done)

    def _answered(self, question: list[tuple[Weight, bytes]], ticket: Ticket) -> None:
        self._asked -= 1
        self._expect_answer()
        # a worker that cannot say, for whatever reason, gets what it was asked for
        answers = bytes(ticket.data) if ticket.error is None else bytes(len(question))
        for (weight, digest), source in zip(question, answers, strict=True):
            if source == Source.DISK:
                self.brought.disk += weight.size
            elif source == Source.CACHE:
                self.brought.cache += weight.size
            else:
                self._to_send.append((weight, digest))
                continue
            self._add_backlog(-weight.size)
        self._changed()

    def _send_piece(self, memory: memoryview) -> None:
        weight, _ = self._to_send[0]
        data = memory[: min(self._window.piece, weight.size - self._offset)]
        self._read(weight, self._offset, data)
        with self._posting:
            if self.error is not None:
                return
            ticket = self.link.bring(weight.target, self._offset, data)
        self._window.sent(len(data))
        self._add_backlog(-len(data))
        self._hear(ticket, partial(self._arrived, len(data), ticket))
        self.link.stream.drain()
        self._offset += len(data)
        if self._offset == weight.size:
            self._finish(*self._to_send.popleft())

    def _finish(self, weight: Weight, digest: bytes | None) -> None:
        """A weight has been sent whole."""
        self._offset = 0
        if digest is not None and "cache" in self.link.sources:
            with self._posting:
                if self.error is None:
                    self.link.keep(weight.target, weight.size, digest)

    def _arrived(self, size: int, ticket: Ticket) -> None:
        self._window.arrived(size)
        if ticket.error is None:
            self.brought.network += size
        else:
            self.error = self.error or ticket.error
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

    @property
    def piece(self) -> int:
        """Bytes of the next write: a small part of them."""
        return min(max(PIECE, self.size // 16), _MOST_PIECE)

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
