"""`Opening`: one session that is being opened, on a thread that nobody has to wait for.

A handshake has many steps, each of which may take as long as a peer is given for an answer. Used by
`cluster`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from caravan.errors import ConnectError
from caravan.stream.session import Session


class Opening:
    """See the module.

    Args:
        open_one: opens the session.
        where: whom it is opened with, for errors.
    """

    def __init__(self, open_one: Callable[[], Session], where: object) -> None:
        self._open_one = open_one
        self._where = where
        self._lock = threading.Lock()
        self._given_up = False
        self._session: Session | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="caravan-connect", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            session = self._open_one()
        except BaseException as exc:
            self._error = exc
            return
        with self._lock:
            self._session = session
            late = self._given_up
        if late:
            session.close()

    def wait(self, deadline: float) -> None:
        """Until it has opened or failed; raises ConnectError when that takes too long."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            raise ConnectError(f"cannot connect to {self._where}: it takes too long")

    def result(self) -> Session:
        """The session; raises why there is none."""
        if self._error is not None:
            raise self._error
        assert self._session is not None
        return self._session

    def give_up(self) -> None:
        """Close the session, now or, without waiting here, as soon as it has opened."""
        with self._lock:
            self._given_up = True
            session = self._session
        if session is not None:
            session.close()
