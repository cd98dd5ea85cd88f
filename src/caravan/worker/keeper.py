"""`Keeper`: stores what heads have sent, beside everything else that goes on.

KEEP says that a tensor lies whole in device memory. One thread of the session reads it there, piece
by piece, and writes it into the weight cache if its hash is the one that was announced. It has
little time while a load or a computation needs the machine, and so may be far behind: who frees a
buffer, and who ends the session in order, works off some of it first.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable

from blake3 import blake3

from caravan.errors import CaravanError
from caravan.worker.buffers import Buffer
from caravan.worker.lane import Lane
from caravan.worker.log import log
from caravan.worker.pace import Pace
from caravan.worker.store import Part, Store

_PIECE = 4 << 20
# Seconds that the end of a buffer, or of the session, may take for what is still to be stored.
LINGER = 2.0
_MAX_PENDING = 1 << 16


class Keeping:
    """A tensor that is being stored, one `step` at a time.

    Attributes:
        over: there is nothing left to do.
        refused: the cache had no room for it.
    """

    def __init__(self, lane: Lane, buffer: Buffer, offset: int, size: int, digest: bytes) -> None:
        self.lane = lane
        self.buffer = buffer
        self.digest = digest.hex()
        self.over = False
        self.refused = False
        self._offset = offset
        self._size = size
        self._done = 0
        self._hasher = blake3()
        self._part: Part | None = None
        self._lock = threading.Lock()

    @property
    def in_reach(self) -> bool:
        """Whether the host can read the memory, at any time."""
        return self.buffer.native is not None and self.buffer.native.view is not None

    def step(self, store: Store) -> float:
        """Store a piece; the seconds that it took. Raises OSError.

        At the device's turn, if the memory is not in reach. Two threads may help each other.
        """
        start = time.monotonic()
        with self._lock:
            if not self.over:
                try:
                    self._step(store)
                except BaseException:
                    self._end()
                    raise
        return time.monotonic() - start

    def drop(self) -> None:
        """Store no more of it; when this returns nobody reads the memory."""
        with self._lock:
            self._end()

    def abandon(self) -> None:
        """Leave nothing unfinished on the disk. Waits for nobody: the process ends."""
        part = self._part
        if part is not None:
            part.abandon()

    def _step(self, store: Store) -> None:
        native = self.buffer.native
        if self._part is None:
            if native is None or store.has(self.digest, self._size):
                self._stored(store)
                return
            self._part = store.begin(self.digest, self._size)
            if self._part is None:
                self.refused = True
                self._end()
                return
        if native is not None:
            size = min(_PIECE, self._size - self._done)
            piece = native.read(self._offset + self._done, size)
            self._hasher.update(piece)
            self._part.write(piece)
            self._done += size
        if self._done == self._size:
            self._finish(store)

    def _finish(self, store: Store) -> None:
        assert self._part is not None
        found = self._hasher.hexdigest()
        if found == self.digest:
            self._part.commit()
            self._stored(store)
        else:
            log(f"not kept: what has arrived as {self.digest[:16]}… is {found[:16]}…")
            self._end()

    def _stored(self, store: Store) -> None:
        store.hold(self.digest, self.buffer.handle)
        self._end()

    def _end(self) -> None:
        self.over = True
        if self._part is not None:
            self._part.close()


class Keeper:
    """See the module.

    Args:
        now: seconds, on a clock that only goes forward.
    """

    def __init__(self, store: Store, pace: Pace, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._store = store
        self._pace = pace
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Keeping] = deque()
        self._left: list[Keeping] = []
        self._thread: threading.Thread | None = None
        self._hurry = False
        self._closed = False
        self._storing = True
        self._full = False

    def __repr__(self) -> str:
        return f"<Keeper of {self._store}, {self.pending} pending>"

    @property
    def pending(self) -> int:
        """Tensors that are still to be stored."""
        return len(self._queue)

    def keep(self, lane: Lane, buffer: Buffer, offset: int, size: int, digest: bytes) -> None:
        """Store these bytes, some time."""
        with self._lock:
            if not self._storing or self._closed or len(self._queue) >= _MAX_PENDING:
                return
            self._queue.append(Keeping(lane, buffer, offset, size, digest))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self, handle: int, seconds: float = LINGER) -> None:
        """At the device's turn, before a buffer is freed: store what lies in it, for so long.

        What is left then is not stored. When this returns nobody reads the buffer's memory.
        """
        with self._lock:
            mine = [keeping for keeping in self._queue if keeping.buffer.handle == handle]
        deadline = self._now() + seconds
        for keeping in mine:
            while not keeping.over and self._storing and self._now() < deadline:
                self._step(keeping)
            keeping.drop()
        with self._lock:
            for keeping in mine:
                # the thread may have been quicker
                with contextlib.suppress(ValueError):
                    self._queue.remove(keeping)
            self._changed.notify_all()
        self._store.let_go(handle)

    def drain(self, seconds: float = LINGER) -> bool:
        """Store the rest without pausing, for so long; False if not all of it could be."""
        with self._lock:
            self._hurry = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._queue, seconds)
        self.close()
        return done

    def close(self) -> None:
        """Store no more, and leave nothing unfinished. Waits for nobody."""
        with self._lock:
            self._closed = True
            self._left.extend(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for keeping in self._left:
            keeping.abandon()

    # the thread

    def _run(self) -> None:
        self._store.sweep()
        self._pace.begin()
        while True:
            with self._changed:
                if not self._queue:
                    self._changed.wait_for(lambda: self._queue or self._closed)
                    self._pace.begin()
                if self._closed:
                    break
                keeping = self._queue[0]
            took = self._turn(keeping)
            if keeping.over:
                self._over(keeping)
            self._pace.rest(took, self._sleep)
        for keeping in self._left:
            keeping.drop()

    def _turn(self, keeping: Keeping) -> float:
        if keeping.in_reach:
            return self._step(keeping)
        with keeping.lane.executor.turn():
            return self._step(keeping)

    def _over(self, keeping: Keeping) -> None:
        with self._lock:
            # whoever frees the buffer may have been quicker
            with contextlib.suppress(ValueError):
                self._queue.remove(keeping)
            self._changed.notify_all()

    def _sleep(self, seconds: float) -> bool:
        with self._lock:
            return self._changed.wait_for(lambda: self._hurry or self._closed, seconds)

    # one step, on any thread

    def _step(self, keeping: Keeping) -> float:
        try:
            took = keeping.step(self._store)
        except (OSError, CaravanError) as exc:
            self._give_up(exc)
            return 0.0
        if keeping.refused and not self._full:
            self._full = True
            log("the weight cache has no room for all of this model; see --cache-size")
        return took

    def _give_up(self, exc: Exception) -> None:
        with self._lock:
            first = self._storing and not self._closed
            self._storing = False
            queue = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for keeping in queue:
            keeping.drop()
        if first:
            reason = exc.strerror or exc if isinstance(exc, OSError) else exc
            log(f"cannot save to '{self._store.directory}': {reason}; this session saves no more")
