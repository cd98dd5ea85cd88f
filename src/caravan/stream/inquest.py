"""`Inquest`: finds out why a worker's session has ended, once connections to it have broken.

Belongs to a session on the head. It asks on a thread of its own, since who notices a loss may be
in the middle of a callback; what it is told is added to the errors of all streams of the session.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from caravan.errors import ConnectionClosed, LinkDamaged, SessionEnded, WorkerLost
from caravan.stream.dispatcher import Stream

# How long the worker may take to say what happened; who waits for the error waits for that.
SECONDS = 1.0

# Asks until a time of time.monotonic; answers with a line, or with nothing if there is no answer.
Ask = Callable[[float], str]


class Inquest:
    """See the module.

    Args:
        endpoint: of the worker.
        ask: asks it; may raise, which counts as no answer.
    """

    def __init__(self, endpoint: str, ask: Ask) -> None:
        self._endpoint = endpoint
        self._ask = ask
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._losses: list[WorkerLost] = []
        self._answer: str | None = None
        self._over = False

    def __repr__(self) -> str:
        return f"<Inquest at {self._endpoint}: {self._answer}>"

    def watch(self, stream: Stream) -> None:
        """Explain the loss of this stream, when it comes."""
        stream.inquired = True
        stream.on_loss(self._begin)

    def end(self) -> None:
        """From now on sessions end because they are to."""
        self._over = True

    def join(self, seconds: float) -> None:
        """Wait for the answer, if it has been asked, `seconds` at most."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _begin(self, loss: WorkerLost) -> None:
        if loss.endpoint != self._endpoint or not isinstance(loss.cause, ConnectionClosed):
            # it comes from another worker's loss, or has said itself what happened
            return
        if self._over or isinstance(loss.cause, LinkDamaged):
            # the worker knows no more than that the connection ended
            loss.explain(None)
            return
        # a stream may have been lost before it was watched
        loss.ask()
        with self._lock:
            if self._answer is None:
                self._losses.append(loss)
                if self._thread is None:
                    self._start()
                return
        self._explain(loss)

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=self._run, name=f"caravan-inquest {self._endpoint}", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:
            # the interpreter is ending
            self._thread = None
            self._settle("")

    def _run(self) -> None:
        try:
            answer = self._ask(time.monotonic() + SECONDS)
        except Exception:
            answer = ""
        with self._lock:
            self._settle(answer)

    def _settle(self, answer: str) -> None:
        self._answer = answer
        losses, self._losses = self._losses, []
        for loss in losses:
            self._explain(loss)

    def _explain(self, loss: WorkerLost) -> None:
        loss.explain(SessionEnded(self._answer) if self._answer else None)
