"""`Pool`: the supervisor's session processes: the warm spare, the ones in use, the dying.

Belongs to the supervisor's main thread, and is driven by its selector loop: `tend` after every
round, and `patience` says how long a round may last. Knows nothing of clients but their numbers.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import sys
import time
from collections.abc import Callable, Sequence

from caravan.worker import control
from caravan.worker.process import SessionProcess

_GRACE = 3.0
_SPARE_DELAY = 1.0
_MAX_BACKOFF = 30.0
_LONG = 60.0


class Pool:
    """See the module.

    Args:
        arguments: of every session process.
        limit: how many sessions there may be.
        selector: where the processes' reports are watched; the data is a call without arguments.
        gone: told the number of every connection that has ended.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        limit: int,
        selector: selectors.BaseSelector,
        gone: Callable[[int], None],
    ) -> None:
        self._arguments = arguments
        self._limit = limit
        self._selector = selector
        self._gone = gone
        self._processes: list[SessionProcess] = []
        self._dying: list[SessionProcess] = []
        self.spare: SessionProcess | None = None
        self._spare_at = 0.0
        self._failures = 0

    def __repr__(self) -> str:
        return f"<Pool of {len(self._processes)} processes, {len(self._dying)} dying>"

    def start_spare(self) -> None:
        """Start the next session process; when that fails, it is tried again later."""
        self._spare_at = 0.0
        try:
            process = SessionProcess(self._arguments)
        except OSError as exc:
            complain(f"cannot start a session process: {exc.strerror or exc}")
            self._retry_later()
            return
        self._processes.append(process)
        self.spare = process
        self._selector.register(
            process.control, selectors.EVENT_READ, lambda: self._on_message(process)
        )

    def session(self, key: str) -> tuple[SessionProcess | None, str]:
        """The process of the session `key`, or of a new one for no key; or why there is none."""
        if key:
            return self._find(key, lambda process: process.key)
        if sum(bool(p.key) for p in self._processes) >= self._limit:
            return None, f"the worker serves {self._limit} sessions already"
        if self.spare is None:
            self.start_spare()
        spare = self.spare
        if spare is None:
            return None, "no session process can be started"
        spare.key = secrets.token_hex(16)
        spare.peer_key = secrets.token_hex(16)
        self.spare = None
        # Not at once: the new session has better use for the processor now.
        self._spare_at = time.monotonic() + _SPARE_DELAY
        return spare, ""

    def peer(self, key: str) -> tuple[SessionProcess | None, str]:
        """The process of the session with this `peer_key`; or why there is none."""
        return self._find(key, lambda process: process.peer_key)

    def _find(
        self, key: str, secret_of: Callable[[SessionProcess], str]
    ) -> tuple[SessionProcess | None, str]:
        for process in self._processes:
            secret = secret_of(process)
            if secret and secrets.compare_digest(secret.encode(), key.encode()):
                return process, ""
        return None, "no such session"

    def patience(self) -> float:
        """Seconds until `tend` has something to do of its own accord."""
        if self._dying:
            return 0.02
        if self.spare is None and self._spare_at:
            return max(0.0, self._spare_at - time.monotonic())
        return _LONG

    def tend(self) -> None:
        """Reap the dead, tell of violent deaths, and see to a spare."""
        for process in [p for p in self._dying if p.reap() is not None]:
            self._dying.remove(process)
            death = process.death()
            if death:
                complain(f"session process {process.pid} {death}")
        if self.spare is None and self._spare_at and time.monotonic() >= self._spare_at:
            self.start_spare()

    def end(self) -> None:
        """End all processes: asked first, killed after the grace; returns when all are reaped."""
        processes = [*self._processes, *self._dying]
        for process in processes:
            process.end()
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
            complain(f"session process {process.pid} talks nonsense")
            process.kill()
            message = None
        if isinstance(message, control.Ready):
            process.ready = message
            self._failures = 0
        elif isinstance(message, control.Closed):
            process.connections.discard(message.connection)
            self._gone(message.connection)
        else:
            self._lost(process)

    def _lost(self, process: SessionProcess) -> None:
        """A session process closed its side: it has ended, or is about to."""
        self._selector.unregister(process.control)
        process.control.close()
        self._processes.remove(process)
        self._dying.append(process)
        process.key = process.peer_key = ""
        for connection in process.connections:
            self._gone(connection)
        if process is self.spare:
            self.spare = None
            self._retry_later()


def complain(text: str) -> None:
    """One line on stderr."""
    with contextlib.suppress(BrokenPipeError):
        print(f"caravan worker: {text}", file=sys.stderr, flush=True)
