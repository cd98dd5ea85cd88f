"""`Ledger`: the tensors of one GGUF file, with the digests of their content as far as known.

A digest is computed once for a file: a sidecar in the cache keeps it until the file's size, mtime,
inode or ctime is another. Whoever loads opens a ledger, asks for digests, notes those it had to
compute, and saves. Nothing here reads a weight.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple

from caravan.errors import ModelError
from caravan.models import sidecar
from caravan.models.cache import digests_dir
from caravan.models.digest import DIGEST_SIZE
from caravan.models.sidecar import Content, Stamp
from caravan.models.tensors import Header, Span, check_whole, open_gguf, parse_header


def known_header(path: Path, directory: Path | None = None) -> Header:
    """`read_header`, without reading it if a sidecar knows the file as it is. Raises ModelError."""
    return _look(path, directory).content.header


class Ledger:
    """The tensors of one GGUF file, with the digests of their content as far as they are known.

    Attributes:
        path: the file, as it was given.
        header: what it says.
        tensors: where each one's data lie in it.
    """

    def __init__(self, path: Path, found: _Found) -> None:
        """Use `open`."""
        self.path = path
        # who loads may be told to work elsewhere meanwhile
        self._absolute = path.absolute()
        self.header = found.content.header
        self.tensors: dict[str, Span] = self.header.tensors
        self._digests = found.content.digests
        self._found = found
        self._lock = threading.Lock()

    @staticmethod
    def open(path: Path, directory: Path | None = None) -> Ledger:
        """The ledger of a GGUF file; its header is read unless a sidecar in `directory`
        (`digests_dir()`) knows the file as it is.

        Raises ModelError: it cannot be read, is no GGUF file, is damaged or is cut off.
        """
        found = _look(path, directory)
        check_whole(found.content.header, found.stamp.size, path)
        return Ledger(path, found)

    def __repr__(self) -> str:
        return f"<Ledger {self.path.name}: {len(self._digests)} of {len(self.tensors)} digests>"

    def digest(self, name: str) -> bytes | None:
        """The digest of a tensor's content, 32 bytes; None if it is not known yet."""
        return self._digests.get(name)

    def note(self, name: str, digest: bytes) -> None:
        """Remember a digest; any thread may. Raises ModelError for a tensor that is not here."""
        if name not in self.tensors or len(digest) != DIGEST_SIZE:
            raise ModelError(f"{self.path}: no digest of {name!r} has {len(digest)} bytes")
        with self._lock:
            self._digests[name] = digest

    def current(self) -> bool:
        """Whether the path still leads to the file that was opened, unchanged."""
        try:
            status = os.stat(self._absolute)
        except OSError:
            return False
        return _state(status) == self._found.state

    def save(self) -> bool:
        """Write the sidecar, whole or not at all, with what other processes saved since `open`.

        False, never an error, where it cannot be written, or if the file is no longer the one that
        was opened: nobody could say what the digests are of.
        """
        if not self.current():
            return False
        with self._lock:
            content = Content(self.header, dict(self._digests))
        return sidecar.write(self._found.kept, self._found.stamp, content)


class _Found(NamedTuple):
    """A file, as it was when somebody looked.

    Attributes:
        kept: where its sidecar is, or would be.
        state: what changes with the file; the device is not kept, since it may be another one
            after a reboot.
    """

    kept: Path
    stamp: Stamp
    state: tuple[int, ...]
    content: Content


def _look(path: Path, directory: Path | None) -> _Found:
    with open_gguf(path) as file:
        status = os.fstat(file.fileno())
        real = os.path.realpath(path)
        stamp = Stamp(real, status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)
        kept = sidecar.sidecar_path(directory or digests_dir(), real)
        content = sidecar.read(kept, stamp)
        if content is None:
            content = Content(parse_header(file.fileno(), path), {})
    return _Found(kept, stamp, _state(status), content)


def _state(status: os.stat_result) -> tuple[int, ...]:
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return (status.st_size, *times, status.st_ino, status.st_dev)
