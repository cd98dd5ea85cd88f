"""Looking after a weight cache by hand: which files are meant, removing them, checking them.

What `caravan cache` does, without its words. Workers may use the same directory meanwhile: a file
that is gone when its turn comes is no error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from caravan.errors import CaravanError, UsageError
from caravan.worker.store import Entry, Store

_FNV_DIGITS = 16


def entries(store: Store) -> list[Entry]:
    """All files, the least recently used first; none if there is no directory.

    Raises CaravanError if it is there and cannot be read.
    """
    try:
        os.listdir(store.directory)
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise CaravanError(f"cannot read {store.directory}: {exc.strerror or exc}") from exc
    return store.entries()


def kind(entry: Entry) -> str:
    """Whose weights they are: `tensor` of Caravan's heads, or `llama.cpp`."""
    return "llama.cpp" if len(entry.digest) == _FNV_DIGITS else "tensor"


def named(entries: Sequence[Entry], prefixes: Sequence[str]) -> list[Entry]:
    """The files whose digests begin so, each once. UsageError for one that fits none or several."""
    found: dict[str, Entry] = {}
    for prefix in prefixes:
        begin = prefix.lower()
        fitting = [entry for entry in entries if begin and entry.digest.startswith(begin)]
        # a whole name is meant as such, even if another one begins with it
        fitting = [entry for entry in fitting if entry.digest == begin] or fitting
        if len(fitting) != 1:
            told = f"{len(fitting)} digests begin" if fitting else "no digest begins"
            raise UsageError(f"{told} with {prefix!r}")
        found[fitting[0].digest] = fitting[0]
    return list(found.values())


def remove(store: Store, entry: Entry) -> str:
    """Remove it; the reason if that is not possible, else nothing."""
    try:
        store.remove(entry)
    except OSError as exc:
        return f"cannot be removed: {exc.strerror or exc}"
    return ""


def verify(store: Store, entry: Entry) -> str:
    """Read it, and remove it if its content is not what its name says; blocks.

    What was found and done, for a sentence that begins with the file; nothing if all is well.
    """
    try:
        if store.verify(entry):
            return ""
    except FileNotFoundError:
        return ""
    except OSError as exc:
        return f"cannot be read: {exc.strerror or exc}"
    why = remove(store, entry)
    return f"is damaged, and {why}" if why else "was damaged and is removed"
