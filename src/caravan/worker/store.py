"""`Store`: the files of the weight cache: found, written, looked at, evicted.

A file's name is the hash of its content: below `tensors` BLAKE3's, for Caravan's heads; beside it
FNV-1a's, for llama.cpp's (`weights` writes those). Worker sessions and `caravan cache` use it,
several at a time, and others may remove files: nothing that they do is an error. Loads no engine,
and NumPy only to verify a file of llama.cpp's.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from blake3 import blake3

from caravan.transport.base import Buffer
from caravan.worker.log import log

# Read so much, then hash it while the processor's cache still has it.
PIECE = 1 << 20
_TENSORS = "tensors"
_PART = ".part"
# A part that nobody has written to for so long is one of a process that was killed.
_STALE_SECONDS = 3600.0
# Others fill the same directory: after so much of the bound, see what they have put there.
_LOOK_AGAIN = 16
_FNV = re.compile(r"[0-9a-f]{16}")
_FOLDER = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the cache.

    Attributes:
        digest: its name, in hexadecimal: 64 digits (BLAKE3), or 16 (FNV-1a, of a llama.cpp head).
        size: bytes.
        mtime: when it was last used, as a POSIX time.
    """

    digest: str
    size: int
    mtime: float
    path: Path


class Store:
    """The cache in one directory.

    Args:
        directory: need not exist, unless something is stored.
        limit: bytes that storing may bring it to; None: any number.
    """

    def __init__(self, directory: Path | str, limit: int | None = None) -> None:
        self.directory = Path(directory)
        self.limit = limit
        self._lock = threading.Lock()
        self._held = 0  # as of the last look, and what was stored since
        self._until = -1  # the next look is due when so much is held
        self._holds: dict[int, set[str]] = {}

    def __repr__(self) -> str:
        return f"<Store {self.directory}, limit {self.limit}>"

    # what there is

    def entries(self) -> list[Entry]:
        """All files that are entries by name and kind, the least recently used first."""
        found = list(self._scan())
        found.sort(key=lambda entry: (entry.mtime, entry.digest))
        return found

    def path(self, digest: str) -> Path:
        """Where the content with this BLAKE3 digest belongs."""
        return self.directory / _TENSORS / digest[:2] / digest

    def find(self, digest: str, size: int) -> FileIO | None:
        """The file with this BLAKE3 digest in its name, open; its content is still to be checked.

        One of another size is removed if it is damaged; whoever asks may also be wrong.
        """
        path = self.path(digest)
        file = open_regular(path)
        if file is None:
            return None
        if os.fstat(file.fileno()).st_size == size:
            return file
        with file:
            sound = _is_sound(file, digest)
        if not sound:
            self.discard(path)
        return None

    def verify(self, entry: Entry) -> bool:
        """Whether the content is what the name says. Raises OSError if it cannot be read."""
        with entry.path.open("rb", buffering=0) as file:
            return _hash_of(file, entry.digest) == entry.digest

    # what comes and goes

    def touch(self, file: FileIO) -> None:
        """It has been used: it is the last to be evicted."""
        with contextlib.suppress(OSError):
            os.utime(file.fileno())

    def remove(self, entry: Entry) -> None:
        """Raises OSError if it is there and cannot be removed."""
        entry.path.unlink(missing_ok=True)

    def discard(self, path: Path) -> None:
        """Remove a damaged file, and say so."""
        try:
            path.unlink()
            log(f"removed '{path}': its content is not what its name says")
        except FileNotFoundError:
            pass
        except OSError as exc:
            log(f"'{path}' is damaged and cannot be removed: {exc.strerror or exc}")

    def has(self, digest: str, size: int) -> bool:
        """Whether there is such a file, of that size; if so it counts as used."""
        file = self.find(digest, size)
        if file is None:
            return False
        with file:
            self.touch(file)
        return True

    def begin(self, digest: str, size: int) -> Part | None:
        """A new file for content with this BLAKE3 digest; None if it would pass the bound.

        Raises OSError if it cannot be made.
        """
        if not self.make_room(size):
            return None
        return Part(self.path(digest))

    def hold(self, digest: str, owner: int) -> None:
        """Do not evict this one, until its owner lets go.

        Of a model bigger than the bound the part that was stored first stays: if it went for the
        sake of the rest, the next load would find nothing of what it asks for first.
        """
        with self._lock:
            self._holds.setdefault(owner, set()).add(digest)

    def let_go(self, owner: int) -> None:
        """All that it holds may be evicted again."""
        with self._lock:
            self._holds.pop(owner, None)

    def make_room(self, size: int) -> bool:
        """Evict what was used least recently, for `size` more bytes; False if they do not fit."""
        limit = self.limit
        if limit is None:
            return True
        with self._lock:
            if self._held + size > self._until:
                self._held = self._evict(limit - size)
                self._until = min(limit, self._held + limit // _LOOK_AGAIN)
            if self._held + size > limit:
                return False
            self._held += size
            return True

    def sweep(self) -> None:
        """Remove what killed processes have left unfinished."""
        old = time.time() - _STALE_SECONDS
        for folder in (self.directory, *self._folders()):
            for file in _files(folder):
                if file.name.endswith(_PART):
                    with contextlib.suppress(OSError):
                        if file.stat(follow_symlinks=False).st_mtime < old:
                            os.unlink(file.path)

    def _evict(self, most: int) -> int:
        """Bytes that are left: `most`, or all if those in use do not allow that."""
        entries = self.entries()
        held = sum(entry.size for entry in entries)
        held_fast = set().union(*self._holds.values())
        idle = [entry for entry in entries if entry.digest not in held_fast]
        if held - sum(entry.size for entry in idle) > most:
            return held
        for entry in idle:
            if held <= most:
                break
            with contextlib.suppress(OSError):
                entry.path.unlink()
                held -= entry.size
        return held

    def _scan(self) -> Iterator[Entry]:
        yield from _entries(self.directory, _FNV)
        for folder in self._folders():
            yield from _entries(folder, re.compile(folder.name + "[0-9a-f]{62}"))

    def _folders(self) -> list[Path]:
        folder = self.directory / _TENSORS
        try:
            return [folder / name for name in os.listdir(folder) if _FOLDER.fullmatch(name)]
        except OSError:
            return []


class Part:
    """A file that is being written; it appears under its name with `commit`, or never.

    A context manager, which drops what was not committed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = f"{path}.{secrets.token_hex(8)}{_PART}"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._part, "xb", buffering=0)  # noqa: SIM115
        self._over = False

    def __enter__(self) -> Part:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, data: Buffer) -> None:
        """Raises OSError."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def commit(self) -> None:
        """Raises OSError. No fsync: whoever reads the file checks its content."""
        self._file.close()
        # whoever has removed it meanwhile has removed it
        with contextlib.suppress(FileNotFoundError):
            os.replace(self._part, self._path)
        self._over = True

    def close(self) -> None:
        """What was not committed is dropped. Idempotent."""
        self.abandon()
        self._file.close()

    def abandon(self) -> None:
        """It is not to appear. Any thread may call it, also while another one writes."""
        if not self._over:
            self._over = True
            with contextlib.suppress(OSError):
                os.unlink(self._part)


def default_limit(directory: Path) -> int:
    """A bound for a cache: half of what is free on its disk and all that it holds already."""
    held = sum(entry.size for entry in Store(directory).entries())
    return held + shutil.disk_usage(directory).free // 2


def open_regular(path: Path, follow: bool = False) -> FileIO | None:
    """Open a regular file, or what a link leads to with `follow`; None for anything else."""
    try:
        file = open(path, "rb", buffering=0, opener=_follow if follow else _open)  # noqa: SIM115
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    return None


def _open(path: str, flags: int) -> int:
    # in a directory that others write to a link could lead anywhere
    return _follow(path, flags | os.O_NOFOLLOW)


def _follow(path: str, flags: int) -> int:
    # opening a pipe would wait for its other end
    return os.open(path, flags | os.O_NONBLOCK)


def _files(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _entries(folder: Path, digest: re.Pattern[str]) -> Iterator[Entry]:
    for file in _files(folder):
        if digest.fullmatch(file.name):
            try:
                found = file.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield Entry(file.name, found.st_size, found.st_mtime, Path(file.path))


def _is_sound(file: FileIO, digest: str) -> bool:
    try:
        return _hash_of(file, digest) == digest
    except OSError:
        return False


def _hash_of(file: FileIO, digest: str) -> str:
    """The hash of a file by the function of `digest`, in hexadecimal."""
    buffer = memoryview(bytearray(PIECE))
    if len(digest) == 64:
        hasher = blake3()
        while got := file.readinto(buffer):
            hasher.update(buffer[:got])
        return hasher.hexdigest()
    from caravan.wire.fnv import BASIS, fnv1a_64

    state = BASIS
    while got := file.readinto(buffer):
        state = fnv1a_64(buffer[:got], state)
    return f"{state:016x}"
