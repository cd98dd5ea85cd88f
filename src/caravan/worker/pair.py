"""`ReadingPair`: two threads that take turns in reading one connection.

One reads; when it comes upon something long, it lets the other one read on and does that itself, at
once. So a computation starts without a change of threads, and PING is answered during it.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue

from caravan.worker.executor import Job


class ReadingPair:
    """See the module.

    Args:
        read: reads until there is something long to do, which it returns, or to the end (None). It
            must have made sure that what is read next is done later.
        name: of the threads.
    """

    def __init__(self, read: Callable[[], Job | None], name: str) -> None:
        self._read = read
        self._name = name
        # holds one entry while nobody reads
        self._free: SimpleQueue[None] = SimpleQueue()
        self._ended = threading.Event()

    def run(self) -> None:
        """Return at the end of the connection; what is being done then may still go on."""
        for number in range(2):
            threading.Thread(
                target=self._take_turns, name=f"{self._name} {number}", daemon=True
            ).start()
        self._free.put(None)
        self._ended.wait()

    def _take_turns(self) -> None:
        while True:
            self._free.get()
            job = None
            try:
                job = None if self._ended.is_set() else self._read()
            except Exception:
                # a defect of ours: it ends this connection
                traceback.print_exc(file=sys.stderr)
            if job is None:
                self._ended.set()
            self._free.put(None)
            if job is None:
                return
            job()
