"""`SessionProcess`: one session process as the supervisor sees it: started, fed, ended, reaped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from caravan import child
from caravan.trust.token import VARIABLE
from caravan.worker import control


class SessionProcess:
    """A running `caravan.worker.session_process`.

    Args:
        arguments: of its command line.
        fds: further descriptors for it.
        told: what its command line must not show.
        row: of the tally; None where there is none.

    Attributes:
        ready: what it reported; None until it has.
        key: the secret under which further connections join; empty for the spare.
        peer_key: the secret under which other workers' connections join.
        connections: the supervisor's numbers of those it serves.
        gone: its end of the talk is closed, so it has ended or is about to.
        farewell: what it said last of why it ends.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        fds: Sequence[int] = (),
        row: int | None = None,
        told: control.Secrets | None = None,
    ) -> None:
        self.row = row
        self.ready: control.Ready | None = None
        self.key = ""
        self.peer_key = ""
        self.connections: set[int] = set()
        self.gone = False
        self.farewell = ""
        self._why = ""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # A terminal's Ctrl-C goes to the supervisor alone, which ends its children itself.
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "caravan.worker.session_process",
                    "--fd",
                    str(theirs.fileno()),
                    *arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *fds),
                env=_environment(),
                start_new_session=True,
            )
            # the pair has room for it, whenever that process comes to read it
            control.send(self.control, told or control.Secrets())
        # Adopt messages must never hold up the supervisor.
        self.control.setblocking(False)

    def __repr__(self) -> str:
        return f"<SessionProcess {self.pid}, {len(self.connections)} connections>"

    @property
    def pid(self) -> int:
        return self._process.pid

    def give(self, adopt: control.Adopt, sock: socket.socket) -> bool:
        """Hand a connection over; False when the process cannot take it."""
        sock.setblocking(True)
        try:
            control.send(self.control, adopt, sock.fileno())
        except OSError as exc:
            self.gone = not isinstance(exc, BlockingIOError)
            return False
        self.connections.add(adopt.connection)
        return True

    def dismiss(self) -> None:
        """Let an idle one go: it sees the end of the talk."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    def kill(self, why: str = "") -> None:
        """End it, whatever it does; `why`: how its death is told then."""
        self._why = why
        with contextlib.suppress(OSError):
            self._process.kill()

    def reap(self) -> int | None:
        """Its exit code once it has ended (negative: the signal)."""
        return self._process.poll()

    def death(self) -> str:
        """Why it ended, in words; empty when it ended as it should."""
        code = self._process.returncode
        if code is None or code >= 0:
            return "" if not code else f"ended with {code}"
        if code == -signal.SIGKILL and self._why:
            return self._why
        if code == -signal.SIGKILL:
            # who is short of memory sends it, and leaves no other word
            return "was killed by signal SIGKILL (out of memory?)"
        with contextlib.suppress(ValueError):
            return f"died by signal {signal.Signals(-code).name}"
        return f"died by signal {-code}"

    def obituary(self) -> str:
        """Why it ended, for its head."""
        death = self.death()
        return f"the session process {death}" if death else self.farewell or "the session has ended"


def _environment() -> dict[str, str]:
    """It is told the token by other means; and ggml would run a debugger over itself when it
    aborts."""
    return {**child.environment((VARIABLE,)), "GGML_NO_BACKTRACE": "1"}


def close_pipe(fds: Sequence[int]) -> None:
    """Close raw descriptors, whatever state they are in."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
