"""`Weights`: the weight cache for llama.cpp's heads: files named by the FNV-1a of their content.

Names and content are those of llama.cpp's rpc-server, so one directory serves both. Others read,
write and remove in it at any time; nothing that they do is an error here. Every file's content is
checked whenever it is used.
"""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

from caravan.transport.base import Buffer
from caravan.wire.fnv import BASIS, fnv1a_64
from caravan.worker.log import log
from caravan.worker.store import PIECE, Part, Store, open_regular


class Entry:
    """A file that may have the content asked for; `read_into` shows whether it has.

    Attributes:
        size: bytes.
    """

    def __init__(self, store: Store, path: Path, digest: int, file: FileIO, size: int) -> None:
        self._store = store
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
                piece = target[done : done + PIECE]
                got = self._file.readinto(piece)
                if not got:
                    return False
                state = fnv1a_64(piece[:got], state)
                done += got
        except OSError:
            return False
        if state == self._digest:
            self._store.touch(self._file)
            return True
        self._store.discard(self._path)
        return False


class Weights:
    """What the cache has for a session with a llama.cpp head."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._storing = True
        self._swept = False

    def find(self, digest: int, most: int) -> Entry | None:
        """The file for this hash, if there is a regular one of at most `most` bytes."""
        path = self._path(digest)
        file = open_regular(path)
        if file is None:
            return None
        size = os.fstat(file.fileno()).st_size
        if size > most:
            file.close()
            return None
        return Entry(self._store, path, digest, file, size)

    def store(self, data: Buffer) -> None:
        """Write the file of `data`, whole or not at all. A failure is logged and is the last one:
        nothing more is stored."""
        if not self._storing:
            return
        path = self._path(fnv1a_64(data))
        try:
            self._sweep_once()
            if not self._store.make_room(len(data)):
                return
            with Part(path) as part:
                part.write(data)
                part.commit()
        except OSError as exc:
            self._storing = False
            log(f"cannot save to '{path}': {exc.strerror or exc}; this session saves no more")
            return
        log(f"saved to '{path}'")

    def _path(self, digest: int) -> Path:
        return self._store.directory / f"{digest:016x}"

    def _sweep_once(self) -> None:
        if not self._swept:
            self._swept = True
            self._store.sweep()
