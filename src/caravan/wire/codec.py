"""Headers: what stands before a payload in the base protocol and in the extension.

Base: a request is `cmd u8, len u64, payload`, a reply `len u64, payload`; the first message in
either case is HELLO. Extension: `extension.FRAME` both ways.
"""

from __future__ import annotations

from dataclasses import dataclass

from caravan.errors import RemoteProtocolError
from caravan.wire import extension
from caravan.wire.commands import BASE_8, EXT, Base, Command
from caravan.wire.layout import Layout
from caravan.wire.versions import Version

BASE_REQUEST = Layout((("number", "B"), ("length", "Q")), 9)
BASE_REPLY = Layout((("length", "Q"),), 8)

MAX_PAYLOAD = 1 << 40


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded request header."""

    command: Command
    seq: int
    length: int


def base_request(number: int, length: int) -> bytes:
    """The header of a base request with `length` payload bytes."""
    return BASE_REQUEST.pack(number, length)


def base_reply(length: int) -> bytes:
    """The header of a base reply."""
    return BASE_REPLY.pack(length)


def ext_frame(number: int, seq: int, length: int, status: int = 0) -> bytes:
    """The header of an extension request (status 0) or reply."""
    return extension.FRAME.pack(number, status, 0, seq & 0xFFFFFFFF, length)


def decode_base_request(data: bytes | memoryview, table: dict[int, Command]) -> Header:
    """Raises RemoteProtocolError for an unknown command or a length that it cannot have."""
    number, length = BASE_REQUEST.unpack(data)
    return _checked(table, number, 0, length)


def decode_ext_request(data: bytes | memoryview) -> Header:
    """Raises RemoteProtocolError for an unknown command or a length that it cannot have."""
    number, _status, _flags, seq, length = extension.FRAME.unpack(data)
    return _checked(EXT, number, seq, length)


def _checked(table: dict[int, Command], number: int, seq: int, length: int) -> Header:
    command = table.get(number)
    if command is None:
        raise RemoteProtocolError(f"unknown command {number}")
    if not command.fits(length) or length > MAX_PAYLOAD:
        raise RemoteProtocolError(f"{command.name} cannot have {length} bytes")
    return Header(command, seq, length)


def hello_request(caps: bytes) -> bytes:
    """A whole HELLO request."""
    row = BASE_8[Base.HELLO]
    return base_request(Base.HELLO, row.request.size) + row.request.pack(caps)


def hello_reply(version: Version, caps: bytes) -> bytes:
    """A whole HELLO reply."""
    row = BASE_8[Base.HELLO].reply
    assert row is not None
    return base_reply(row.size) + row.pack(*version, 0, caps)


def decode_hello_reply(payload: bytes | memoryview) -> tuple[Version, bytes]:
    """The peer's version and capability bytes."""
    row = BASE_8[Base.HELLO].reply
    assert row is not None
    major, minor, patch, _pad, caps = row.unpack(payload)
    return Version(major, minor, patch), caps
