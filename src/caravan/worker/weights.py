"""`Weights`: the weight cache: files of tensor data, named by the hash of their content.

Names and content are those of llama.cpp's rpc-server, so one directory serves both. Others read,
write and remove in it at any time; nothing that they do is an error here. Every file's content is
checked whenever it is used.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from io import FileIO

from caravan.transport.base import Buffer
from caravan.wire.fnv import BASIS, fnv1a_64
from caravan.worker.log import log

# Read so much, then hash it while the processor's cache still has it.
_PIECE = 1 << 20
_PART = ".part"
# A part that nobody has written to for so long is one of a process that was killed.
_STALE_SECONDS = 3600.0


class Entry:
    """A file that may have the content asked for; `read_into` shows whether it has.

    Attributes:
        size: bytes.
    """

    def __init__(self, path: str, digest: int, file: FileIO, size: int) -> None:
        self._path = path
        self._digest = digest
        self._file = file
        self.size = size

    def __enter__(self) -> Entry:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def read_into(self, target: memoryview) -> bool:
        """Fill `target` (`size` bytes); False, with anything in it, if it is not the content."""
        done, state = 0, BASIS
        try:
            while done < self.size:
                piece = target[done : done + _PIECE]
                got = self._file.readinto(piece)
                if not got:
                    return False
                state = fnv1a_64(piece[:got], state)
                done += got
        except OSError:
            return False
        if state == self._digest:
            return True
        self._remove()
        return False

    def _remove(self) -> None:
        try:
            os.unlink(self._path)
            log(f"removed '{self._path}': its content is not what its name says")
        except OSError as exc:
            log(f"'{self._path}' is damaged and cannot be removed: {exc.strerror or exc}")


class Weights:
    """The cache of one session.

    Args:
        directory: absolute; exists.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._storing = True
        self._sweep()

    def find(self, digest: int, most: int) -> Entry | None:
        """The file for this hash, if there is a regular one of at most `most` bytes."""
        path = self._path(digest)
        try:
            file = open(path, "rb", buffering=0, opener=_open)  # noqa: SIM115
        except OSError:
            return None
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            file.close()
            return None
        return Entry(path, digest, file, found.st_size)

    def store(self, data: Buffer) -> None:
        """Write the file of `data`, whole or not at all. A failure is logged and is the last one:
        nothing more is stored."""
        if not self._storing:
            return
        path = self._path(fnv1a_64(data))
        part = f"{path}.{secrets.token_hex(8)}{_PART}"
        try:
            try:
                _write(part, data)
                os.replace(part, path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise
        except OSError as exc:
            self._storing = False
            log(f"cannot save to '{path}': {exc.strerror or exc}; this session saves no more")
            return
        log(f"saved to '{path}'")

    def _path(self, digest: int) -> str:
        return os.path.join(self._directory, f"{digest:016x}")

    def _sweep(self) -> None:
        """Remove what killed processes have left."""
        old = time.time() - _STALE_SECONDS
        with contextlib.suppress(OSError), os.scandir(self._directory) as found:
            for entry in found:
                if entry.name.endswith(_PART):
                    with contextlib.suppress(OSError):
                        if entry.stat(follow_symlinks=False).st_mtime < old:
                            os.unlink(entry.path)


def _open(path: str, flags: int) -> int:
    # a link could lead anywhere, and opening a pipe would wait for its other end
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _write(path: str, data: Buffer) -> None:
    """A new file."""
    with open(path, "xb", buffering=0) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
