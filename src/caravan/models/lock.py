"""A lock between processes, held by an open file, so that it ends with its holder however it ends.

Used around the filling of the cache. Knows nothing of what it protects.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_SECONDS = 0.05


@contextlib.contextmanager
def locked(path: Path, seconds: float = math.inf) -> Iterator[None]:
    """Hold the lock named by `path`, waiting for whoever has it.

    Raises OSError if it cannot exist, TimeoutError (which is one) if it takes longer than that.
    The file stays behind: to remove it would let two holders lock two files of one name.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Polling instead of a blocking call keeps Ctrl-C working on every platform.
        end = time.monotonic() + seconds
        while not _try_lock(handle):
            if time.monotonic() > end:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), str(path))
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(handle)


if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> bool:
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
