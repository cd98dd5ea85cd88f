"""Models in several files, `NAME-00001-of-00003.gguf` and so on: which files belong together.

Called by whoever is given a model's file and needs all of it. The names are llama.cpp's rule, which
finds the other parts by them; that they are what they are called is read from their headers.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from caravan.errors import ModelError
from caravan.models.ledger import known_header
from caravan.models.tensors import Header, check_whole

_NAME = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<of>[0-9]{5})\.gguf", re.DOTALL)
_MOST_NAMED = 3


class Part(NamedTuple):
    """One file of a model."""

    path: Path
    header: Header


class _Name(NamedTuple):
    """A part's name, taken apart: number `number`, from 1, of `of`."""

    stem: str
    number: int
    of: int

    def other(self, number: int) -> str:
        return f"{self.stem}-{number:05}-of-{self.of:05}.gguf"


def parts(path: Path) -> tuple[Path, ...]:
    """All files of the model of which `path` is one, in order; a whole model is one file.

    Raises ModelError: one of them is missing, is not what its name says, or is no GGUF file.
    """
    return tuple(part.path for part in read_parts(path))


def read_parts(path: Path) -> tuple[Part, ...]:
    """`parts` with their headers. Of a model in several files all tensors are there; whether those
    of a single file are is not asked, since a fake model's are not."""
    header = known_header(path)
    if header.splits == 1:
        return (Part(path, header),)
    name = _named(path.name)
    if name is None or (name.number, name.of) != (header.split + 1, header.splits):
        raise ModelError(
            f"{path} is part {header.split + 1} of {header.splits} of a model and has to be called "
            f"NAME-{header.split + 1:05}-of-{header.splits:05}.gguf"
        )
    _check_present(path, name)
    found = []
    for number in range(1, name.of + 1):
        other = path.with_name(name.other(number))
        found.append(Part(other, header if number == name.number else _read(other, number, name)))
    _check_tensors(found)
    return tuple(found)


def first_part(path: Path) -> Path:
    """The first file of a model if `path` is another one of it and the first is there.

    Raises nothing: what is wrong with the file is for whoever opens it.
    """
    name = _named(path.name)
    if name is None or name.number == 1:
        return path
    first = path.with_name(name.other(1))
    try:
        return first if first.is_file() and known_header(path).splits == name.of else path
    except (ModelError, OSError):
        return path


def is_later_part(name: str) -> bool:
    """Whether a file's name is that of a part which is not the first."""
    taken = _named(name)
    return taken is not None and taken.number > 1


def _named(name: str) -> _Name | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    found = _Name(match["stem"], int(match["number"]), int(match["of"]))
    return found if 1 <= found.number <= found.of else None


def _check_present(path: Path, name: _Name) -> None:
    numbers = range(1, name.of + 1)
    missing = [i for i in numbers if not os.path.exists(path.with_name(name.other(i)))]
    if missing:
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        names = ", ".join(map(name.other, missing[:_MOST_NAMED]))
        raise ModelError(
            f"{path} is part {name.number} of {name.of} of a model; "
            f"not there beside it: {names}{more}"
        )


def _read(path: Path, number: int, name: _Name) -> Header:
    header = known_header(path)
    if (header.split + 1, header.splits) != (number, name.of):
        says = f"part {header.split + 1} of {header.splits}" if header.splits > 1 else "no part"
        raise ModelError(f"{path} is not part {number} of {name.of}: it says that it is {says}")
    return header


def _check_tensors(found: list[Part]) -> None:
    """All data are there, each tensor once, and as many as the first part counts."""
    owners: dict[str, Path] = {}
    for path, header in found:
        try:
            size = path.stat().st_size
        except OSError as exc:
            raise ModelError(f"cannot read {path}: {exc.strerror or exc}") from exc
        check_whole(header, size, path)
        for tensor in header.tensors:
            other = owners.setdefault(tensor, path)
            if other is not path:
                raise ModelError(f"{path} and {other.name} both have the tensor {tensor!a}")
    first, expected = found[0].path, found[0].header.split_tensors
    if expected is not None and len(owners) != expected:
        raise ModelError(
            f"{first} counts {expected} tensors in its {len(found)} parts, which have {len(owners)}"
        )
