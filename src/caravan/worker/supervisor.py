"""The supervisor: what `caravan worker` is. It accepts, greets, and hands connections over.

All state belongs to the main thread and its selector loop; a short-lived thread greets each new
client, so a silent one holds up nobody. It never loads the engine or NumPy: those live in session
processes, whose deaths it survives.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from caravan.errors import CaravanError, WorkerStartError
from caravan.transport.endpoint import Endpoint
from caravan.wire.extension import EXTENSION_VERSION, PeerRequest, SessionRequest, Status
from caravan.wire.versions import V7, V8
from caravan.worker import control, listener
from caravan.worker.handshake import Greeting, greet, refuse
from caravan.worker.log import log
from caravan.worker.pool import Pool
from caravan.worker.process import SessionProcess, close_pipe
from caravan.worker.tally import Tally

_START_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for.

    Attributes:
        protocol: 7 or 8, or 0 for what the engine speaks.
        extension: offer Caravan's extension.
        timeout: seconds that a client has to introduce itself.
        parent_fd: end when this pipe closes; -1 for none.
        peer_address: where other workers reach this one, as an endpoint; empty: where heads do.
        cache: directory of the weight cache; empty for none.
        cache_size: bytes that it may hold.
        model_dirs: where this machine has GGUF files of its own.
        max_memory: bytes that all sessions together may hold of a device: one limit for each of
            them, or one that holds for each; empty for none.
    """

    host: str = "127.0.0.1"
    port: int = 50052
    devices: str = ""
    threads: int = 1
    protocol: int = 0
    extension: bool = True
    timeout: float = 10.0
    parent_fd: int = -1
    peer_address: str = ""
    cache: str = ""
    cache_size: int = 0
    model_dirs: tuple[str, ...] = ()
    max_memory: tuple[int, ...] = ()
    max_sessions: int = 16
    max_connections: int = 256


@dataclass(frozen=True, slots=True)
class Arrival:
    """A client that has been greeted, or not (`greeting` None)."""

    connection: int
    sock: socket.socket
    peer: str
    greeting: Greeting | None
    error: str = ""


