"""GGUF headers byte by byte, so that tests can get any of them wrong."""

from __future__ import annotations

import struct

U8, U16, I32, U32, STRING, ARRAY, U64 = 0, 2, 5, 4, 8, 9, 10
_LETTERS = {U8: "B", U16: "H", U32: "I", I32: "i", U64: "Q"}


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: int | bytes) -> bytes:
    data = text(value) if isinstance(value, bytes) else struct.pack(f"<{_LETTERS[kind]}", value)
    return text(name) + struct.pack("<I", kind) + data


def texts(name: bytes, values: list[bytes], count: int | None = None) -> bytes:
    """An array of strings, of which there may be fewer than it says."""
    head = struct.pack("<IIQ", ARRAY, STRING, len(values) if count is None else count)
    return text(name) + head + b"".join(map(text, values))


def numbers(name: bytes, count: int) -> bytes:
    """An array of zeros, u32."""
    return text(name) + struct.pack("<IIQ", ARRAY, U32, count) + bytes(4 * count)


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def gguf(
    keys: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    n_keys: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(keys) if n_keys is None else n_keys,
    )
    header = struct.pack("<4sIQQ", b"GGUF", version, *counts) + b"".join([*keys, *tensors])
    return header + bytes(-len(header) % alignment) + data
