"""`fingerprint`: what tells one model's files from another's, without reading all of them.

For what is kept of a model and must not be used with another one, such as saved conversations.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from caravan.errors import ModelError
from caravan.models.ledger import known_header

_SAMPLES = 64
_SAMPLE = 4096


def fingerprint(paths: Sequence[Path]) -> str:
    """Of a model in these files: their headers, and bytes from all over their weights. In hex.

    Raises ModelError for a file that cannot be read.
    """
    from blake3 import blake3

    hasher = blake3()
    for path in paths:
        header = known_header(path)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                hasher.update(size.to_bytes(8, "little"))
                hasher.update(file.read(header.start))
                for number in range(_SAMPLES):
                    file.seek(header.start + (size - header.start) * number // _SAMPLES)
                    hasher.update(file.read(_SAMPLE))
        except OSError as exc:
            raise ModelError(f"cannot read {path}: {exc.strerror or exc}") from exc
    return hasher.hexdigest(16)
