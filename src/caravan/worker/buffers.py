"""`BufferTable`: the buffers of one session, by handle, and where wire addresses lie in them.

Handles count up from 1 and are never used again; an address is `handle << ADDRESS_SHIFT` plus an
offset, in both protocols. Shared by all connections of the session. Frees nothing on its own: the
handlers do, at the right place of the device's queue. Whoever uses a buffer's memory outside of its
device's turn pins it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from caravan.errors import AllocationError, RemoteError
from caravan.wire.extension import ADDRESS_SHIFT, MAX_BUFFER_SIZE, Status
from caravan.worker.device import Device, DeviceBuffer

_MAX_HANDLE = (1 << (64 - ADDRESS_SHIFT)) - 1
_MAX_BUFFERS = 4096
_OFFSET_MASK = (1 << ADDRESS_SHIFT) - 1

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A live buffer; `native` is None when its size is 0."""

    handle: int
    device: int
    size: int
    native: DeviceBuffer | None

    @property
    def base(self) -> int:
        """Its first wire address."""
        return self.handle << ADDRESS_SHIFT


@dataclass(frozen=True, slots=True)
class Memory:
    """The live buffers of one device at one moment, sorted by handle, for vectorised look-up."""

    version: int
    handles: U64
    sizes: U64
    bases: U64
    pointers: U64


@dataclass(slots=True)
class Pin:
    """The use of a buffer's memory outside of its device's turn, by one or several.

    Attributes:
        ending: somebody waits to free it; whoever uses it looks here between pieces, and stops.
    """

    buffer: Buffer
    users: int = 0
    ending: bool = False


class BufferTable:
    """All buffers of a session."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unpinned = threading.Condition(self._lock)
        self._pins: dict[int, Pin] = {}
        self._buffers: dict[int, Buffer] = {}
        self._next = 1
        self._version = 0
        self._memory: dict[int, Memory] = {}

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def version(self) -> int:
        """Changes with every allocation and every free."""
        return self._version

    def allocate(self, device: Device, size: int) -> Buffer:
        """Raises AllocationError when there is no room."""
        if size > min(device.max_size, MAX_BUFFER_SIZE):
            raise AllocationError(f"{device.name}: a buffer of {size} bytes is too big")
        if len(self._buffers) >= _MAX_BUFFERS or self._next > _MAX_HANDLE:
            raise AllocationError(f"{device.name}: too many buffers in this session")
        native = device.allocate(size) if size else None
        with self._lock:
            buffer = Buffer(self._next, device.index, native.size if native else 0, native)
            self._buffers[buffer.handle] = buffer
            self._next += 1
            self._changed(device.index)
        return buffer

    @contextmanager
    def pin(self, handle: int) -> Iterator[Pin]:
        """Use a buffer's memory, for a piece at a time; raises RemoteError if it is not live.

        Not while waiting for the device's turn: who frees the buffer has that, and waits for us.
        """
        with self._lock:
            buffer = self._buffers.get(handle)
            pin = self._pins.get(handle)
            if buffer is None or (pin is not None and pin.ending):
                raise _unknown(handle)
            if pin is None:
                pin = self._pins[handle] = Pin(buffer)
            pin.users += 1
        try:
            yield pin
        finally:
            with self._lock:
                pin.users -= 1
                if not pin.users:
                    self._pins.pop(handle, None)
                    self._unpinned.notify_all()

    def remove(self, handle: int) -> Buffer:
        """Take a buffer out, when nobody has it pinned any more; the caller frees its memory."""
        with self._lock:
            pin = self._pins.get(handle)
            if pin is not None:
                pin.ending = True
                self._unpinned.wait_for(lambda: handle not in self._pins)
            buffer = self._buffers.pop(handle, None)
            if buffer is not None:
                self._changed(buffer.device)
        if buffer is None:
            raise _unknown(handle)
        return buffer

    def get(self, handle: int) -> Buffer:
        """Raises RemoteError for a handle that is not live."""
        buffer = self._buffers.get(handle)
        if buffer is None:
            raise _unknown(handle)
        return buffer

    def locate(self, address: int, size: int) -> tuple[Buffer, int]:
        """The buffer and offset of `size` bytes at a wire address; raises RemoteError."""
        buffer = self.get(address >> ADDRESS_SHIFT)
        offset = address & _OFFSET_MASK
        if offset > buffer.size or size > buffer.size - offset:
            raise RemoteError(
                Status.BAD_REQUEST,
                f"{size} bytes at offset {offset} pass the end of buffer {buffer.handle} "
                f"({buffer.size} bytes)",
            )
        return buffer, offset

    def memory(self, device: int) -> Memory:
        """The device's buffers as arrays."""
        with self._lock:
            memory = self._memory.get(device)
            if memory is None:
                memory = self._memory[device] = self._snapshot(device)
            return memory

    def _changed(self, device: int) -> None:
        self._version += 1
        self._memory.clear()

    def _snapshot(self, device: int) -> Memory:
        mine = [b for b in self._buffers.values() if b.device == device]
        mine.sort(key=lambda b: b.handle)
        return Memory(
            self._version,
            np.array([b.handle for b in mine], np.uint64),
            np.array([b.size for b in mine], np.uint64),
            np.array([b.native.base if b.native else 0 for b in mine], np.uint64),
            np.array([b.native.pointer if b.native else 0 for b in mine], np.uint64),
        )


def _unknown(handle: int) -> RemoteError:
    return RemoteError(Status.BAD_REQUEST, f"no buffer has handle {handle}")
