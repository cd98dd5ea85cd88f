"""`Executor`: one device's queue; its work happens one piece at a time, in order of arrival.

Connection threads hand work over with `submit`, or do cheap work themselves after `try_claim` when
nothing is queued or running: a decode step then costs one change of threads, not eight. Knows
nothing of commands or of the engine.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], None]


class Executor:
    """The queue and the thread of one device; the thread starts with the first queued job."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        # Whoever works on the device holds the turn: the thread, or the claimer of an idle queue.
        self._turn = threading.Lock()
        self._pending = 0
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Executor {self._name}, {self._pending} pending>"

    @property
    def pending(self) -> int:
        """Jobs that are queued or running."""
        return self._pending

    def try_claim(self) -> bool:
        """Take the device for work on the caller's thread; False when it is not idle.

        After True the caller must call `release`; jobs submitted meanwhile run after that.
        """
        with self._lock:
            return self._pending == 0 and self._turn.acquire(blocking=False)

    def release(self) -> None:
        """End what `try_claim` began."""
        self._turn.release()

    def submit(self, job: Job) -> None:
        """Run `job` after everything that came before. A job must not raise."""
        with self._lock:
            self._pending += 1
            self._queue.put(job)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"executor {self._name}", daemon=True
                )
                self._thread.start()

    def lend(self) -> Loan:
        """Wait for the caller's turn in the queue, and hold it until the loan is returned."""
        loan = Loan()
        self.submit(loan.serve)
        loan.granted.wait()
        return loan

    def close(self) -> None:
        """End the thread after what is queued. Nothing may be submitted any more."""
        with self._lock:
            thread = self._thread
            self._queue.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._turn:
                try:
                    job()
                except Exception:
                    # Jobs answer for their own errors; this is a defect here, and must not end the
                    # queue, or every later command would hang.
                    traceback.print_exc(file=sys.stderr)
            del job
            with self._lock:
                self._pending -= 1


class Loan:
    """A turn lent to a connection's thread, for a payload too big to queue."""

    def __init__(self) -> None:
        self.granted = threading.Event()
        self._returned = threading.Event()

    def serve(self) -> None:
        self.granted.set()
        self._returned.wait()

    def end(self) -> None:
        """Give the turn back."""
        self._returned.set()


class Budget:
    """A bound on the bytes that one connection may have waiting; one piece may always pass."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._changed = threading.Condition()

    def acquire(self, size: int) -> None:
        """Wait until `size` more bytes fit, or until nothing else is held."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + size <= self.limit)
            self._used += size

    def release(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()
