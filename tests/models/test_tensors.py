"""Where the tensors of a GGUF file lie, compared with the gguf package, and all ways to get it
wrong."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import gguf as reference
import pytest

from caravan.errors import ModelError
from caravan.models.tensors import Span, read_header, read_tensors
from models import handmade
from models.handmade import ARRAY, STRING, U8, U16, U32, U64

F32, Q4_0 = 0, 2


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture
def small() -> bytes:
    """Two tensors: 4x2 numbers in F32, 64 in Q4_0."""
    return handmade.gguf(
        [
            handmade.key(b"general.architecture", STRING, b"llama"),
            handmade.texts(b"tokens", [b"a", b"", b"long enough"]),
            handmade.numbers(b"kinds", 3),
            handmade.key(b"llama.block_count", U32, 7),
        ],
        [handmade.tensor(b"a", (4, 2), F32, 0), handmade.tensor(b"b", (64,), Q4_0, 32)],
        bytes(32 + 36),
    )


@pytest.mark.parametrize("version", [2, 3])
def test_the_sample_reads_as_the_gguf_package_reads_it(smollm2, tmp_path, version):
    reader = reference.GGUFReader(smollm2)
    expected = {tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in reader.tensors}
    path = tmp_path / "other.gguf"
    data = bytearray(smollm2.read_bytes())
    data[4:8] = struct.pack("<I", version)
    header = read_header(write(path, bytes(data)))
    assert header.tensors == expected == read_tensors(smollm2)
    assert (header.architecture, header.layers) == ("llama", 30)
    assert (header.split, header.splits, header.split_tensors) == (0, 1, None)
    assert header.end == smollm2.stat().st_size


def test_a_file_from_scratch(small, tmp_path):
    path = write(tmp_path / "m.gguf", small)
    start = len(small) - 68
    header = read_header(path)
    assert header.tensors == {"a": Span(start, 32), "b": Span(start + 32, 36)}
    assert (header.architecture, header.layers) == ("llama", 7)
    assert (header.start, header.end) == (start, len(small))


def test_the_alignment_of_the_file_counts(tmp_path):
    data = handmade.gguf(
        [handmade.key(b"general.alignment", U32, 256)],
        [handmade.tensor(b"a", (1,), F32, 0), handmade.tensor(b"b", (1,), F32, 256)],
        bytes(260),
        alignment=256,
    )
    assert read_tensors(write(tmp_path / "m.gguf", data)) == {"a": (256, 4), "b": (512, 4)}


def test_the_keys_of_a_split(tmp_path):
    keys = [
        handmade.key(b"split.no", U16, 2),
        handmade.key(b"split.count", U16, 3),
        handmade.key(b"split.tensors.count", handmade.I32, 40),
    ]
    data = handmade.gguf(keys, [], alignment=1)
    header = read_header(write(tmp_path / "m.gguf", data))
    # without tensors there is no padding
    assert header.start == header.end == len(data)
    assert (header.split, header.splits, header.split_tensors) == (2, 3, 40)
    assert header.tensors == {}


def test_a_header_of_many_pieces(tmp_path):
    """Strings and arrays across the pieces in which the header is read, and beyond whole ones."""
    chance = random.Random(5)
    words = [bytes(chance.randrange(40)) for _ in range(150_000)]
    keys = [
        handmade.texts(b"tokens", words),
        handmade.key(b"template", STRING, bytes(5_000_000)),
        handmade.numbers(b"scores", 700_000),
        handmade.key(b"general.architecture", STRING, b"x"),
    ]
    tensors = [handmade.tensor(b"t%d" % i, (8,), F32, 32 * i) for i in range(3000)]
    data = handmade.gguf(keys, tensors, bytes(32 * 3000))
    header = read_header(write(tmp_path / "m.gguf", data))
    assert header.architecture == "x"
    assert header.tensors["t2999"] == (len(data) - 32, 32)
    assert len(header.tensors) == 3000


def test_a_file_cut_off_anywhere(small, tmp_path):
    path = tmp_path / "m.gguf"
    for length in range(len(small)):
        write(path, small[:length])
        with pytest.raises(ModelError) as caught:
            read_tensors(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    read_tensors(write(path, small))


def test_a_header_without_its_data_is_a_header(small, tmp_path):
    path = write(tmp_path / "m.gguf", small[:-1])
    assert read_header(path).end == len(small)
    with pytest.raises(ModelError, match=f"is cut off: {len(small) - 1} of {len(small)} bytes"):
        read_tensors(path)


A_TENSOR = handmade.tensor(b"a", (4,), F32, 0)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (handmade.gguf([], [], version=1), "is GGUF version 1, which this version"),
        (handmade.gguf([], [], version=4), "is GGUF version 4, which this version"),
        (handmade.gguf([], [], version=3 << 24), "is a big-endian GGUF file"),
        (handmade.gguf([], [], n_keys=1 << 63), "is damaged: its header counts 92233"),
        (handmade.gguf([], [], n_tensors=1 << 63), "is damaged: its header counts 92233"),
        (handmade.gguf([], [], n_keys=2), "is cut off"),
        (handmade.gguf([], [], n_tensors=2), "is cut off"),
        (handmade.gguf([handmade.key(b"k", 13, b"")], []), "is damaged: type 13 of the value"),
        (handmade.gguf([handmade.texts(b"k", [], 1 << 62)], []), "is cut off"),
        (handmade.gguf([handmade.texts(b"k", [b"x"], 1 << 62)], []), "is cut off"),
        (
            handmade.gguf([handmade.text(b"k") + struct.pack("<IIQ", ARRAY, U64, 1 << 62)], []),
            "is cut off",
        ),
        (
            handmade.gguf([handmade.text(b"k") + struct.pack("<IIQ", ARRAY, ARRAY, 1)], []),
            "is damaged: type 9 of the array",
        ),
        (handmade.gguf([struct.pack("<Q", (1 << 64) - 1)], []), "is damaged: a name of 184467"),
        (
            handmade.gguf([handmade.text(b"k") + struct.pack("<IQ", STRING, 1 << 63)], []),
            "is cut off",
        ),
        (handmade.gguf([handmade.key(b"general.alignment", U32, 0)], []), "its alignment is 0"),
        (handmade.gguf([handmade.key(b"general.alignment", U32, 48)], []), "alignment is 48"),
        (handmade.gguf([handmade.key(b"general.alignment", U64, 1 << 60)], []), "alignment is 11"),
        (handmade.gguf([], [A_TENSOR] * 2, bytes(16)), "two tensors have the name 'a'"),
        (handmade.gguf([], [handmade.tensor(b"a", (4,), 4, 0)], bytes(64)), "'a' has type 4"),
        (handmade.gguf([], [handmade.tensor(b"a", (4,), 99, 0)], bytes(64)), "'a' has type 99"),
        (handmade.gguf([], [handmade.tensor(b"a", (48,), Q4_0, 0)], bytes(64)), "in blocks of 32"),
        (handmade.gguf([], [handmade.tensor(b"a", (1,) * 5, 0, 0)], bytes(4)), "has 5 dimensions"),
        (handmade.gguf([], [handmade.tensor(b"a", (4,), 0, 8)], bytes(64)), "begins at 8, not"),
        (handmade.gguf([], [handmade.tensor(b"\xff", (4,), 0, 0)], bytes(16)), "is no text"),
        (handmade.gguf([], [handmade.tensor(b"a", (1 << 63,) * 4, 0, 0)]), "is cut off"),
        (handmade.gguf([], [handmade.tensor(b"a", (4,), 0, (1 << 64) - 32)]), "is cut off"),
        (b"PK\x03\x04 and so on", r"is not a GGUF file: it begins with 'PK\\x03\\x04'"),
        (b"", "is not a GGUF file: it is empty"),
    ],
)
def test_what_is_wrong_with_it(tmp_path, data, told):
    path = write(tmp_path / "m.gguf", data)
    with pytest.raises(ModelError, match=told) as caught:
        read_tensors(path)
    assert str(caught.value).startswith(str(path))


def test_a_hostile_header_ends_soon(tmp_path):
    """A file of a terabyte that is a hole: its strings have no length and there is no end."""
    path = write(tmp_path / "m.gguf", handmade.gguf([handmade.texts(b"k", [], 1 << 40)], []))
    try:
        os.truncate(path, 1 << 40)
    except OSError:
        pytest.skip("no files with holes here")
    with pytest.raises(ModelError, match="its header is longer than 256 MiB"):
        read_header(path)


def test_any_bytes_at_all_are_a_header_or_an_error(small, tmp_path):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    path = tmp_path / "m.gguf"
    for _ in range(2000):
        data = bytearray(small)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(4, len(data) - 68)
            data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        write(path, bytes(data))
        try:
            header = read_header(path)
        except ModelError as exc:
            assert str(path) in str(exc)
        else:
            assert all(span.offset > 0 and span.size >= 0 for span in header.tensors.values())


@pytest.mark.parametrize("kind", ["directory", "pipe", "missing"])
def test_what_is_no_file(tmp_path, kind):
    path = tmp_path / "m.gguf"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(ModelError, match=f"cannot read {path}: "):
        read_tensors(path)


def test_one_byte_numbers_are_no_trouble(tmp_path):
    keys = [handmade.key(b"x", U8, 255), handmade.key(b"split.count", U8, 0)]
    assert read_header(write(tmp_path / "m.gguf", handmade.gguf(keys, []))).splits == 1
