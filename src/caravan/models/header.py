"""Whether a file is a GGUF file at all: its first four bytes.

Asked before anything expensive is started for the file. Knows nothing of what comes after.
"""

from __future__ import annotations

from pathlib import Path

from caravan.errors import ModelError

_MAGIC = b"GGUF"


def require_gguf(path: Path) -> None:
    """Raises ModelError, in one line, when the file cannot be read or is something else."""
    try:
        with path.open("rb") as file:
            found = file.read(len(_MAGIC))
    except OSError as exc:
        raise ModelError(f"cannot read {path}: {exc.strerror or exc}") from exc
    if found == _MAGIC:
        return
    if not found:
        raise ModelError(f"{path} is not a GGUF file: it is empty")
    is_cut = len(found) < len(_MAGIC)
    what = f"it {'ends after' if is_cut else 'begins with'} {found.decode('latin-1')!a}"
    raise ModelError(f"{path} is not a GGUF file: {what}")
