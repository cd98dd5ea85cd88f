"""One GGUF file cut into several, as llama.cpp's gguf-split names and marks them."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf

_ALIGNMENT = 32


def split_model(source: Path, stem: Path, files: int, *, empty_first: bool = False) -> list[Path]:
    """Write `STEM-00001-of-0000N.gguf` and so on; with `empty_first` the first has no tensors."""
    reader = gguf.GGUFReader(source)
    whole = source.read_bytes()
    (n_keys,) = struct.unpack_from("<Q", whole, 16)
    keys = whole[24 : reader.tensors[0].field.offset]
    holders = files - empty_first
    share = -(-len(reader.tensors) // holders)
    groups = [reader.tensors[share * i : share * (i + 1)] for i in range(holders)]
    if empty_first:
        groups.insert(0, [])
    written = []
    for i, group in enumerate(groups):
        path = stem.with_name(f"{stem.name}-{i + 1:05}-of-{files:05}.gguf")
        own = _key("split.no", "H", 2, i) + _key("split.count", "H", 2, files)
        own += _key("split.tensors.count", "i", 5, len(reader.tensors))
        first = i == 0
        head = struct.pack("<4sIQQ", b"GGUF", 3, len(group), 3 + (n_keys if first else 0))
        path.write_bytes(_part(head + (keys if first else b"") + own, group))
        written.append(path)
    return written


def _key(name: str, letter: str, kind: int, value: int) -> bytes:
    return _text(name) + struct.pack(f"<I{letter}", kind, value)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _part(head: bytes, tensors: list[gguf.ReaderTensor]) -> bytes:
    directory, data = bytearray(head), bytearray()
    for tensor in tensors:
        data += bytes(-len(data) % _ALIGNMENT)
        shape = [int(extent) for extent in tensor.shape]
        directory += _text(tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        directory += struct.pack("<IQ", int(tensor.tensor_type), len(data))
        data += tensor.data.tobytes()
    directory += bytes(-len(directory) % _ALIGNMENT)
    return bytes(directory + data)
