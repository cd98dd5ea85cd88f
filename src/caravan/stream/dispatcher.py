"""`Stream`: one in-order queue of commands to a worker, over one connection.

`post` never waits for a reply, `call` waits on its ticket. Whoever posts also sends, without
blocking, as long as the socket takes it; what it does not take is sent by the writer thread. The
receiver thread resolves tickets in order. No command has a code path of its own here.

A failure anywhere loses the stream: once, with the first cause. From then on commands are dropped
and tickets fail at once. Sending, receiving and losing share one lock and so one file.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from caravan import interrupt
from caravan.errors import (
    CaravanError,
    ConnectionClosed,
    RemoteError,
    TransportTimeout,
    WorkerLost,
)
from caravan.stream.due import Due
from caravan.stream.framing import Framing, Reply
from caravan.stream.message import Message, Part, length
from caravan.stream.receiver import Receiver
from caravan.stream.ticket import Ticket
from caravan.transport.base import Buffer, Transport
from caravan.transport.reader import Reader
from caravan.transport.recording import Noted, RecordingTransport
from caravan.wire.commands import Command, Ext
from caravan.wire.extension import Status

# What one system call is given, and what may wait in memory before `post` waits for room.
_MAX_SEGMENT = 1 << 20
_MAX_PARTS = 60
MAX_QUEUED = 64 << 20
# Small commands stay until a command that something depends on, or until this many bytes wait.
_CORK = 32 << 10
# What an error that says less than another one waits for that.
_CAUSE_SECONDS = 2.0
_CLOSED = "the stream was closed"
_HALF = 1 << 31


class Stream:
    """An in-order queue over one transport.

    Args:
        transport: connected; the stream owns it from here on.
        framing: how headers look.
        endpoint, device: names for errors.
        timeout: seconds without a sign of life, while something is owed, after which it is lost.
        reader: the reader of the handshake, which may hold bytes already.

    Attributes:
        lost: the first failure, or None.
        commands, segments, bytes_sent: counters since the start.
        keep_alive: whether the peer is watched also when it owes nothing here.
        allowance: seconds after which the peer drops who says nothing; 0: it never does.
        inquired: whether the peer is asked what happened when its connection has closed, by one
            of those that were given to `on_loss`.
    """

    def __init__(
        self,
        transport: Transport,
        framing: Framing,
        endpoint: str,
        device: str,
        timeout: float = 30.0,
        reader: Reader | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.device = device
        self.timeout = timeout
        self.lost: WorkerLost | None = None
        self.commands = 0
        self.segments = 0
        self.bytes_sent = 0
        self.keep_alive = False
        self.allowance = 0.0
        self.inquired = False
        self._transport = transport
        self._framing = framing
        self._reader = reader or Reader(transport)
        self._lock = threading.Lock()
        self._queue: deque[Message] = deque()
        self._iov: deque[Buffer] = deque()
        self._due = Due()
        # the newest command that has no reply, and its number
        self._silent, self._silent_seq = "", 0
        self._gates: list[Ticket] = []
        self._queued = 0
        self._seq = 0
        self._closing = False
        self._last_life = self._looked = self._last_sent = time.monotonic()
        self._received = self._sent = 0
        self._pinged = False
        self._blocked = threading.Event()
        self._mourners: list[Callable[[WorkerLost], None]] = []
        self._room = threading.Condition(self._lock)
        self._receiver = Receiver(
            transport,
            self._reader,
            name=f"caravan-recv {endpoint} {device}",
            read_one=self._receive,
            ended=self._done,
            missed=lambda: bool(self._due),
            at_end=self._mourn,
        )
        self._threads = [
            self._receiver.thread,
            threading.Thread(
                target=self._write, name=f"caravan-send {endpoint} {device}", daemon=True
            ),
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        state = "lost" if self.lost else "closed" if self._closing else "open"
        return (
            f"<Stream {self.device} at {self.endpoint} {state}: {self.commands} commands, "
            f"{len(self._due)} replies due, {self._queued} bytes queued>"
        )

    @property
    def bytes_received(self) -> int:
        """Since the start, those of the handshake included."""
        return self._reader.received

    @property
    def poll(self) -> int:
        """0...100: how long who waits for a reply looks for it before it sleeps."""
        return self._receiver.poll

    @poll.setter
    def poll(self, level: int) -> None:
        self._receiver.poll = level

    @property
    def ended(self) -> bool:
        """Whether it is lost or closed."""
        return self._done()

    @property
    def failure(self) -> WorkerLost | None:
        """Why nothing gets through any more, if so: it is lost, or it was closed here."""
        if self.lost is None and self._closing:
            return WorkerLost(self.endpoint, self.device, "use", ConnectionClosed(_CLOSED))
        return self.lost

    @property
    def crowded(self) -> bool:
        """Whether so much waits to be sent that `post` would wait too."""
        return self._queued > MAX_QUEUED

    def check(self) -> None:
        """Raises WorkerLost once nothing gets through any more. What was corked leaves now.

        After a loss it waits, 1.5 s at most, for what the worker says of it.
        """
        self.flush()
        failure = self.failure
        if failure is not None:
            # the worker is being asked what happened
            failure.settle()
            # it is raised again and again, and would keep the frames of all who were told
            raise failure.with_traceback(None)

    # posting

    def post(
        self,
        command: Command,
        parts: Sequence[Part],
        ticket: Ticket | None = None,
        *,
        cork: bool = False,
        wait_sent: bool = False,
    ) -> int:
        """Queue a command; its reply, if it has one, goes to `ticket`. Returns its number.

        Args:
            parts: the payload. Memory that is not the stream's own must stay readable until it is
                sent: use `wait_sent`.
            cork: nothing depends on it yet; it may stay to leave with the next command.
            wait_sent: return only when every byte has been handed over (or the stream is lost).
        """
        size = 0
        for part in parts:
            size += length(part)
        with self._lock:
            if self._queued > MAX_QUEUED and not wait_sent:
                self._wait_for_room()
            if self.lost is not None or self._closing:
                error = self.lost or ConnectionClosed(_CLOSED)
                if ticket is not None:
                    ticket.fail(error)
                return self._seq
            seq = self._enqueue(command, parts, size, ticket)
            if not cork or self._queued >= _CORK:
                self._pump()
        if wait_sent:
            self.drain()
        return seq

    def call(
        self,
        command: Command,
        parts: Sequence[Part],
        size: int,
        *,
        timeout: float | None = None,
        fatal: bool = True,
        stop: Callable[[], bool] | None = None,
    ) -> bytes | bytearray:
        """Post, and wait for a reply of `size` bytes; raises what went wrong. See `Ticket.wait`."""
        ticket = Ticket(command.name, size, fatal=fatal)
        self.post(command, parts, ticket)
        return ticket.wait(timeout, stop)

    def hold_until(self, ticket: Ticket) -> None:
        """What is posted later leaves only when `ticket` (of another stream) is done."""
        with self._lock:
            # a failed one is kept too: its loss must not depend on who comes first
            if not ticket.done or ticket.error is not None:
                self._gates.append(ticket)

    def last_ticket(self) -> Ticket | None:
        """The newest reply that is still due."""
        return self._due.newest()

    def has_answered(self, number: int) -> bool:
        """Whether a later command than this one has been answered, so that this one is done."""
        return (self._due.answered - number) & 0xFFFFFFFF < _HALF

    def on_loss(self, call: Callable[[WorkerLost], None]) -> None:
        """Run `call` once the stream is lost, on a thread of its own; not when it is closed."""
        with self._lock:
            if self.lost is None:
                self._mourners.append(call)
                return
        call(self.lost)

    def flush(self) -> None:
        """Send what was corked."""
        with self._lock:
            self._pump()

    def record(self, sent: Noted, received: Noted) -> None:
        """Tell of all bytes that go and come from now on."""

        def wrapped(transport: Transport) -> Transport:
            return RecordingTransport(transport, sent, received)

        with self._lock:
            self._transport = wrapped(self._transport)
            self._receiver.wrap(self._transport)
        self._reader.wrap(wrapped)

    def _enqueue(
        self, command: Command, parts: Sequence[Part], size: int, ticket: Ticket | None
    ) -> int:
        self._seq = (self._seq + 1) & 0xFFFFFFFF
        header = self._framing.header(command.number, self._seq, size)
        message = Message(command.name, [header, *parts], size + len(header), ticket)
        if self._gates:
            message.gates, self._gates = self._gates, []
        if ticket is not None:
            ticket.seq = self._seq
            ticket.receiver = self._receiver
            self._owe()
            self._due.add(ticket, command.aside)
        else:
            self._silent, self._silent_seq = command.name, self._seq
        self._queue.append(message)
        self._queued += message.size
        self.commands += 1
        return self._seq

    def _owe(self) -> None:
        """Something becomes due: silence counts from now, not from the last idle hour."""
        if not self._due and not self._iov:
            self._last_life = time.monotonic()

    def _wait_for_room(self) -> None:
        """Bounded memory: wait, with the lock released, until the queue is short or lost."""
        self._pump()
        while self._queued > MAX_QUEUED and not self._done() and not interrupt.pending():
            self._room.wait(0.2)

    def drain(self) -> None:
        """Send until the queue is empty; the caller's own thread waits for the socket."""
        while True:
            with self._lock:
                self._pump()
                if self.lost is not None or self._closing or not (self._iov or self._queue):
                    return
                stuck = not self._iov
                if stuck:
                    self._room.wait(0.05)
            if not stuck:
                self._wait_writable()

    def _wait_writable(self) -> None:
        try:
            self._transport.wait_writable(1.0)
        except CaravanError as exc:
            self.fail(exc, self._next("send"))

    # sending; everything below `_pump` runs with the lock held and never blocks

    def _pump(self) -> None:
        """Send what can be sent now."""
        try:
            while self.lost is None and (self._iov or self._gather()):
                sent = self._transport.send(list(self._iov))
                if sent == 0:
                    self._blocked.set()
                    return
                self.segments += 1
                self._advance(sent)
        except Exception as exc:
            self._fail_locked(_own(exc), self._next("send"))

    def _gather(self) -> bool:
        """Move whole messages that may leave into the segment; False when there are none."""
        size = 0
        while self._queue and size < _MAX_SEGMENT and len(self._iov) < _MAX_PARTS:
            message = self._queue[0]
            ticket = message.waits_for()
            if ticket is not None:
                if message.noted is not ticket:
                    message.noted = ticket
                    ticket.on_done(self._unblock)
                # it may have been done since
                if not ticket.done:
                    break
                continue
            failed = message.failed_source()
            if failed is not None and failed.error is not None:
                self._fail_locked(failed.error, message.name)
                return False
            self._owe()
            self._queue.popleft()
            self._iov.extend(buffer for buffer in message.buffers() if len(buffer))
            size += message.size
        return bool(self._iov)

    def _unblock(self) -> None:
        """A ticket of another stream is done; called by that stream's receiver."""
        # That thread may hold its own stream's lock while this stream's holder waits for that one:
        # never wait here, leave it to the writer thread.
        if not self._lock.acquire(blocking=False):
            self._blocked.set()
            return
        try:
            self._pump()
        finally:
            self._lock.release()

    def _advance(self, sent: int) -> None:
        self.bytes_sent += sent
        self._queued -= sent
        self._last_life = time.monotonic()
        while sent:
            buffer = self._iov[0]
            if sent < len(buffer):
                self._iov[0] = memoryview(buffer)[sent:]
                break
            sent -= len(buffer)
            self._iov.popleft()
        self._room.notify_all()

    def _write(self) -> None:
        """The writer thread: goes on where the socket was full."""
        while not self._done():
            self._blocked.wait(1.0)
            self._blocked.clear()
            with self._lock:
                self._pump()
                full = bool(self._iov)
            while full and not self._done():
                self._wait_writable()
                with self._lock:
                    self._pump()
                    full = bool(self._iov)

    # receiving

    def _receive(self) -> None:
        """Read and settle one reply; called by the receiver, or by who waits through it."""
        try:
            reply = self._framing.read_reply(self._reader, self._due)
            self._last_life = time.monotonic()
            self._deliver(reply)
        except Exception as exc:
            self.fail(_own(exc), self._next("receive"))

    def _mourn(self) -> None:
        """On the receiver's thread, because whoever has noticed the loss may hold locks."""
        if self.lost is not None:
            for call in self._mourners:
                call(self.lost)

    def _deliver(self, reply: Reply) -> None:
        ticket = reply.ticket
        if self._done():
            # the loss may have taken tickets off at the same moment, so this may be another's reply
            if ticket is not None:
                ticket.fail(self.lost or ConnectionClosed(_CLOSED))
        elif reply.pong:
            self._pinged = False
        elif reply.error is not None:
            if ticket is not None and not ticket.fatal and isinstance(reply.error, RemoteError):
                ticket.fail(reply.error)
            else:
                self._await_cause(reply.error)
                self._abandon(reply.error, reply.name, ticket)
        elif ticket is not None:
            self._read_payload(ticket, reply.length)

    def _read_payload(self, ticket: Ticket, size: int) -> None:
        data = b""
        target = ticket.take_target()
        try:
            if target is not None:
                self._reader.read_into(target)
            else:
                data = self._reader.read(size)
        except Exception as exc:
            if target is not None and not target.readonly:
                target[:] = bytes(len(target))
            self._abandon(_own(exc), ticket.name, ticket)
        else:
            ticket.resolve(data)

    def _await_cause(self, error: CaravanError) -> None:
        """A copy broke off: the loss of its source, which comes about now, says why."""
        if isinstance(error, RemoteError) and error.code == Status.PEER_LOST:
            with self._lock:
                self._room.wait_for(self._done, _CAUSE_SECONDS)

    def _abandon(self, cause: CaravanError, command: str, ticket: Ticket | None) -> None:
        """Lose the stream, and with it a ticket that is no longer among the pending ones."""
        self.fail(cause, command)
        if ticket is not None:
            ticket.fail(self.lost or cause)

    def _next(self, otherwise: str) -> str:
        """The command whose reply is due next, or else one that has none and may not be done."""
        ticket = self._due.oldest()
        if ticket is None and self._silent and not self.has_answered(self._silent_seq):
            return self._silent
        ticket = ticket or self._due.aside()
        return ticket.name if ticket is not None else otherwise

    # the end

    def tick(self, now: float) -> None:
        """Called about once a second by a watchdog: notices a silent peer."""
        with self._lock:
            if self.lost is not None or self._closing:
                return
            if now - self._looked > self.timeout / 3:
                # nobody has looked for so long: it is this process that stood still, and what its
                # peer has said meanwhile is still to be read
                self._last_life = max(self._last_life, now - self.timeout / 2)
            self._looked = now
            if self._reader.received != self._received:
                # also a part of a long reply is a sign of life
                self._received = self._reader.received
                self._last_life = max(self._last_life, now)
            if self.bytes_sent != self._sent:
                self._sent, self._last_sent = self.bytes_sent, now
            if not (self._owed() or (self.keep_alive and self._framing.can_ping)):
                self._last_life = max(self._last_life, now)
                return
            quiet = now - self._last_life
            if quiet > self.timeout:
                error = TransportTimeout(f"no sign of life for {self.timeout:g} s")
                self._fail_locked(error, self._next("send"))
            elif self._framing.can_ping and not self._pinged and self._is_ping_due(quiet, now):
                self._ping()

    def _is_ping_due(self, quiet: float, now: float) -> bool:
        """Whether it is time to ask for a sign of life, or to give one."""
        return quiet > self.timeout / 3 or now - self._last_sent > self.allowance / 3 > 0

    def _owed(self) -> bool:
        """Whether the next move is the peer's."""
        if self._iov:
            return True
        oldest = self._due.oldest()
        if oldest is None:
            return bool(self._due)
        # a request that waits here for another stream is not this peer's debt; where it can be
        # asked for a sign of life, that is asked all the same
        posted_since = (self._seq - oldest.seq) & 0xFFFFFFFF
        return self._framing.can_ping or posted_since >= len(self._queue)

    def _ping(self) -> None:
        self._pinged = True
        frame = self._framing.header(Ext.PING, 0, 0)
        message = Message("PING", [frame], len(frame))
        stuck, life = bool(self._iov), self._last_life
        self._queue.appendleft(message)
        self._queued += message.size
        self._pump()
        if not stuck:
            # to have asked is no sign of life
            self._last_life = life

    def fail(self, cause: CaravanError, command: str) -> None:
        """Lose the stream, if it is not lost: close it and fail every ticket."""
        with self._lock:
            self._fail_locked(cause, command)

    def _fail_locked(self, cause: CaravanError, command: str) -> None:
        if self.lost is not None or self._closing:
            return
        if isinstance(cause, WorkerLost):
            self.lost = cause
        else:
            self.lost = WorkerLost(self.endpoint, self.device, command, cause)
            self.lost.__cause__ = cause
            if self.inquired and isinstance(cause, ConnectionClosed):
                self.lost.ask()
        self._release(self.lost)

    def _release(self, error: CaravanError) -> None:
        self._transport.close()
        self._queue.clear()
        self._iov.clear()
        self._queued = 0
        # One that the receiver has taken may be read into the caller's memory at this moment, so
        # the receiver alone may settle it.
        due = self._due.take_all()
        self._room.notify_all()
        self._blocked.set()
        self._receiver.hurry()
        for ticket in due:
            ticket.fail(error)

    def close(self, *, timeout: float = 5.0) -> None:
        """Send what is queued, `timeout` seconds at most, and close. Idempotent."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                self._pump()
                if self.lost is not None or self._closing or not (self._iov or self._queue):
                    break
            if time.monotonic() >= deadline:
                break
            time.sleep(0.002)
        with self._lock:
            if not self._closing:
                self._closing = True
                self._release(ConnectionClosed(_CLOSED))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _done(self) -> bool:
        return self.lost is not None or self._closing


def _own(exc: Exception) -> CaravanError:
    """A defect of ours must end in an error too, not in a hang."""
    return exc if isinstance(exc, CaravanError) else CaravanError(f"internal error: {exc!r}")
