"""Where each tensor of a GGUF file lies: the header's directory, read without the engine.

Called by `ledger` and `splits`. The bytes are not trusted: whatever is wrong with them is a
ModelError, and no count in them makes this module allocate. It knows nothing of what the tensors
mean.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from caravan.errors import ModelError
from caravan.models.formats import TYPE_SIZES
from caravan.models.header import require_gguf

_PIECE = 1 << 20
# far above what models have; they bound the time and the memory that a hostile file can take
_MOST_HEADER = 256 << 20
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 18
_MOST_NAME = 1 << 16
_MOST_DIMS = 4
_MOST_ALIGNMENT = 1 << 20
_DEFAULT_ALIGNMENT = 32

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# by the number of the value's type
_SCALARS = {i: struct.Struct(f"<{letter}") for i, letter in enumerate("BbHhIif?")} | {
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_START = struct.Struct("<4sIQQ")
_LENGTH = struct.Struct("<Q")
_NUMBER = struct.Struct("<I")
_ELEMENTS = struct.Struct("<IQ")
_PLACE = struct.Struct("<IQ")


class Span(NamedTuple):
    """A range of bytes in a file: where it begins, from the file's start, and how long it is."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of one GGUF file says; None where it does not.

    Attributes:
        tensors: where each one's data lie, in the order of the file.
        architecture: such as `llama`.
        layers: of the whole model, without the output's (`<architecture>.block_count`).
        context: tokens that the model was made for (`<architecture>.context_length`).
        split, splits: the file is number `split`, from 0, of so many; 0 of 1 for a whole model.
        split_tensors: tensors in all of the splits.
        start: where the tensors' data begin; all that comes before is the header.
        end: the least size of the file with all of its data.
    """

    tensors: dict[str, Span]
    architecture: str | None
    layers: int | None
    context: int | None
    split: int
    splits: int
    split_tensors: int | None
    start: int
    end: int


def read_tensors(path: Path) -> dict[str, Span]:
    """Where each tensor's data lie in a GGUF file, all of them inside it.

    Raises ModelError: it cannot be read, is no GGUF file, is damaged or is cut off.
    """
    with open_gguf(path) as file:
        header = parse_header(file.fileno(), path)
        check_whole(header, os.fstat(file.fileno()).st_size, path)
    return header.tensors


def read_header(path: Path) -> Header:
    """The header alone; a file that ends before its data (a fake model's) is not refused.

    Raises ModelError: it cannot be read, is no GGUF file, or its header is damaged or cut off.
    """
    with open_gguf(path) as file:
        return parse_header(file.fileno(), path)


def open_gguf(path: Path) -> FileIO:
    """Open a file that begins like GGUF, for its descriptor. Raises ModelError."""
    try:
        # a pipe is refused unopened: to open it would wait for whoever writes into it
        is_plain = S_ISREG(path.stat().st_mode)
        if is_plain:
            require_gguf(path)
            return FileIO(path)
    except OSError as exc:
        raise ModelError(f"cannot read {path}: {exc.strerror or exc}") from exc
    raise ModelError(f"cannot read {path}: it is not a file")


def parse_header(descriptor: int, path: Path) -> Header:
    """The header of an open file; `path` is for the message. Raises ModelError."""
    try:
        return _parse(_Window(descriptor))
    except _Wrong as exc:
        raise ModelError(f"{path} is {exc}") from None
    except OSError as exc:
        raise ModelError(f"cannot read {path}: {exc.strerror or exc}") from exc


def check_whole(header: Header, size: int, path: Path) -> None:
    """Raises ModelError if a file of `size` bytes ends before the data that its header names."""
    if header.end > size:
        raise ModelError(f"{path} is cut off: {size} of {header.end} bytes are there")


class _Wrong(Exception):
    """What the file is, for a sentence that begins with its path."""


class _Window:
    """A piece of the file that moves forward; `at` counts from the start of `data`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._base = 0
        self.data = b""
        self.at = 0

    @property
    def position(self) -> int:
        """Where the next byte stands in the file."""
        return self._base + self.at

    def require(self, count: int) -> None:
        """Have so many bytes from `at` on, which may move the window."""
        if self.at + count <= len(self.data):
            return
        base = self.position
        end = base + count
        if end > self._size:
            raise _Wrong(f"cut off: its header does not end within its {self._size} bytes")
        if end > _MOST_HEADER:
            raise _Wrong(f"damaged: its header is longer than {_MOST_HEADER >> 20} MiB")
        data = os.pread(self._descriptor, max(_PIECE, count), base)
        if len(data) < count:
            raise _Wrong("cut off: it became shorter while it was read")
        self._base, self.data, self.at = base, data, 0

    def take(self, layout: struct.Struct) -> tuple[int, ...]:
        self.require(layout.size)
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def text(self) -> bytes:
        (length,) = self.take(_LENGTH)
        if length > _MOST_NAME:
            raise _Wrong(f"damaged: a name of {length} bytes at {self.position}")
        self.require(length)
        self.at += length
        return self.data[self.at - length : self.at]

    def skip(self, count: int) -> None:
        """Pass over bytes, which are not read; the end of the file is noticed with what follows."""
        self.at += count

    def skip_texts(self, count: int) -> None:
        """Pass over strings: a vocabulary has 150,000 of them, so this loop does nothing else."""
        unpack = _LENGTH.unpack_from
        data, at = self.data, self.at
        last = len(data) - _LENGTH.size
        for _ in range(count):
            if at > last:
                self.at = at
                self.require(_LENGTH.size)
                data, at = self.data, self.at
                last = len(data) - _LENGTH.size
            at += _LENGTH.size + unpack(data, at)[0]
        self.at = at


def _parse(window: _Window) -> Header:
    _, version, n_tensors, n_keys = window.take(_START)
    if version & 0xFFFF == 0:
        raise _Wrong("a big-endian GGUF file, which this version of Caravan cannot read")
    if version not in _VERSIONS:
        raise _Wrong(f"GGUF version {version}, which this version of Caravan does not know")
    for count, most, what in (
        (n_keys, _MOST_KEYS, "keys"),
        (n_tensors, _MOST_TENSORS, "tensors"),
    ):
        if count > most:
            raise _Wrong(f"damaged: its header counts {count} {what}")
    numbers, architecture = _parse_keys(window, n_keys)
    alignment = numbers.get(b"general.alignment", _DEFAULT_ALIGNMENT)
    if not 0 < alignment <= _MOST_ALIGNMENT or alignment & alignment - 1:
        raise _Wrong(f"damaged: its alignment is {alignment}")
    found = _parse_directory(window, n_tensors, alignment)
    window.require(0)
    start = window.position
    if found:
        start = -(-start // alignment) * alignment
    tensors = {name: Span(start + span.offset, span.size) for name, span in found.items()}
    splits = numbers.get(b"split.count", 0)

    def of_architecture(key: bytes) -> int | None:
        return None if architecture is None else numbers.get(architecture + key)

    return Header(
        tensors=tensors,
        architecture=None if architecture is None else architecture.decode("utf-8", "replace"),
        layers=of_architecture(b".block_count"),
        context=of_architecture(b".context_length"),
        split=numbers.get(b"split.no", 0) if splits else 0,
        splits=splits or 1,
        split_tensors=numbers.get(b"split.tensors.count"),
        start=start,
        end=max((span.offset + span.size for span in tensors.values()), default=start),
    )


def _parse_keys(window: _Window, count: int) -> tuple[dict[bytes, int], bytes | None]:
    """The values that are single numbers, and the architecture."""
    numbers: dict[bytes, int] = {}
    architecture = None
    for _ in range(count):
        key = window.text()
        (kind,) = window.take(_NUMBER)
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            (value,) = window.take(scalar)
            if isinstance(value, int):
                numbers[key] = value
        elif kind == _STRING and key == b"general.architecture":
            architecture = window.text()
        elif kind == _STRING:
            window.skip_texts(1)
        elif kind == _ARRAY:
            _skip_array(window)
        else:
            raise _Wrong(f"damaged: type {kind} of the value at {window.position}")
    return numbers, architecture


def _skip_array(window: _Window) -> None:
    kind, count = window.take(_ELEMENTS)
    if kind == _STRING:
        window.skip_texts(count)
    elif kind in _SCALARS:
        window.skip(count * _SCALARS[kind].size)
    else:
        raise _Wrong(f"damaged: type {kind} of the array at {window.position}")


def _parse_directory(window: _Window, count: int, alignment: int) -> dict[str, Span]:
    """The tensors' places, counted from the start of the data."""
    found: dict[str, Span] = {}
    for _ in range(count):
        name, span = _parse_tensor(window)
        if name in found:
            raise _Wrong(f"damaged: two tensors have the name {name!a}")
        if span.offset % alignment:
            raise _Wrong(f"damaged: {name!a} begins at {span.offset}, not aligned to {alignment}")
        found[name] = span
    return found


def _parse_tensor(window: _Window) -> tuple[str, Span]:
    """One entry of the directory; its offset counts from the start of the data."""
    try:
        name = window.text().decode()
    except UnicodeDecodeError:
        raise _Wrong(f"damaged: the tensor's name before {window.position} is no text") from None
    (n_dims,) = window.take(_NUMBER)
    if n_dims > _MOST_DIMS:
        raise _Wrong(f"damaged: {name!a} has {n_dims} dimensions")
    shape = [window.take(_LENGTH)[0] for _ in range(n_dims)]
    kind, offset = window.take(_PLACE)
    if kind not in TYPE_SIZES:
        raise _Wrong(f"damaged or too new: {name!a} has type {kind}")
    block, size = TYPE_SIZES[kind]
    if shape and shape[0] % block:
        raise _Wrong(f"damaged: a row of {name!a} has {shape[0]} elements, in blocks of {block}")
    count = 1
    for extent in shape:
        count *= extent
    return name, Span(offset, count // block * size)
