"""Headers and HELLO: exact bytes, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan.errors import LocalProtocolError, RemoteProtocolError
from caravan.wire import codec, extension
from caravan.wire.commands import BASE_7, BASE_8, EXT, Command
from caravan.wire.versions import Version

BASE_ROWS = [(table, row) for table in (BASE_7, BASE_8) for row in table.values()]


def possible(row: Command, extra: int) -> int:
    return row.request.size + (extra if row.tail else 0)


def test_hello_request_bytes():
    assert codec.hello_request(bytes(24)) == b"\x0e\x18" + bytes(7) + bytes(24)
    caps = bytes(range(24))
    assert codec.hello_request(caps) == b"\x0e\x18" + bytes(7) + caps


def test_hello_reply_bytes():
    reply = codec.hello_reply(Version(7, 0, 0), bytes(24))
    assert reply == b"\x1c" + bytes(7) + b"\x07\0\0\0" + bytes(24)
    assert codec.hello_reply(Version(8, 1, 2), bytes(24))[8:12] == b"\x08\1\2\0"


def test_hello_reply_comes_back():
    caps = bytes(range(24))
    reply = codec.hello_reply(Version(8, 1, 2), caps)
    assert codec.decode_hello_reply(reply[8:]) == (Version(8, 1, 2), caps)
    # the pad byte means nothing
    assert codec.decode_hello_reply(b"\x07\0\0\xff" + caps) == (Version(7, 0, 0), caps)


@pytest.mark.parametrize("size", [0, 4, 27, 29, 280])
def test_hello_reply_of_another_size_is_refused(size):
    with pytest.raises(RemoteProtocolError):
        codec.decode_hello_reply(bytes(size))


def test_hello_caps_are_never_cut():
    with pytest.raises(LocalProtocolError):
        codec.hello_request(bytes(25))


def test_header_bytes():
    assert codec.base_request(6, 0x0102) == b"\x06\2\1" + bytes(6)
    assert codec.base_reply(0x0102) == b"\2\1" + bytes(6)
    frame = codec.ext_frame(69, 0x01020304, 5, status=2)
    assert frame == b"\x45\x02\0\0" + b"\4\3\2\1" + b"\5" + bytes(7)
    assert codec.ext_frame(69, 2**32 + 7, 0) == codec.ext_frame(69, 7, 0)


@given(st.sampled_from(BASE_ROWS), st.integers(0, 1 << 30))
def test_base_headers_come_back(case, extra):
    table, row = case
    length = possible(row, extra)
    header = codec.decode_base_request(codec.base_request(row.number, length), table)
    assert header == codec.Header(row, 0, length)


@given(st.sampled_from(list(EXT.values())), st.integers(0, 2**32 - 1), st.integers(0, 1 << 30))
def test_extension_headers_come_back(row, seq, extra):
    length = possible(row, extra)
    header = codec.decode_ext_request(codec.ext_frame(row.number, seq, length))
    assert header == codec.Header(row, seq, length)


@given(st.integers(0, 255), st.integers(0, 2**64 - 1), st.sampled_from([BASE_7, BASE_8]))
def test_any_base_header_is_valid_or_refused(number, length, table):
    row = table.get(number)
    valid = row is not None and row.fits(length) and length <= codec.MAX_PAYLOAD
    if valid:
        assert codec.decode_base_request(codec.base_request(number, length), table).command is row
    else:
        with pytest.raises(RemoteProtocolError):
            codec.decode_base_request(codec.base_request(number, length), table)


@given(st.binary(min_size=16, max_size=16))
def test_any_extension_header_is_valid_or_refused(data):
    number, length = data[0], int.from_bytes(data[8:], "little")
    row = EXT.get(number)
    if row is not None and row.fits(length) and length <= codec.MAX_PAYLOAD:
        header = codec.decode_ext_request(data)
        assert header == codec.Header(row, int.from_bytes(data[4:8], "little"), length)
    else:
        with pytest.raises(RemoteProtocolError):
            codec.decode_ext_request(data)


@pytest.mark.parametrize("number", [18, 23, 24, 63, 64, 255])
def test_unknown_commands_are_named(number):
    with pytest.raises(RemoteProtocolError, match=f"unknown command {number}"):
        codec.decode_base_request(codec.base_request(number, 0), BASE_7)


def test_a_command_with_an_impossible_length_is_named():
    with pytest.raises(RemoteProtocolError, match="FREE_BUFFER cannot have 9 bytes"):
        codec.decode_base_request(codec.base_request(4, 9), BASE_7)
    with pytest.raises(RemoteProtocolError, match="SET cannot have 7 bytes"):
        codec.decode_ext_request(codec.ext_frame(68, 1, 7))
    with pytest.raises(RemoteProtocolError, match="SET cannot have"):
        codec.decode_ext_request(codec.ext_frame(68, 1, (1 << 40) + 1))


@pytest.mark.parametrize("size", [*range(9), 10, 18])
def test_base_headers_are_nine_bytes(size):
    with pytest.raises(RemoteProtocolError):
        codec.decode_base_request(bytes(size), BASE_7)


@pytest.mark.parametrize("size", [*range(16), 17, 32])
def test_extension_headers_are_sixteen_bytes(size):
    with pytest.raises(RemoteProtocolError):
        codec.decode_ext_request(bytes(size))


def test_frame_offsets():
    assert extension.FRAME.size == 16
    assert extension.FRAME.names == ("number", "status", "flags", "seq", "length")
    assert extension.FRAME.unpack(bytes(range(16))) == (
        0x00,
        0x01,
        0x0302,
        0x07060504,
        0x0F0E0D0C0B0A0908,
    )
