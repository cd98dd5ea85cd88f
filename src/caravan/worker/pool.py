"""`Pool`: the supervisor's session processes: the warm spares, the ones in use, the dying.

Belongs to the supervisor's main thread, and is driven by its selector loop: `tend` after every
round, and `patience` says how long a round may last. Knows nothing of clients but their numbers.
"""

from __future__ import annotations

import secrets
import selectors
import time
from collections.abc import Callable, Sequence

from caravan.wire.extension import TlsRequest, public_id
from caravan.worker import control
from caravan.worker.log import log
from caravan.worker.obituaries import Obituaries
from caravan.worker.process import SessionProcess
from caravan.worker.tally import Tally

_GRACE = 3.0
_SPARE_DELAY = 1.0
# One spare is kept, more of them only until nobody has wanted one for so long.
_SURPLUS_SECONDS = 2.0
# Clients wait for processes that do not start; so often they are tried for them.
_TRIES = 2
_MAX_BACKOFF = 30.0
# Of one session: devices of its head, and ways from other workers. The others want some too.
_MOST_CONNECTIONS = 128
_LONG = 60.0
# A process of other code than the supervisor's, as after an update.
_NONSENSE = (
    "was killed by the worker, since it talked nonsense; if Caravan has been installed anew, start"
    " the worker again"
)


