"""GNU OpenMP for machines that lack it: the engine's wheel needs libgomp.so.1 but has none inside.

Called by the loader, and only after the system's own copy was not found. Fetches one pinned wheel
of the package index that carries the library, and gives the copy the name the engine looks for.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import tempfile
from pathlib import Path

from caravan.errors import DownloadError, EngineNotFound
from caravan.models.cache import cache_dir
from caravan.models.catalog import WheelFile
from caravan.models.fetch import fetch

SONAME = "libgomp.so.1"
_INSTALL = f"install {SONAME} (Debian, Ubuntu: apt install libgomp1)"
_LACKS = f"the engine needs {SONAME}, which this machine lacks"

# GPL 3 with the GCC runtime exception; it reaches the user from the index, not from us.
_LIBGOMP = WheelFile(
    name="libgomp",
    requirement="finufft==2.5.1",
    wheel="finufft-2.5.1-py3-none-manylinux_2_28_x86_64.whl",
    wheel_size=7_632_155,
    wheel_sha256="2cec94f1dfe45f77d92b9a4cd523445f4d51c10d0a74d3eaf3c90f17293693f0",
    member="finufft.libs/libgomp-24e2ab19.so.1.0.0",
    file_size=253_289,
    file_sha256="ec3543cb6fa11f34258fe3d59082e4bd9740a18349e097fc42a7bc692a21bf2c",
    licence="GPL 3 with GCC runtime exception",
    about="GNU OpenMP",
    instead=_INSTALL,
)

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_STRTAB, _DT_SONAME = 5, 14


def provide() -> Path:
    """Load a libgomp.so.1 of our own into this process, fetching it on first use.

    After it, loading a library that needs libgomp.so.1 succeeds. Raises EngineNotFound, saying what
    to install, when none can be had. May block for a small download.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise EngineNotFound(f"{_LACKS}; {_INSTALL}")
    directory = cache_dir() / "lib"
    ours = directory / SONAME
    try:
        if not ours.is_file():
            _tell("fetching libgomp.so.1, which this machine lacks (8 MB, once)")
            _put(rename_library(fetch(_LIBGOMP, directory).read_bytes(), SONAME), ours)
        # The dynamic loader compares names with what is loaded already, so global scope is enough.
        ctypes.CDLL(str(ours), mode=ctypes.RTLD_GLOBAL)
    except (DownloadError, OSError) as exc:
        raise EngineNotFound(f"{_LACKS}: {exc}") from exc
    return ours


def rename_library(image: bytes, name: str) -> bytes:
    """The same 64-bit little-endian ELF library under another, not longer, SONAME.

    Wheels carry libraries under names with a hash in them; the dynamic loader goes by that name.
    Raises ValueError if `image` is not such a library.
    """
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    segments = _segments(image)
    dynamic = _dynamic(image, segments)
    address = dynamic[_DT_STRTAB] + dynamic[_DT_SONAME]
    start = next(
        offset + address - base
        for kind, offset, base, size in segments
        if kind == _PT_LOAD and base <= address < base + size
    )
    room = image.index(b"\0", start) - start
    new = name.encode()
    if len(new) > room:
        raise ValueError(f"no room for the name {name}")
    return image[:start] + new.ljust(room, b"\0") + image[start + room :]


def _segments(image: bytes) -> list[tuple[int, int, int, int]]:
    """(type, file offset, address, size in the file) of each program header."""
    (table,) = struct.unpack_from("<Q", image, 32)
    entry, count = struct.unpack_from("<HH", image, 54)
    segments = []
    for index in range(count):
        at = table + entry * index
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", image, at)
        segments.append((kind, offset, address, size))
    return segments


def _dynamic(image: bytes, segments: list[tuple[int, int, int, int]]) -> dict[int, int]:
    for kind, offset, _, size in segments:
        if kind == _PT_DYNAMIC:
            pairs = dict(struct.iter_unpack("<QQ", image[offset : offset + size]))
            if _DT_STRTAB in pairs and _DT_SONAME in pairs:
                return pairs
    raise ValueError("the library has no name")


def _put(image: bytes, path: Path) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(image)
        # As any other file of the cache, which several users may share.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _tell(text: str) -> None:
    print(f"caravan: {text}", file=sys.stderr, flush=True)
