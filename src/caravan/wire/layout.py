"""`Layout`: a packed little-endian record, the one way in which this package spells bytes.

Built from (field, struct code) pairs; sizes are pinned where they are declared, so a wrong field
fails at import, before any socket opens.
"""

from __future__ import annotations

import struct
from typing import Any

from caravan.errors import LocalProtocolError, RemoteProtocolError


class Layout:
    """A fixed-size record of named scalar fields (struct codes, little-endian, no padding).

    Args:
        fields: (name, struct code) pairs, in wire order.
        size: the size in bytes that the format prescribes.
    """

    __slots__ = ("_struct", "_texts", "fields", "names", "size")

    def __init__(self, fields: tuple[tuple[str, str], ...], size: int) -> None:
        self.fields = fields
        self.names = tuple(name for name, _ in fields)
        # struct cuts what is too long without a word
        self._texts = tuple(
            (index, int(code[:-1])) for index, (_, code) in enumerate(fields) if code[-1] == "s"
        )
        self._struct = struct.Struct("<" + "".join(code for _, code in fields))
        self.size = self._struct.size
        if self.size != size:
            raise AssertionError(f"layout of {self.names} has {self.size} bytes, not {size}")

    def pack(self, *values: Any) -> bytes:
        """The record's bytes; raises LocalProtocolError when a value does not fit its field."""
        try:
            data = self._struct.pack(*values)
        except struct.error as exc:
            raise LocalProtocolError(f"cannot encode {self.names}: {exc}") from exc
        for index, room in self._texts:
            if len(values[index]) > room:
                raise LocalProtocolError(f"{self.names[index]} is longer than {room} bytes")
        return data

    def unpack(self, data: bytes | bytearray | memoryview) -> tuple[Any, ...]:
        """The record's values; raises RemoteProtocolError when `data` has another size."""
        if len(data) != self.size:
            raise RemoteProtocolError(
                f"expected a record of {self.size} bytes ({', '.join(self.names)}), got {len(data)}"
            )
        return self._struct.unpack(data)

    def unpack_from(self, data: bytes | bytearray | memoryview) -> tuple[Any, ...]:
        """The values of a record that more bytes may follow."""
        if len(data) < self.size:
            raise RemoteProtocolError(
                f"expected at least {self.size} bytes ({', '.join(self.names)}), got {len(data)}"
            )
        return self._struct.unpack_from(data)

    def unpack_many(self, data: bytes | bytearray | memoryview) -> list[tuple[Any, ...]]:
        """The values of records that follow each other without a gap."""
        if self.size == 0 or len(data) % self.size:
            raise RemoteProtocolError(f"{len(data)} bytes are no records of {self.size} bytes")
        return list(self._struct.iter_unpack(data))


EMPTY = Layout((), 0)