class Pool:
    """See the module.

    Args:
        arguments: of every session process.
        limit: how many sessions there may be.
        selector: where the processes' reports are watched; the data is a call without arguments.
        gone: told the number of every connection that has ended, and why it did not get in.
        tally: where the processes write down what they hold of the devices' memory, if they do.
        told: to every process, beside its command line.
        entered: told the number of every connection that has come in by TLS.

    Attributes:
        closed: no new session is let in, and no process is started for one.
        obituaries: why the last sessions ended.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        limit: int,
        selector: selectors.BaseSelector,
        gone: Callable[[int, str], None],
        tally: Tally | None = None,
        told: control.Secrets | None = None,
        entered: Callable[[int], None] = lambda connection: None,
    ) -> None:
        self._arguments = arguments
        self._limit = limit
        self._selector = selector
        self._gone = gone
        self._tally = tally
        self._told = told
        self._entered = entered
        self.closed = False
        self.obituaries = Obituaries()
        self._processes: list[SessionProcess] = []
        self._dying: list[SessionProcess] = []
        self._spares: list[SessionProcess] = []
        self._spare_at = 0.0
        self._surplus_at = 0.0
        self._failures = 0
        self._noticed: set[str] = set()

    def __repr__(self) -> str:
        return f"<Pool of {len(self._processes)} processes, {len(self._dying)} dying>"

    @property
    def spare(self) -> SessionProcess | None:
        """The one that the next session gets, ready or not; None while there is none."""
        spares = [*filter(_is_ready, self._spares), *self._spares]
        return spares[0] if spares else None

    @property
    def sessions(self) -> int:
        """How many there are."""
        return sum(bool(process.key) for process in self._processes)

    @property
    def full(self) -> bool:
        """Whether there may be no more of them."""
        return self.sessions >= self._limit

    def close(self) -> None:
        """Let in no new session, and end what waits for one; those that are there go on."""
        self.closed = True
        self._spare_at = 0.0
        for process in self._spares:
            process.dismiss()

    def start_spare(self) -> None:
        """Start the next session process; when that fails, it is tried again later."""
        self._spare_at = 0.0
        if self.closed:
            return
        try:
            process = self._new_process()
        except OSError as exc:
            log(f"cannot start a session process: {exc.strerror or exc}")
            self._retry_later()
            return
        self._processes.append(process)
        self._spares.append(process)
        self._selector.register(
            process.control, selectors.EVENT_READ, lambda: self._on_message(process)
        )

    def _new_process(self) -> SessionProcess:
        tally = self._tally
        if tally is None:
            return SessionProcess(self._arguments, told=self._told)
        row = tally.take()
        try:
            arguments = (*self._arguments, "--tally", str(tally.fd), "--row", str(row))
            return SessionProcess(arguments, (tally.fd,), row, self._told)
        except OSError:
            tally.give_back(row)
            raise

    def session(self, key: str, queue: int = 0) -> tuple[SessionProcess | None, str]:
        """The process of the session `key`, or of a new one for no key; or why there is none.

        None for no reason means that one is starting: ask again when something has happened, which
        may also be that one has come back.

        Args:
            queue: how many wait for a process already.
        """
        if key:
            return self._find(key, lambda process: process.key, public_id(key))
        if self.closed:
            return None, "the worker is shutting down"
        if self.full:
            return None, f"the worker serves {self._limit} sessions already"
        # one that is started for somebody who waits is no surplus, however long it takes
        self._surplus_at = time.monotonic() + _SURPLUS_SECONDS
        if len(self._spares) <= queue and self._failures < _TRIES and self._wanted():
            self.start_spare()
        spare = self.spare
        if spare is None:
            return None, "no session process can be started"
        if not _is_ready(spare):
            return None, ""
        spare.key = secrets.token_hex(16)
        spare.peer_key = secrets.token_hex(16)
        self._spares.remove(spare)
        if not self._spares:
            # Not at once: the new session has better use for the processor now.
            self._spare_at = time.monotonic() + _SPARE_DELAY
        return spare, ""

    def _wanted(self) -> bool:
        """Whether one more may become a session. However many wait, more are not started for them:
        each takes as much memory as the engine does."""
        return self.sessions + len(self._spares) < self._limit

    def peer(self, key: str) -> tuple[SessionProcess | None, str]:
        """The process of the session with this `peer_key`; or why there is none."""
        return self._find(key, lambda process: process.peer_key, "")

    def named(self, request: TlsRequest, queue: int = 0) -> tuple[SessionProcess | None, str]:
        """The process that a connection by TLS is for; as `session` and `peer`."""
        if request.session:
            name = request.session
            return self._find(name, lambda process: _public(process.key), name)
        if request.peer:
            return self._find(request.peer, lambda process: _public(process.peer_key), "")
        return self.session("", queue)

    def _find(
        self, key: str, secret_of: Callable[[SessionProcess], str], public: str
    ) -> tuple[SessionProcess | None, str]:
        for process in (*self._processes, *self._dying):
            secret = secret_of(process)
            if secret and secrets.compare_digest(secret.encode(), key.encode()):
                if process in self._dying:
                    # it is not known yet why
                    return None, ""
                count = len(process.connections)
                if count >= _MOST_CONNECTIONS:
                    return None, f"the session has {count} connections already"
                return process, ""
        return None, self.obituaries.find(public) or "no such session"

    def patience(self) -> float:
        """Seconds until `tend` has something to do of its own accord."""
        if self._dying:
            return 0.02
        if not self._spares and self._spare_at:
            return max(0.0, self._spare_at - time.monotonic())
        if len(self._spares) > 1:
            return max(0.0, self._surplus_at - time.monotonic())
        return _LONG

    def tend(self) -> None:
        """Reap the dead, tell of violent deaths, and see to one spare."""
        for process in [p for p in self._dying if p.reap() is not None]:
            self._dying.remove(process)
            if self._tally is not None and process.row is not None:
                self._tally.give_back(process.row)
            if process.key:
                self.obituaries.note(process.key, process.obituary())
            death = process.death()
            if death:
                log(f"session process {process.pid} {death}")
        now = time.monotonic()
        if not self._spares and self._spare_at and now >= self._spare_at:
            self.start_spare()
        if len(self._spares) > 1 and now >= self._surplus_at:
            self._spares.pop().dismiss()

    def end(self) -> None:
        """End all processes: asked first, killed after the grace; returns when all are reaped."""
        processes = [*self._processes, *self._dying]
        for process in processes:
            # one that is still starting would not hear it
            process.kill() if process.ready is None else process.dismiss()
        deadline = time.monotonic() + _GRACE
        while any(p.reap() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in processes:
            if process.reap() is None:
                process.kill()
        while any(p.reap() is None for p in processes):
            time.sleep(0.01)
        for process in processes:
            process.control.close()

    def _retry_later(self) -> None:
        self._failures += 1
        self._spare_at = time.monotonic() + min(2.0**self._failures, _MAX_BACKOFF)

    def _on_message(self, process: SessionProcess) -> None:
        try:
            message, _fd = control.receive(process.control)
        except BlockingIOError:
            return
        except (ValueError, KeyError, TypeError):
            process.kill(_NONSENSE)
            message = None
        if isinstance(message, control.Ready):
            process.ready = message
            self._failures = 0
        elif isinstance(message, control.Closed):
            process.connections.discard(message.connection)
            self._gone(message.connection, message.why)
            if message.as_new:
                self._take_back(process)
        elif isinstance(message, control.Entered):
            self._entered(message.connection)
        elif isinstance(message, control.Notice):
            if message.text not in self._noticed:
                self._noticed.add(message.text)
                log(message.text)
        elif isinstance(message, control.Leaving):
            process.farewell = message.text
        else:
            self._lost(process)

    def _take_back(self, process: SessionProcess) -> None:
        """It has served a head that only asked something: a spare again."""
        process.key = process.peer_key = ""
        self._spares.insert(0, process)
        if self.closed:
            process.dismiss()
        self._spare_at = 0.0
        self._surplus_at = time.monotonic() + _SURPLUS_SECONDS

    def _lost(self, process: SessionProcess) -> None:
        """A session process closed its side: it has ended, or is about to."""
        self._selector.unregister(process.control)
        process.control.close()
        self._processes.remove(process)
        self._dying.append(process)
        if self._tally is not None and process.row is not None:
            self._tally.clear(process.row)
        for connection in process.connections:
            self._gone(connection, "")
        if process in self._spares:
            self._spares.remove(process)
            self._retry_later()


def _public(key: str) -> str:
    return public_id(key) if key else ""


def _is_ready(process: SessionProcess) -> bool:
    return process.ready is not None and not process.ready.error
