"""The file in the cache that keeps what is known of a model file: its header, and digests.

Written and read by `ledger` alone. One line with a checksum, then JSON; what does not agree with
its checksum, or speaks of another file or an earlier state of it, counts as absent. Nothing in it
is believed without a look at its type and range.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from caravan.models.digest import DIGEST_SIZE, digest_of_bytes
from caravan.models.lock import locked
from caravan.models.tensors import Header, Span

_MARK = b"caravan digests 3 "
_MOST = 256 << 20
_WAIT_SECONDS = 5.0


class Stamp(NamedTuple):
    """Which file is meant, and in what state; the path is the real one.

    The ctime is there because copies and images may keep mtimes: what nobody can set tells that
    another file has come to the same place.
    """

    path: str
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int


class Content(NamedTuple):
    """What is known of a file; the digests of some tensors may be missing."""

    header: Header
    digests: dict[str, bytes]


# the fields of a header beside its tensors, and whether they may be missing
_FIELDS: dict[str, tuple[type, bool]] = {
    "architecture": (str, True),
    "layers": (int, True),
    "context": (int, True),
    "split": (int, False),
    "splits": (int, False),
    "split_tensors": (int, True),
    "start": (int, False),
    "end": (int, False),
}


def sidecar_path(directory: Path, real_path: str) -> Path:
    """Where the sidecar of a file is kept."""
    return directory / f"{digest_of_bytes(os.fsencode(real_path)).hex()[:32]}.digests"


def sidecars(directory: Path) -> list[Path]:
    """All that are kept in a directory, which need not exist."""
    try:
        return sorted(path for path in directory.iterdir() if path.suffix == ".digests")
    except OSError:
        return []


def read(path: Path, stamp: Stamp) -> Content | None:
    """What the sidecar says of the file in just that state; None if it says nothing sound."""
    try:
        with open(path, "rb", opener=_open) as file:
            data = file.read(_MOST)
    except OSError:
        return None
    head, _, body = data.partition(b"\n")
    if head != _MARK + digest_of_bytes(body).hex().encode():
        return None
    try:
        # a checksum keeps accidents out, not whoever can compute one
        return _content(json.loads(body), stamp)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _open(path: str, flags: int) -> int:
    # opening a pipe would wait for its other end
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def write(path: Path, stamp: Stamp, content: Content) -> bool:
    """Put the sidecar into its place at once, with the digests that another process put there
    meanwhile. False, and no error, where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.parent):
            other = read(path, stamp)
            if other is not None and other.header == content.header:
                content = Content(content.header, other.digests | content.digests)
            part = path.with_suffix(".part")
            try:
                part.write_bytes(_encode(stamp, content))
                os.replace(part, path)
            except OSError:
                # a full disk, most of the time: what is there of it only makes it fuller
                part.unlink(missing_ok=True)
                raise
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _alone(directory: Path) -> Any:
    """The lock of the directory, where there can be one. Without it the last one to write wins, and
    what the others found out is computed again; a mixture of two is no sound sidecar."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(locked(directory / ".lock", _WAIT_SECONDS))
        yield


def _encode(stamp: Stamp, content: Content) -> bytes:
    nothing = b""
    tensors = {
        name: [*span, content.digests.get(name, nothing).hex()]
        for name, span in content.header.tensors.items()
    }
    fields = {name: getattr(content.header, name) for name in _FIELDS}
    data = {**stamp._asdict(), **fields, "tensors": tensors}
    body = json.dumps(data, separators=(",", ":")).encode()
    return _MARK + digest_of_bytes(body).hex().encode() + b"\n" + body


def _content(data: Any, stamp: Stamp) -> Content | None:
    found = tuple(data[field] for field in Stamp._fields)
    if found != stamp or [type(value) for value in found] != [str, int, int, int, int]:
        return None
    fields = {name: data[name] for name in _FIELDS}
    for name, (kind, optional) in _FIELDS.items():
        if type(fields[name]) is not kind and not (optional and fields[name] is None):
            return None
    tensors: dict[str, Span] = {}
    digests: dict[str, bytes] = {}
    for name, (offset, size, text) in data["tensors"].items():
        if type(offset) is not int or type(size) is not int:
            return None
        if size < 0 or not 0 <= fields["start"] <= offset <= fields["end"] - size:
            return None
        tensors[name] = Span(offset, size)
        if text:
            digests[name] = digest = bytes.fromhex(text)
            if len(digest) != DIGEST_SIZE:
                return None
    return Content(Header(tensors=tensors, **fields), digests)
