"""`Loader`: answers LOAD: fills tensors with weights that this machine has itself.

Content decides: a place is only where to look, and what is read is hashed. Its few threads belong
to the session and serve all its devices, at no device's turn.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO

from caravan.errors import RemoteError
from caravan.trace.spans import Kind
from caravan.wire.commands import EXT, LOAD_ENTRY, Ext
from caravan.wire.extension import ADDRESS_SHIFT, MAX_LOAD, Source, Status
from caravan.worker.intake import Gone, digest_of, take_in
from caravan.worker.lane import Lane
from caravan.worker.library import Copy, Library
from caravan.worker.log import log
from caravan.worker.store import Store, open_regular

_MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class Wish:
    """A tensor that a head wants filled: where it lies, and what is to be there."""

    address: int
    size: int
    digest: bytes
    name: str


def wishes(lane: Lane, payload: bytes) -> list[Wish]:
    """The entries of a LOAD, checked; raises RemoteError."""
    head = EXT[Ext.LOAD].request
    (count,) = head.unpack_from(payload)
    if count > MAX_LOAD or len(payload) != head.size + count * LOAD_ENTRY.size:
        raise RemoteError(
            Status.BAD_REQUEST, f"LOAD of {count} entries cannot have {len(payload)} bytes"
        )
    found = []
    for address, size, digest, name in LOAD_ENTRY.unpack_many(payload[head.size :]):
        lane.locate(address, size)
        found.append(Wish(address, size, digest, _text(name)))
    return found


def _text(name: bytes) -> str:
    try:
        text = name.rstrip(b"\0").decode()
    except UnicodeDecodeError as exc:
        raise RemoteError(Status.BAD_REQUEST, f"the name {name!r} is no text") from exc
    if not text.isprintable():
        raise RemoteError(Status.BAD_REQUEST, f"the name {text!r} is no text")
    return text


class Loader:
    """See the module.

    Args:
        library: the model directories, if the worker has any.
        store: the weight cache, if it is on.
    """

    def __init__(self, library: Library | None, store: Store | None) -> None:
        self._library = library
        self._store = store
        self._threads = ThreadPoolExecutor(
            min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="loader"
        )
        self._lock = threading.Lock()
        self._open = 0

    def load(self, lane: Lane, entries: Sequence[Wish], answer: Callable[[bytes], None]) -> None:
        """Fill what can be filled; `answer` is called with a `Source` each when all are known."""
        request = _Request(len(entries), answer)
        with self._lock:
            self._open += len(entries)
        for number, wish in enumerate(entries):
            self._threads.submit(self._fill, lane, wish, request, number)
        if not entries:
            answer(b"")

    def close(self) -> None:
        """Start nothing more, and wait for what is being read."""
        self._threads.shutdown(cancel_futures=True)

    def _fill(self, lane: Lane, wish: Wish, request: _Request, number: int) -> None:
        """On a thread of the pool; never raises."""
        source = Source.NONE
        try:
            with lane.spans.during(Kind.LOAD) as span:
                source = self._source(lane, wish)
                if source:
                    span.size = wish.size
                    lane.counters.bytes_loaded += wish.size
        except (RemoteError, Gone):
            # its buffer is gone, and with it the wish
            pass
        except Exception as exc:
            log(f"internal error while {wish.name} was loaded: {type(exc).__name__}: {exc}")
        self._one_less()
        request.known(number, source)

    def _one_less(self) -> None:
        with self._lock:
            self._open -= 1
            idle = not self._open
        if idle and self._library is not None:
            self._library.save()

    def _source(self, lane: Lane, wish: Wish) -> Source:
        if self._library is not None:
            for copy in self._library.copies(wish.name, wish.size, wish.digest):
                if self._from_copy(lane, wish, copy):
                    return Source.DISK
        if self._store is not None and self._from_cache(lane, wish, self._store):
            return Source.CACHE
        return Source.NONE

    def _from_copy(self, lane: Lane, wish: Wish, copy: Copy) -> bool:
        file = open_regular(copy.path, follow=True)
        found = None
        if file is not None:
            with file:
                found = _take_in(lane, wish, file, copy.offset, expected=copy.known)
        copy.found(found, wish.digest)
        return found == wish.digest

    def _from_cache(self, lane: Lane, wish: Wish, store: Store) -> bool:
        digest = wish.digest.hex()
        file = store.find(digest, wish.size)
        if file is None:
            return False
        with file:
            found = _take_in(lane, wish, file, 0, expected=True)
            if found == wish.digest:
                store.touch(file)
                store.hold(digest, wish.address >> ADDRESS_SHIFT)
                return True
        if found is not None:
            store.discard(store.path(digest))
        return False


def _take_in(lane: Lane, wish: Wish, file: FileIO, offset: int, *, expected: bool) -> bytes | None:
    """The digest of what the file has; what is `expected` to be right is read at once.

    Whatever else is found will be noted of the file, or the file removed, and other heads live with
    that: it must not be what this head has written to the same memory meanwhile. And the names of
    tensors are known to everybody, so nothing gets where this head can see it by its name alone.
    """
    place = (lane, wish.address, wish.size, file.fileno(), offset)
    if expected:
        found = take_in(*place)
        if found is None or found == wish.digest:
            return found
    found = digest_of(*place)
    if found == wish.digest and take_in(*place) != found:
        # the file changes, or this head writes to the same memory
        return None
    return found


class _Request:
    """A LOAD whose tensors are being looked for."""

    def __init__(self, count: int, answer: Callable[[bytes], None]) -> None:
        self._sources = bytearray(count)
        self._left = count
        self._answer = answer
        self._lock = threading.Lock()

    def known(self, number: int, source: Source) -> None:
        with self._lock:
            self._sources[number] = source
            self._left -= 1
            over = not self._left
        if over:
            self._answer(bytes(self._sources))
