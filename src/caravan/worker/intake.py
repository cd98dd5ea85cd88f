"""`take_in`: a piece of a file into device memory, hashed on its way; `digest_of`: only hashed.

For weights that this machine has itself: from a model's file, or from the weight cache. They say
what is there; whether that is what somebody wanted is for the caller to see.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from blake3 import blake3

from caravan.worker.buffers import Buffer
from caravan.worker.lane import Lane
from caravan.worker.store import PIECE

# For memory that the host cannot reach: fewer turns of the device, for so much memory of our own.
_STAGE = 8 << 20


class Gone(Exception):
    """The buffer is being freed, or has been."""


def digest_of(lane: Lane, address: int, size: int, fd: int, offset: int) -> bytes | None:
    """The BLAKE3 digest of what `take_in` would read, while no head can see it or write to it.

    None where it cannot be read so far; raises as `take_in` does.
    """

    def stop() -> None:
        # nobody waits for this one who frees the buffer
        lane.locate(address, size)

    return _staged(size, PIECE, fd, offset, lambda done, part: None, stop)


def take_in(lane: Lane, address: int, size: int, fd: int, offset: int) -> bytes | None:
    """Read `size` bytes of a file from `offset` on to a wire address of the lane's device.

    Returns the BLAKE3 digest of what has been read; None where the file cannot be read so far.
    Either way the memory holds anything until the digest is found right. Raises RemoteError when
    the buffer is not there, and Gone when it is about to be freed.
    """
    buffer, at = lane.locate(address, size)
    with contextlib.suppress(OSError):
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_SEQUENTIAL)
    if buffer.native is not None and buffer.native.view is None:
        return _through_the_engine(lane, address, size, fd, offset)
    return _in_place(lane, buffer, at, size, fd, offset)


def _in_place(lane: Lane, buffer: Buffer, at: int, size: int, fd: int, offset: int) -> bytes | None:
    with lane.buffers.pin(buffer.handle) as pin:
        native = buffer.native
        view = native.view if native is not None else None
        target = view[at : at + size] if view is not None else memoryview(bytearray(size))

        def stop() -> None:
            if pin.ending:
                raise Gone

        hasher = blake3()
        if _read(fd, offset, target, hasher.update, stop):
            return hasher.digest()
        return None


def _through_the_engine(lane: Lane, address: int, size: int, fd: int, offset: int) -> bytes | None:
    def put(done: int, part: memoryview) -> None:
        with lane.executor.turn():
            # nobody can free it now, but somebody may have
            buffer, at = lane.locate(address + done, len(part))
            if buffer.native is not None:
                buffer.native.write(at, part)

    return _staged(size, _STAGE, fd, offset, put, lambda: None)


def _staged(
    size: int,
    most: int,
    fd: int,
    offset: int,
    put: Callable[[int, memoryview], None],
    stop: Callable[[], None],
) -> bytes | None:
    """Read into memory of our own, `most` bytes at a time, and put each part where it belongs."""
    stage = memoryview(bytearray(min(size, most)))
    hasher = blake3()
    for done in range(0, size, len(stage) or 1):
        part = stage[: size - done]
        if not _read(fd, offset + done, part, hasher.update, stop):
            return None
        put(done, part)
    return hasher.digest()


def _read(
    fd: int,
    offset: int,
    target: memoryview,
    hashed: Callable[[memoryview], object],
    stop: Callable[[], None],
) -> bool:
    """Fill `target`, a piece at a time; False where the file ends or fails before."""
    done = 0
    while done < len(target):
        stop()
        piece = target[done : done + PIECE]
        try:
            got = os.preadv(fd, [piece], offset + done)
        except OSError:
            return False
        if not got:
            return False
        hashed(piece[:got])
        done += got
    return True
