"""Model files with ledgers that need no header: for tests of what the worker looks for on disks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from caravan.errors import ModelError
from caravan.worker.library import Library


def digest_of(data: bytes) -> bytes:
    return blake3(data).digest()


class Place(NamedTuple):
    offset: int
    size: int


class FakeLedger:
    """Keeps what it was told in memory; `saved` counts."""

    def __init__(self, path: Path, tensors: dict[str, Place]) -> None:
        self.path = path
        self.tensors = tensors
        self.digests: dict[str, bytes] = {}
        self.saved = 0
        self._stamp = self._status()

    def digest(self, name: str) -> bytes | None:
        return self.digests.get(name)

    def note(self, name: str, digest: bytes) -> None:
        self.digests[name] = digest

    def current(self) -> bool:
        try:
            return self._status() == self._stamp
        except OSError:
            return False

    def save(self) -> bool:
        self.saved += 1
        return True

    def _status(self) -> tuple[int, int, int]:
        status = os.stat(self.path)
        return status.st_size, status.st_mtime_ns, status.st_ino


class Shelf:
    """A directory of models, and the library that looks into it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ledgers: dict[Path, FakeLedger] = {}
        self.opened: list[Path] = []
        self.library = Library([str(directory)], self._open)

    def add(self, file: str, **tensors: bytes) -> FakeLedger:
        """Put a model there, with so many bytes of header."""
        path = self.directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        data, places = bytearray(b"GGUF" * 8), {}
        for name, content in tensors.items():
            places[name] = Place(len(data), len(content))
            data += content
        path.write_bytes(data)
        self.ledgers[path] = FakeLedger(path, places)
        return self.ledgers[path]

    def _open(self, path: Path) -> FakeLedger:
        self.opened.append(path)
        if path not in self.ledgers:
            raise ModelError(f"{path} is no GGUF file")
        return self.ledgers[path]
