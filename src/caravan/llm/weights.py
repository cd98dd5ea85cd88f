"""`WeightFiles`: the files of one model, open, and where each of its tensors lies in them.

Called by `loading`. Reads ranges of files and keeps digests; knows nothing of devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from caravan.errors import ModelError
from caravan.models.digest import digest_of
from caravan.models.ledger import Ledger
from caravan.models.tensors import Span


class Place(NamedTuple):
    """Where a tensor is: the number of its file, and where in it."""

    file: int
    span: Span


class WeightFiles:
    """See the module; close it.

    Args:
        paths: of all parts of the model, in order.

    Attributes:
        paths: as given.
        size: bytes of all tensors.

    Raises ModelError for a file that is none, or is cut off.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._ledgers: list[Ledger] = []
        self._files: list[int] = []
        self._places: dict[str, Place] = {}
        self._noted = False
        try:
            for path in self.paths:
                self._open(path)
        except BaseException:
            self.close()
            raise
        self.size = sum(place.span.size for place in self._places.values())

    def _open(self, path: Path) -> None:
        ledger = Ledger.open(path)
        number = len(self._files)
        try:
            self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as exc:
            raise ModelError(f"cannot read {path}: {exc.strerror or exc}") from exc
        self._ledgers.append(ledger)
        for name, span in ledger.tensors.items():
            self._places[name] = Place(number, span)

    def __repr__(self) -> str:
        return f"<WeightFiles {self.paths[0].name}: {len(self._places)} tensors>"

    def headers(self) -> list[tuple[Path, int]]:
        """Each path, and how many bytes of it come before the data."""
        starts = (ledger.header.start for ledger in self._ledgers)
        return list(zip(self.paths, starts, strict=True))

    def names(self) -> list[str]:
        return list(self._places)

    def find(self, name: str) -> Place | None:
        return self._places.get(name)

    def digest(self, name: str) -> bytes | None:
        """As far as it is known without reading."""
        return self._ledgers[self._places[name].file].digest(name)

    def read_digest(self, name: str, stop: Callable[[], bool]) -> bytes | None:
        """Read the tensor and remember its digest; None once `stop` says so.

        Raises ModelError when the file cannot be read.
        """
        number, span = self._places[name]
        digest = digest_of(self._files[number], span, stop=stop)
        if digest is not None:
            self._ledgers[number].note(name, digest)
            self._noted = True
        elif not stop():
            raise ModelError(f"{self.paths[number]} became shorter while it was loaded")
        return digest

    def read_into(self, file: int, offset: int, target: memoryview) -> None:
        """Fill `target` from a place in a file. Raises ModelError."""
        done = 0
        while done < len(target):
            try:
                got = os.preadv(self._files[file], [target[done:]], offset + done)
            except OSError as exc:
                why = exc.strerror or exc
                raise ModelError(f"cannot read {self.paths[file]}: {why}") from exc
            if not got:
                raise ModelError(f"{self.paths[file]} became shorter while it was loaded")
            done += got

    def fetch(self, names: Sequence[str]) -> None:
        """Have the system read those of these tensors that are used as a whole in every step: the
        blocks'. Others are looked up a row at a time."""
        for name in names:
            if name.startswith("blk.") and hasattr(os, "posix_fadvise"):
                number, span = self._places[name]
                os.posix_fadvise(self._files[number], *span, os.POSIX_FADV_WILLNEED)

    def check_unchanged(self) -> None:
        """Raises ModelError if somebody has written to a file since it was opened."""
        for path, ledger in zip(self.paths, self._ledgers, strict=True):
            if not ledger.current():
                raise ModelError(f"{path} was changed while it was loaded")

    def save(self) -> None:
        """Keep the digests that were read, for the next time."""
        if self._noted:
            for ledger in self._ledgers:
                ledger.save()

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())
