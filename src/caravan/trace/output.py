"""`OutputFile`: a file that is there whole, or as it was before."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from caravan.errors import CaravanError, UsageError


class OutputFile:
    """A text file to be written at the end; whether it can be is found out at once.

    Raises UsageError where it cannot.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        # a link stays a link; what is no file, such as a pipe, is written to and not replaced
        self._target = Path(os.path.realpath(path))
        self._in_place = self._target.exists() and not self._target.is_file()
        self._part = self._target.with_name(f".{self._target.name}.{os.getpid()}.part")
        try:
            self._check()
        except OSError as exc:
            raise UsageError(f"cannot write {self.path}: {exc.strerror}") from exc

    def _check(self) -> None:
        if self._target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if self._target.exists() and not os.access(self._target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not self._in_place:
            with open(self._part, "w"):
                pass
            # who is killed before the end leaves nothing
            self._part.unlink()

    def write(self, put: Callable[[TextIO], None]) -> None:
        """Write what `put` writes; raises CaravanError when it does not fit there any more."""
        try:
            with open(self._target if self._in_place else self._part, "w", encoding="utf-8") as out:
                put(out)
            if not self._in_place:
                os.replace(self._part, self._target)
        except OSError as exc:
            raise CaravanError(f"cannot write {self.path}: {exc.strerror}") from exc

    def close(self) -> None:
        """Leave nothing behind but what was written. Idempotent."""
        if not self._in_place:
            with contextlib.suppress(OSError):
                self._part.unlink()
