"""API keys of `caravan serve`: from options, files and the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence

from caravan.errors import UsageError

VARIABLE = "CARAVAN_API_KEY"


def api_keys(given: Sequence[str], files: Sequence[str]) -> list[str]:
    """All keys: the options', and those of the files, one a line; without any those of the
    environment, separated by commas.

    Raises UsageError for files that cannot be read or hold none, and for keys that cannot stand in
    a header. None is repeated.
    """
    found = [("--api-key", key) for key in given]
    for file in files:
        lines = [line.strip() for line in _read(file).splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise UsageError(f"there is no key in {file}")
        found += [(f"a key in {file}", key) for key in keys]
    if not found:
        parts = os.environ.get(VARIABLE, "").split(",")
        found = [(VARIABLE, part.strip()) for part in parts if part.strip()]
    for source, key in found:
        if not key:
            raise UsageError(f"{source} is empty")
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise UsageError(f"{source} has characters that cannot be sent as a key")
    return [key for _, key in found]


def _read(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as source:
            return source.read()
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise UsageError(f"cannot read the keys in {file}: {reason}") from exc