class Supervisor:
    """See the module; `run` returns the exit code."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._port = 0
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._arrivals: deque[Arrival] = deque()
        self._waiting: list[Arrival] = []  # for their session process, in order
        self._counter = 0
        self._open: set[int] = set()
        self._version = V8
        self._stopping = False
        arguments = (
            *("--devices", settings.devices, "--threads", str(settings.threads)),
            *("--cache", settings.cache, "--cache-size", str(settings.cache_size)),
            *(f"--model-dir={directory}" for directory in settings.model_dirs),
            *("--max-memory", ",".join(map(str, settings.max_memory))),
            # who started it is most likely the head
            *(("--beside-head",) if settings.parent_fd >= 0 else ()),
        )
        self._tally = Tally() if settings.max_memory else None
        self._pool = Pool(arguments, settings.max_sessions, self._selector, self._gone, self._tally)

    # start and end

    def run(self) -> int:
        """Serve until told to stop; raises WorkerStartError when it cannot start."""
        previous = self._catch_signals()
        try:
            self._listeners, self._port = listener.listen(self._settings.host, self._settings.port)
            self._watch(self._wake_read, self._on_wake)
            if self._settings.parent_fd >= 0:
                self._watch(self._settings.parent_fd, self._on_parent)
            self._pool.start_spare()
            ready = self._await_ready()
            if ready is not None:
                self._announce(ready)
                for sock in self._listeners:
                    self._watch(sock, partial(self._on_accept, sock))
            while not self._stopping:
                self._step()
            return 0
        finally:
            self._shut_down()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _catch_signals(self) -> dict[int, Any]:
        def stop(number: int, frame: FrameType | None) -> None:
            self._stopping = True

        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        return {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)}

    def _await_ready(self) -> control.Ready | None:
        """The first report of a session process; None when told to stop meanwhile."""
        deadline = time.monotonic() + _START_TIMEOUT
        while not self._stopping:
            spare = self._pool.spare
            if spare is None:
                raise WorkerStartError("a session process ended while it started")
            if spare.ready is not None:
                if spare.ready.error:
                    raise WorkerStartError(spare.ready.error)
                return spare.ready
            if time.monotonic() > deadline:
                raise WorkerStartError("the engine did not load in time")
            self._step()
        return None

    def _announce(self, ready: control.Ready) -> None:
        major = self._settings.protocol or ready.protocol
        self._version = V7 if major == 7 else V8
        host = self._settings.host
        where = host if host.startswith("unix:") else str(Endpoint(host, self._port))
        say(f"Starting RPC server v{self._version}")
        say(f"  endpoint       : {where}")
        say(f"  local cache    : {_cache(self._settings)}")
        for directory in self._settings.model_dirs:
            say(f"  models         : {directory}")
        say("Devices:")
        for d in ready.devices:
            total, free = d.memory_total >> 20, d.memory_free >> 20
            say(f"  {d.name}: {d.description} ({total} MiB, {free} MiB free)")
        say(f"  transport      : {'Unix socket' if host.startswith('unix:') else 'TCP'}")
        extension = f"extension {EXTENSION_VERSION}" if self._settings.extension else "no extension"
        count = len(ready.devices)
        devices = f"{count} device{'s' if count != 1 else ''}"
        say(f"worker ready on {where} (protocol {self._version}, {extension}, {devices})")

    def _shut_down(self) -> None:
        """Close the door, then end all session processes within the grace."""
        signal.set_wakeup_fd(-1)
        listener.close(self._listeners)
        self._pool.end()
        if self._tally is not None:
            self._tally.close()
        for arrival in (*self._arrivals, *self._waiting):
            arrival.sock.close()
        self._selector.close()
        close_pipe((self._wake_read, self._wake_write))

    # the loop

    def _watch(self, file: int | socket.socket, call: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, call)

    def _step(self) -> None:
        """Wait for something to happen, and deal with it."""
        for key, _events in self._selector.select(self._pool.patience()):
            if self._stopping:
                return
            # an earlier event of this round may have closed this one's file
            if key.fd in self._selector.get_map():
                key.data()
        self._pool.tend()
        waiting, self._waiting = self._waiting, []
        for arrival in waiting:
            self._arrived(arrival)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._arrivals:
            self._waiting.append(self._arrivals.popleft())

    def _on_parent(self) -> None:
        if not os.read(self._settings.parent_fd, 64):
            self._stopping = True

    def _on_accept(self, listening: socket.socket) -> None:
        try:
            sock, address = listening.accept()
        except BlockingIOError:
            return
        except OSError as exc:
            log(f"cannot accept a connection: {exc.strerror or exc}")
            time.sleep(0.1)
            return
        if len(self._open) >= self._settings.max_connections:
            log(f"refused a connection: {len(self._open)} are open")
            sock.close()
            return
        self._counter += 1
        self._open.add(self._counter)
        say("Accepted client connection")
        peer = "unix client"
        if isinstance(address, tuple):
            peer = str(Endpoint(listener.plain(address[0]), address[1]))
        greeter = threading.Thread(
            target=self._greet, args=(self._counter, sock, peer), name=f"greet {peer}", daemon=True
        )
        try:
            greeter.start()
        except RuntimeError as exc:
            log(f"cannot serve {peer}: {exc}")
            sock.close()
            self._gone(self._counter)

    def _greet(self, connection: int, sock: socket.socket, peer: str) -> None:
        """On a thread of its own."""
        settings = self._settings
        try:
            greeting = greet(sock, self._version, settings.extension, settings.timeout)
            arrival = Arrival(connection, sock, peer, greeting)
        except CaravanError as exc:
            arrival = Arrival(connection, sock, peer, None, str(exc))
        self._arrivals.append(arrival)
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")

    def _arrived(self, arrival: Arrival) -> None:
        """Give a greeted client to its session process, or leave it waiting for one."""
        greeting = arrival.greeting
        if greeting is None:
            log(f"closing the connection to {arrival.peer}: {arrival.error}")
            arrival.sock.close()
            self._gone(arrival.connection)
            return
        process, why = self._process_for(greeting)
        if process is None and not why:
            self._waiting.append(arrival)
            return
        with arrival.sock:
            if process is not None and process.give(
                self._adopt(arrival, greeting, process), arrival.sock
            ):
                return
            why = why or "the session has ended"
            request = greeting.request
            if request is not None:
                new = isinstance(request, SessionRequest) and not request.session
                refuse(arrival.sock, greeting, Status.BUSY if new else Status.REFUSED, why)
            log(f"closing the connection to {arrival.peer}: {why}")
            self._gone(arrival.connection)

    def _process_for(self, greeting: Greeting) -> tuple[SessionProcess | None, str]:
        request = greeting.request
        if isinstance(request, PeerRequest):
            return self._pool.peer(request.key)
        key = request.session if request is not None else ""
        return self._pool.session(key, queue=len(self._waiting))

    def _adopt(
        self, arrival: Arrival, greeting: Greeting, process: SessionProcess
    ) -> control.Adopt:
        request = greeting.request
        return control.Adopt(
            connection=arrival.connection,
            peer=arrival.peer,
            major=self._version.major if request is None else 0,
            key=process.key,
            seq=greeting.seq,
            device=request.device if request is not None else 0,
            peer_key=process.peer_key,
            addresses=[self._address(arrival.sock)],
            route=request.route if isinstance(request, PeerRequest) else 0,
        )

    def _address(self, sock: socket.socket) -> str:
        """Where other workers reach this one: most likely where this head has."""
        if self._settings.peer_address:
            return str(Endpoint.parse(self._settings.peer_address, self._port))
        if sock.family == socket.AF_UNIX:
            return f"unix:{os.path.abspath(sock.getsockname())}"
        return str(Endpoint(listener.plain(sock.getsockname()[0]), self._port))

    def _gone(self, connection: int) -> None:
        self._open.discard(connection)
        say("Client connection closed")


def _cache(settings: Settings) -> str:
    if not settings.cache:
        return "n/a"
    size = settings.cache_size
    bound = f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size >> 20} MiB"
    return f"{settings.cache} (at most {bound})"


def say(text: str) -> None:
    """A line for the person, or the program, that started the worker."""
    with contextlib.suppress(BrokenPipeError):
        print(text, flush=True)
