"""`Executor`: one device's queue; its work happens one piece at a time, in order of arrival.

Connection threads do cheap work themselves after `try_claim`, when nothing is queued or running,
and may work off the queue themselves after `enlist`: a decode step then changes threads not once.
Knows nothing of commands or of the engine.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

Job = Callable[[], None]


class Executor:
    """The queue of one device, and a thread for when nobody else works it off.

    One at a time has the turn: whoever claimed the idle device, or works off the queue.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._held = False
        self._running = 0
        # one entry each time the thread is given the turn (True), and one at the end (False)
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Executor {self._name}, {self.pending} pending>"

    @property
    def pending(self) -> int:
        """Jobs that are queued or running."""
        return len(self._jobs) + self._running

    def try_claim(self) -> bool:
        """Take the device for work on the caller's thread; False when it is not idle.

        After True the caller must call `release`; jobs submitted meanwhile run after that.
        """
        with self._lock:
            if self._held:
                return False
            self._held = True
            return True

    def release(self) -> None:
        """End what `try_claim` began."""
        with self._lock:
            self._held = bool(self._jobs)
            if self._held:
                self._start()

    def submit(self, job: Job) -> None:
        """Run `job` after everything that came before. A job must not raise."""
        with self._lock:
            self._jobs.append(job)
            if not self._held:
                self._held = True
                self._start()

    def enlist(self, job: Job) -> bool:
        """As `submit`, but True when the device is idle: then the caller must call `work_off`."""
        with self._lock:
            self._jobs.append(job)
            if self._held:
                return False
            self._held = True
            return True

    def work_off(self) -> None:
        """Do what `enlist` put into the queue and what others submit meanwhile, to the last."""
        while True:
            with self._lock:
                self._running = 0
                if not self._jobs:
                    self._held = False
                    return
                job = self._jobs.popleft()
                self._running = 1
            try:
                job()
            except Exception:
                # Jobs answer for their own errors; this is a defect here, and must not end the
                # queue, or every later command would hang.
                traceback.print_exc(file=sys.stderr)
            del job

    def lend(self) -> Loan:
        """Wait for the caller's turn in the queue, and hold it until the loan is returned."""
        loan = Loan()
        self.submit(loan.serve)
        loan.granted.wait()
        return loan

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The device's turn, for a thread that is no connection's: waits for it."""
        if self.try_claim():
            try:
                yield
            finally:
                self.release()
            return
        loan = self.lend()
        try:
            yield
        finally:
            loan.end()

    def close(self) -> None:
        """End the thread after what is queued. Nothing may be submitted any more."""
        with self._lock:
            thread = self._thread
            self._wake.put(False)
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        """Let the thread work off the queue; it has the turn from here on."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"executor {self._name}", daemon=True
            )
            self._thread.start()
        self._wake.put(True)

    def _run(self) -> None:
        while self._wake.get():
            self.work_off()


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
