"""The supervisor: what `caravan worker` is. It accepts, has greeted, and hands connections over.

All state belongs to the main thread and its selector loop; who is new waits in the lobby, so a
silent one holds up nobody. It never loads the engine or NumPy: those live in session
processes, whose deaths it survives.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from caravan.errors import UsageError, WorkerStartError
from caravan.transport.endpoint import Endpoint
from caravan.wire.extension import PeerRequest, SessionRequest, Status, TlsRequest, public_id
from caravan.wire.versions import V7, V8
from caravan.worker import control, listener
from caravan.worker.announce import announce, warn
from caravan.worker.doorway import Doorway
from caravan.worker.handshake import Greeting, Terms, accept, refuse
from caravan.worker.lobby import Arrival, Lobby
from caravan.worker.log import log, say
from caravan.worker.pool import Pool
from caravan.worker.process import SessionProcess, close_pipe
from caravan.worker.ration import Ration
from caravan.worker.settings import Settings
from caravan.worker.shutdown import Shutdown
from caravan.worker.tally import Tally

_START_TIMEOUT = 120.0


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
        self._open: dict[int, Arrival] = {}
        self._version = V8
        self._shutdown = Shutdown(settings.drain_seconds)
        arguments = (
            *("--devices", settings.devices, "--threads", str(settings.threads)),
            *("--cache", settings.cache, "--cache-size", str(settings.cache_size)),
            *(f"--model-dir={directory}" for directory in settings.model_dirs),
            *("--tls-ca", settings.tls.ca),
            *("--tls-cert", settings.tls.cert, "--tls-key", settings.tls.key),
            *("--max-memory", ",".join(map(str, settings.max_memory))),
            *("--idle-timeout", str(settings.idle_timeout)),
            # who started it is most likely the head
            *(("--beside-head",) if settings.parent_fd >= 0 else ()),
        )
        self._tally = Tally() if settings.max_memory else None
        told = control.Secrets(settings.token.key.decode() if settings.token else "")
        self._doorway = Doorway()
        self._pool = Pool(
            arguments,
            settings.max_sessions,
            self._selector,
            self._gone,
            self._tally,
            told,
            self._doorway.remove,
        )
        self._ration = Ration(log)

    # start and end

    def run(self) -> int:
        """Serve until told to stop; raises WorkerStartError when it cannot start."""
        settings = self._settings
        self._shutdown.catch(self._wake_write)
        try:
            self._listeners, self._port = listener.listen(settings.host, settings.port)
            self._check_exposure()
            self._watch(self._wake_read, self._on_wake)
            if settings.parent_fd >= 0:
                self._watch(settings.parent_fd, self._on_parent)
            self._pool.start_spare()
            ready = self._await_ready()
            if ready is not None:
                self._version = V7 if (settings.protocol or ready.protocol) == 7 else V8
                announce(settings, ready, self._version, self._port)
                self._open_door()
            while not self._is_over():
                self._step()
            return 0
        finally:
            self._shut_down()

    def _is_over(self) -> bool:
        """Begin to drain when told to end; True when nothing is left to wait for."""
        shutdown, pool = self._shutdown, self._pool
        count = pool.sessions
        sessions = f"{count} session{'s' if count != 1 else ''}"
        if shutdown.begins():
            pool.close()
            if not shutdown.is_over(count):
                log(f"shutting down: {sessions} may go on for {self._settings.drain_seconds:g} s")
        over = shutdown.is_over(count)
        if over and count and shutdown.ran_out:
            log(f"shutting down: the time is over, and {sessions} ended with it")
        return over

    def _check_exposure(self) -> None:
        """Raises UsageError when other machines can connect, and nothing keeps strangers out."""
        settings = self._settings
        if not listener.exposed(self._listeners):
            return
        if settings.tls.cert and settings.tls.ca:
            # who has no certificate of that CA is kept out, and the others need no token
            if settings.allow_base:
                warn(settings.host, "some need no certificate (--allow-llama-cpp)")
            return
        if settings.token is None and not settings.insecure:
            raise UsageError(
                f"--host {settings.host} lets other machines connect: give --token-file FILE"
                " (caravan token new -o FILE makes one), or --insecure to let everybody in"
            )
        if settings.token is None:
            warn(settings.host, "there is no token (--insecure)")
        elif settings.allow_base:
            warn(settings.host, "some need no token (--allow-llama-cpp)")

    def _open_door(self) -> None:
        settings = self._settings
        terms = Terms(
            self._version,
            settings.extension,
            settings.timeout,
            settings.token,
            bool(settings.tls.cert),
            settings.allow_base,
        )
        lobby = Lobby(terms, self._on_arrival)
        for sock in self._listeners:
            self._watch(sock, partial(self._on_accept, sock, lobby))

    def _await_ready(self) -> control.Ready | None:
        """The first report of a session process; None when told to stop meanwhile."""
        deadline = time.monotonic() + _START_TIMEOUT
        while not self._shutdown.asked:
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

    def _shut_down(self) -> None:
        """Close the door, then end all session processes within the grace."""
        self._shutdown.release()
        listener.close(self._listeners)
        self._pool.end()
        if self._tally is not None:
            self._tally.close()
        for arrival in (*self._arrivals, *self._waiting):
            arrival.sock.close()
        self._ration.finish()
        self._selector.close()
        close_pipe((self._wake_read, self._wake_write))

    # the loop

    def _watch(self, file: int | socket.socket, call: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, call)

    def _step(self) -> None:
        """Wait for something to happen, and deal with it."""
        for key, _events in self._selector.select(self._patience()):
            # an earlier event of this round may have closed this one's file
            if key.fd in self._selector.get_map():
                key.data()
        self._ration.tick()
        self._pool.tend()
        waiting, self._waiting = self._waiting, []
        for arrival in waiting:
            self._serve(arrival)

    def _patience(self) -> float:
        """Seconds until there is something to do of our own accord."""
        bounds = [self._pool.patience(), self._ration.patience(), self._shutdown.patience()]
        if self._waiting:
            bounds.append(self._doorway.patience())
        return min(bound for bound in bounds if bound is not None)

    def _on_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while self._arrivals:
            self._arrived(self._arrivals.popleft())

    def _on_parent(self) -> None:
        if not os.read(self._settings.parent_fd, 64):
            self._shutdown.at_once()

    def _on_accept(self, listening: socket.socket, lobby: Lobby) -> None:
        try:
            sock, place = listening.accept()
        except BlockingIOError:
            return
        except OSError as exc:
            # who can connect can bring it about
            self._ration.tell("", f"cannot accept a connection: {exc.strerror or exc}")
            time.sleep(0.1)
            return
        self._counter += 1
        address, peer = "", "unix client"
        if isinstance(place, tuple):
            address = listener.plain(place[0])
            peer = str(Endpoint(address, place[1]))
        refusal = lobby.take(self._counter, sock, address, peer)
        if refusal:
            self._ration.tell(address, f"refused the connection of {peer}: {refusal}")

    def _on_arrival(self, arrival: Arrival) -> None:
        """On the thread that has greeted it."""
        self._arrivals.append(arrival)
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")

    def _arrived(self, arrival: Arrival) -> None:
        """Somebody has introduced himself, or has not."""
        if arrival.greeting is None:
            self._turn_away(arrival, arrival.error)
        elif len(self._open) >= self._settings.max_connections:
            refuse(arrival.sock, arrival.greeting, Status.BUSY, "too many connections are open")
            self._turn_away(arrival, f"{len(self._open)} connections are open")
        else:
            self._open[arrival.connection] = arrival
            say("Accepted client connection")
            self._waiting.append(arrival)
            if self._is_stranger(arrival.greeting):
                self._mind(self._doorway.add(arrival))

    def _is_stranger(self, greeting: Greeting) -> bool:
        """Whether it gets a session process without having shown anything."""
        unproven = isinstance(greeting.request, TlsRequest) and self._settings.token is None
        return unproven and greeting.new

    def _mind(self, left: Arrival | None) -> None:
        """One that waits has to go."""
        if left is not None:
            self._waiting.remove(left)
            self._turn_away(left, "it did not show a certificate before too many others came")
            self._gone(left.connection)

    def _turn_away(self, arrival: Arrival, why: str) -> None:
        self._ration.tell(arrival.source, f"closing the connection to {arrival.peer}: {why}")
        arrival.sock.close()

    def _serve(self, arrival: Arrival) -> None:
        """Give a greeted client to its session process, or leave it waiting for one."""
        greeting = arrival.greeting
        assert greeting is not None
        stranger = arrival.connection in self._doorway
        process, why = self._process_for(arrival.connection, greeting)
        if process is None and not why:
            self._waiting.append(arrival)
            return
        given = process is not None and process.give(
            self._adopt(arrival, greeting, process), arrival.sock
        )
        if process is not None and process.gone:
            # it has just ended, and the next round knows why
            self._waiting.append(arrival)
            return
        if given:
            if isinstance(greeting.request, TlsRequest):
                accept(arrival.sock, greeting)
            if stranger:
                self._doorway.enter(arrival.connection)
            else:
                arrival.sock.close()
            return
        why = why or "the session does not answer"
        status = self._status(greeting)
        if greeting.request is not None:
            refuse(arrival.sock, greeting, status, why)
        if status == Status.ENDED:
            # it came to ask that, and the operator has been told when it happened
            arrival.sock.close()
        else:
            self._turn_away(arrival, why)
        self._gone(arrival.connection)

    def _status(self, greeting: Greeting) -> Status:
        """With which a client is refused."""
        request = greeting.request
        if greeting.new:
            return Status.BUSY
        if isinstance(request, SessionRequest):
            public = public_id(request.session)
        else:
            public = request.session if isinstance(request, TlsRequest) else ""
        known = self._pool.obituaries.find(public)
        return Status.ENDED if known else Status.REFUSED

    def _process_for(
        self, connection: int, greeting: Greeting
    ) -> tuple[SessionProcess | None, str]:
        request = greeting.request
        if greeting.new and not self._pool.closed:
            if connection in self._doorway and not self._doorway.may_enter(connection):
                return None, ""
            if self._pool.full and self._doorway.make_room():
                return None, ""
        if isinstance(request, PeerRequest):
            return self._pool.peer(request.key)
        if isinstance(request, TlsRequest):
            return self._pool.named(request, queue=len(self._waiting))
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
            device=getattr(request, "device", 0),
            peer_key=process.peer_key,
            addresses=[self._address(arrival.sock)],
            route=getattr(request, "route", 0),
            seconds=self._settings.timeout if isinstance(request, TlsRequest) else 0.0,
            new=greeting.new,
        )

    def _address(self, sock: socket.socket) -> str:
        """Where other workers reach this one: most likely where this head has."""
        tls = bool(self._settings.tls.cert)
        if self._settings.peer_address:
            there = Endpoint.parse(self._settings.peer_address, self._port)
            return str(replace(there, tls=there.tls or (tls and not there.path)))
        if sock.family == socket.AF_UNIX:
            return f"unix:{os.path.abspath(sock.getsockname())}"
        return str(Endpoint(listener.plain(sock.getsockname()[0]), self._port, tls=tls))

    def _gone(self, connection: int, why: str = "") -> None:
        self._doorway.remove(connection)
        arrival = self._open.pop(connection, None)
        if why and arrival is not None:
            self._ration.tell(arrival.source, f"closing the connection to {arrival.peer}: {why}")
        say("Client connection closed")
