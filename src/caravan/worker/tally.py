"""What all session processes of a worker hold of its devices' memory, where there is a limit on it.

A small file without a name, handed to every session process by descriptor. Each writes what it
holds into a row of its own and adds up all of them; the supervisor clears the row of one that has
ended, however it did. Both ends are here; loads neither engine nor NumPy.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from caravan.worker.devices import MAX_DEVICES

_ROW = struct.Struct(f"={MAX_DEVICES}Q")


class Tally:
    """The supervisor's end: makes the file, and gives each session process a row.

    Raises OSError where no file can be made.
    """

    def __init__(self) -> None:
        self.fd = _nameless()
        self._taken: set[int] = set()

    def take(self) -> int:
        """A row that nobody has, all zeros."""
        row = next(i for i in range(len(self._taken) + 1) if i not in self._taken)
        self._taken.add(row)
        self.clear(row)
        return row

    def clear(self, row: int) -> None:
        """Its process has ended: it holds nothing."""
        os.pwrite(self.fd, bytes(_ROW.size), row * _ROW.size)

    def give_back(self, row: int) -> None:
        """Its process is gone for good: another may have the row."""
        self.clear(row)
        self._taken.discard(row)

    def close(self) -> None:
        os.close(self.fd)


class Row:
    """A session process's end: what it holds of each device, and what all hold together."""

    def __init__(self, fd: int, row: int) -> None:
        self._fd = fd
        self._at = row * _ROW.size
        self._lock = threading.Lock()
        self._own = [0] * MAX_DEVICES

    def held(self, device: int) -> int:
        """Bytes that all sessions hold of a device."""
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        whole = len(data) // _ROW.size * _ROW.size
        return sum(row[device] for row in _ROW.iter_unpack(data[:whole]))

    def take(self, device: int, size: int, limit: int) -> bool:
        """Hold so much more, unless all together would then hold more than the limit."""
        with self._alone():
            if size > limit - self.held(device):
                return False
            self._own[device] += size
            self._write()
            return True

    def give_back(self, device: int, size: int) -> None:
        """Hold so much less."""
        with self._lock:
            self._own[device] -= size
            self._write()

    def _write(self) -> None:
        os.pwrite(self._fd, _ROW.pack(*self._own), self._at)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else adds up meanwhile: no other thread, and no other process."""
        with self._lock:
            # of all locks on files these belong to the process, not to the descriptor that all
            # share, and end with it
            fcntl.lockf(self._fd, fcntl.LOCK_EX, 1)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)


def _nameless() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("caravan memory limits")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
