"""Model files that the engine maps without reading them, for weights that others bring.

The engine's loader maps whole files and has the system read them at once (MAP_POPULATE), also where
nothing on this machine will ever look at them. So it is given stand-ins: files in memory that have
the header and the size of the real ones. Before it maps them they are cut off behind the header, so
that there is nothing to be read; afterwards the real files are put in place of the mappings, and
are read where somebody looks. Needs Linux (memfd_create, /proc).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from caravan.errors import ModelError

# Linux's number on all of its machines; Python's mmap has no name for it.
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def available() -> bool:
    """Whether this system has what it takes."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class _Part:
    """One file: the real one and its stand-in.

    Attributes:
        real, stand_in: descriptors.
        header, size: bytes of the header and of the whole.
    """

    def __init__(self, path: Path, header: int) -> None:
        self.header = header
        self.real = self.stand_in = -1
        try:
            start = self._open(path)
            self.stand_in = os.memfd_create("caravan-model", os.MFD_CLOEXEC)
            rest = memoryview(start)
            while rest:
                rest = rest[os.write(self.stand_in, rest) :]
            os.ftruncate(self.stand_in, self.size)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> bytes:
        """Open the real file; its header."""
        try:
            self.real = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self.real).st_size
            # what is looked at is most often looked at from end to end
            os.posix_fadvise(self.real, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            data = os.pread(self.real, self.header, 0)
        except OSError as exc:
            raise ModelError(f"cannot read {path}: {exc.strerror or exc}") from exc
        if len(data) < self.header:
            raise ModelError(f"{path} is cut off: it ends in its header")
        return data

    def close(self) -> None:
        for fd in (self.real, self.stand_in):
            if fd >= 0:
                os.close(fd)
        self.real = self.stand_in = -1


class Skeleton:
    """The files of one model, for one load. Use it as a context manager around that.

    Args:
        files: path of each file, and how many bytes come before its data.

    Attributes:
        laid: whether the engine has its mappings, and they show the real files.

    Raises ModelError for a file that cannot be read, and OSError where there can be no stand-in.
    """

    def __init__(self, files: Sequence[tuple[Path, int]]) -> None:
        self.laid = False
        self._parts: list[_Part] = []
        try:
            for path, header in files:
                self._parts.append(_Part(path, header))
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[bytes]:
        """What the engine is to open."""
        return [b"/proc/self/fd/%d" % part.stand_in for part in self._parts]

    def __enter__(self) -> Skeleton:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """The mappings stay, and belong to the engine."""
        for part in self._parts:
            part.close()
        self._parts.clear()

    def cut(self) -> None:
        """To be called when the engine has read headers and sizes and has not mapped anything."""
        for part in self._parts:
            os.ftruncate(part.stand_in, part.header)

    def lay(self) -> bool:
        """Let the engine's mappings show the real files, before it looks at any data.

        False if it has none; then it must not go on with these files.
        """
        if not self.laid:
            found = _mappings()
            places = [found.get(os.fstat(part.stand_in).st_ino) for part in self._parts]
            if None in places:
                return False
            for part, place in zip(self._parts, places, strict=True):
                assert place is not None
                _map_over(place, part)
            self.laid = True
        return True


def _mappings() -> dict[int, tuple[int, int]]:
    """Start and end of this process's mappings of our stand-ins, by their inodes.

    Advice about a range of one makes several of it, which lie side by side.
    """
    found: dict[int, tuple[int, int]] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if "/memfd:caravan-model" not in line:
                continue
            addresses, _rights, _offset, _device, inode, _name = line.split(maxsplit=5)
            start, _, end = addresses.partition("-")
            first, _ = found.get(int(inode), (int(start, 16), 0))
            found[int(inode)] = (first, int(end, 16))
    return found


def _map_over(place: tuple[int, int], part: _Part) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    function = libc.mmap
    function.restype = ctypes.c_void_p
    function.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    )
    start, end = place
    if end - start < part.size:
        raise ModelError("the engine maps only a part of the model")
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if function(start, part.size, mmap.PROT_READ, flags, part.real, 0) == _FAILED:
        raise ModelError(f"cannot map the model: {os.strerror(ctypes.get_errno())}")
