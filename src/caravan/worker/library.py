"""`Library`: the tensors in the GGUF files below the worker's model directories.

It names places where wanted content may lie: by digest where that is known, else by name and size.
What is found there is noted, so that it need not be read again to be known. Files that change,
break or vanish are no error: they are places where nothing is.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from caravan.errors import CaravanError
from caravan.worker.log import log

_SUFFIX = ".gguf"
# A file that was wrong so much more often than right is another model's: it is asked no more for
# content that it may have under the same name, or all files of a big directory would be read whole.
_WRONG = 4


class Place(Protocol):
    """Where a tensor lies in a file, as `caravan.models.ledger` has it."""

    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...


class Tensors(Protocol):
    """What is needed of a `caravan.models.ledger.Ledger`."""

    path: Path

    @property
    def tensors(self) -> Mapping[str, Place]: ...

    def digest(self, name: str) -> bytes | None: ...
    def note(self, name: str, digest: bytes) -> None: ...
    def current(self) -> bool: ...
    def save(self) -> bool: ...


class Shelved:
    """A file of the library.

    Attributes:
        places: its tensors; none once it has changed.
        right, wrong: how often it had what was looked for by name, and how often something else.
        noted: whether its ledger has learnt something since it was saved.
    """

    def __init__(self, ledger: Tensors) -> None:
        self.ledger = ledger
        self.places: Mapping[str, Place] = ledger.tensors
        self.right = 0
        self.wrong = 0
        self.noted = False


class Copy:
    """A tensor of a file that may be the wanted one.

    Attributes:
        known: whether its digest is the wanted one, as far as the ledger goes.
    """

    def __init__(self, shelved: Shelved, name: str, place: Place, known: bool) -> None:
        self._shelved = shelved
        self._name = name
        self.known = known
        self.path = shelved.ledger.path
        self.offset = place.offset

    def found(self, digest: bytes | None, wanted: bytes) -> None:
        """Say what was read there; None: it could not be read whole."""
        shelved = self._shelved
        if digest is None or not shelved.ledger.current():
            # whatever the ledger says, it is of another file
            shelved.places = {}
            return
        if not self.known:
            if digest == wanted:
                shelved.right += 1
            else:
                shelved.wrong += 1
        if shelved.ledger.digest(self._name) != digest:
            shelved.ledger.note(self._name, digest)
            shelved.noted = True


class Library:
    """See the module. Any thread may ask.

    Args:
        directories: searched to all depths, at the first question.
        read: opens the ledger of a file; raises CaravanError for one that is none.
        tell: given a line about each file that cannot be used.
    """

    def __init__(
        self,
        directories: Sequence[str],
        read: Callable[[Path], Tensors] | None = None,
        tell: Callable[[str], None] = log,
    ) -> None:
        self._directories = directories
        self._tell = tell
        self._read_ledger = read or _ledger
        self._lock = threading.Lock()
        self._files: list[Shelved] | None = None
        self._by_name: dict[tuple[str, int], list[Shelved]] = defaultdict(list)
        self._by_digest: dict[bytes, list[tuple[Shelved, str]]] = defaultdict(list)

    def copies(self, name: str, size: int, digest: bytes) -> Iterator[Copy]:
        """Where the content with this digest may be, the most likely place first."""
        self._index()
        tried = set()
        for shelved, other in list(self._by_digest.get(digest, ())):
            place = shelved.places.get(other)
            if place is not None and place.size == size and shelved.ledger.digest(other) == digest:
                tried.add((shelved, other))
                yield Copy(shelved, other, place, known=True)
        named = self._by_name.get((name, size), ())
        for shelved in sorted(named, key=lambda file: file.wrong - file.right):
            known = shelved.ledger.digest(name)
            place = shelved.places.get(name)
            if place is None or (shelved, name) in tried:
                continue
            if known == digest:
                yield Copy(shelved, name, place, known=True)
            elif known is None and shelved.wrong - shelved.right < _WRONG:
                yield Copy(shelved, name, place, known=False)

    def save(self) -> None:
        """Keep the digests that were found."""
        for shelved in self._files or ():
            if shelved.noted:
                shelved.noted = False
                shelved.ledger.save()

    def _index(self) -> None:
        with self._lock:
            if self._files is None:
                files = [self._shelve(path) for path in find_files(self._directories)]
                self._files = [shelved for shelved in files if shelved is not None]

    def _shelve(self, path: Path) -> Shelved | None:
        try:
            ledger = self._read_ledger(path)
        except (CaravanError, OSError) as exc:
            why = str(exc)
            self._tell(f"skipped: {why if str(path) in why else f'{path}: {why}'}")
            return None
        shelved = Shelved(ledger)
        # where nothing is known yet, the next session shall at least not read the header again
        shelved.noted = not any(map(ledger.digest, shelved.places))
        for name, place in shelved.places.items():
            self._by_name[name, place.size].append(shelved)
            digest = ledger.digest(name)
            if digest is not None:
                self._by_digest[digest].append((shelved, name))
        return shelved


def find_files(directories: Sequence[str]) -> list[Path]:
    """Every GGUF file below them, each once, however many names it has; links are followed."""
    found: dict[tuple[int, int], Path] = {}
    seen: set[tuple[int, int]] = set()
    for directory in directories:
        for folder, below, names in os.walk(directory, followlinks=True):
            here = _identity(folder, stat.S_ISDIR)
            if here is None or here in seen:
                # a link that leads back
                below.clear()
                continue
            seen.add(here)
            below.sort()
            for name in sorted(names):
                path = os.path.join(folder, name)
                identity = _identity(path, stat.S_ISREG) if name.endswith(_SUFFIX) else None
                if identity is not None:
                    found.setdefault(identity, Path(path))
    return list(found.values())


def _identity(path: str, is_kind: Callable[[int], bool]) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if is_kind(status.st_mode) else None


def _ledger(path: Path) -> Tensors:
    from caravan.models.ledger import Ledger

    return Ledger.open(path)
