"""`WireType`: how the numbers of an activation (f32 in memory) travel."""

from __future__ import annotations

from enum import IntEnum

from caravan.errors import RemoteProtocolError, UsageError

_F32_BYTES = 4

# Payload of what is converted, at most: half the bytes of the f32 in memory.
MAX_CAST = 256 << 20


class WireType(IntEnum):
    """The number in a command's `dtype`; F32 is as it is, the others are half as long."""

    F32 = 0
    F16 = 1
    BF16 = 2

    @property
    def word(self) -> str:
        """As options and the engine call it: `f32`, `f16`, `bf16`."""
        return self.name.lower()

    def travels(self, size: int) -> int:
        """Bytes on the wire of `size` bytes in memory."""
        return size // 2 if self else size


WORDS = {dtype.word: dtype for dtype in WireType}


def decode_wire_type(number: int, address: int, size: int) -> WireType:
    """The type of a copy of `size` bytes of memory at an address.

    Raises RemoteProtocolError for a number that is none, and where there are no whole f32.
    """
    try:
        dtype = WireType(number)
    except ValueError:
        raise RemoteProtocolError(f"data type {number} is not known") from None
    if dtype and (size % _F32_BYTES or address % _F32_BYTES):
        raise RemoteProtocolError(f"{size} bytes at {address:#x} are no f32")
    if dtype and size > 2 * MAX_CAST:
        raise RemoteProtocolError(f"{size} bytes are too many to be converted")
    return dtype


def wire_type(word: str) -> WireType:
    """The type of a name; raises UsageError."""
    if word not in WORDS:
        raise UsageError(f"wire type {word!r} is none of {', '.join(WORDS)}")
    return WORDS[word]
