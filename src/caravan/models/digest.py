"""The digest that names a tensor's content: BLAKE3 over exactly its bytes as they stand in a file.

For heads and ledgers; what a worker reads and keeps it hashes on its way. The library is imported
when the first digest is wanted: most commands need none.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from caravan.errors import ModelError
from caravan.models.tensors import Span

DIGEST_SIZE = 32


def digest_of(
    file_descriptor: int,
    span: Span,
    piece: int = 1 << 20,
    stop: Callable[[], bool] | None = None,
) -> bytes | None:
    """The digest of a range of an open file, whose position stays as it is; blocks.

    Reads `piece` bytes at a time into one buffer. None if the file ends early, or once `stop()`,
    asked before each piece, is true. Raises ModelError if the file cannot be read.
    """
    from blake3 import blake3

    hasher = blake3()
    buffer = memoryview(bytearray(min(piece, span.size)))
    at, end = span.offset, span.offset + span.size
    while at < end:
        if stop is not None and stop():
            return None
        try:
            got = os.preadv(file_descriptor, [buffer[: end - at]], at)
        except OSError as exc:
            raise ModelError(f"cannot read the model file: {exc.strerror or exc}") from exc
        if got == 0:
            return None
        hasher.update(buffer[:got])
        at += got
    return hasher.digest()


def digest_of_bytes(data: bytes | memoryview) -> bytes:
    """The digest of bytes that are at hand."""
    from blake3 import blake3

    return blake3(data).digest()
