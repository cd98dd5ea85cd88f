"""Models without weights: what is written, what is refused, and how one is recognised."""

from __future__ import annotations

import os
import signal
import struct
from pathlib import Path

import gguf
import pytest

from caravan.errors import ModelError, UsageError
from caravan.models.fake import ARCHITECTURES, TYPES, FakeModel, described_size
from caravan.models.metadata import describe

SMALL = {"layers": 2, "embd": 256, "heads": 4, "kv_heads": 2, "ff": 512, "vocab": 300, "ctx": 64}


def data_start(header: bytes, path: Path) -> int:
    """Where the gguf package sees the data begin."""
    path.write_bytes(header)
    os.truncate(path, described_size(path))
    return int(gguf.GGUFReader(path).data_offset)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", TYPES)
def test_the_header_describes_consecutive_tensors_of_the_right_sizes(arch, kind, tmp_path):
    path = tmp_path / "model.gguf"
    model = FakeModel(arch=arch, type=kind, **SMALL)
    path.write_bytes(model.header())
    size = described_size(path)
    os.truncate(path, size)
    reader = gguf.GGUFReader(path)
    end = reader.data_offset
    for tensor in reader.tensors:
        assert tensor.data_offset == end and end % 32 == 0
        wanted = kind if len(tensor.shape) == 2 else "F32"
        assert tensor.tensor_type.name == wanted
        assert tuple(tensor.shape.tolist()) == model.tensors()[tensor.name]
        end += -(-tensor.n_bytes // 32) * 32
    assert end == size
    assert len(reader.tensors) == len(model.tensors())


def test_there_is_always_some_padding_before_the_data(tmp_path):
    """The loader must find the header's end before the data begins, whatever their lengths."""
    lengths = set()
    for vocab in range(300, 340):
        header = FakeModel(**{**SMALL, "vocab": vocab}).header()
        assert len(header) % 32 == 0 and header.endswith(b"\0")
        assert data_start(header, tmp_path / "model.gguf") == len(header)
        fields = gguf.GGUFReader(tmp_path / "model.gguf").tensors[-1].field
        lengths.add(len(header) - fields.offset - sum(part.nbytes for part in fields.parts))
    assert min(lengths) >= 1 and max(lengths) <= 32


def test_the_default_is_llama_70b(tmp_path):
    path = tmp_path / "model.gguf"
    FakeModel().write(path)
    info = describe(path)
    assert (info.architecture, info.layers, info.embedding, info.context) == (
        "llama",
        80,
        8192,
        8192,
    )
    assert info.file_type == "Q4_0" and info.fake
    assert info.parameters == 68_976_648_192
    assert 38.8e9 < info.size < 38.9e9
    assert path.stat().st_size < 1_000_000


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "F32"])
def test_the_file_type_is_one_that_llama_cpp_knows(kind, tmp_path):
    path = tmp_path / "model.gguf"
    FakeModel(type=kind, **SMALL).write(path)
    assert describe(path).file_type == {"Q4_K": "Q4_K_M", "Q6_K": "Q6_K", "F32": "ALL_F32"}[kind]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"arch": "gpt2"}, "'gpt2' is none of llama, qwen2"),
        ({"type": "Q9_9"}, "'Q9_9' is none of F32"),
        ({"layers": 0}, r"layers 0 is not in 1\.\.512"),
        ({"layers": 513}, r"layers 513 is not in"),
        ({"vocab": 100}, r"vocab 100 is not in 259\.\."),
        ({"ctx": 0}, "ctx 0 is not in"),
        ({"heads": 3, "kv_heads": 3}, "embd 256 is not a multiple of 6, twice the number of heads"),
        ({"kv_heads": 3}, "heads 4 is not a multiple of 3, the number of kv-heads"),
        ({"embd": 128, "type": "Q4_K"}, "embd 128 is not a multiple of 256, a block of Q4_K"),
        ({"ff": 500}, "ff 500 is not a multiple of 32, a block of Q4_0"),
    ],
)
def test_shapes_that_cannot_be_are_refused(wrong, why):
    with pytest.raises(UsageError, match=why):
        FakeModel(**{**SMALL, **wrong})


def test_other_files_are_none(tmp_path):
    path = tmp_path / "model.gguf"
    assert described_size(path) == 0
    path.write_bytes(b"GGUF")
    assert described_size(path) == 0
    header = FakeModel(**SMALL).header()
    path.write_bytes(header[: header.index(b"caravan.fake") + 16])
    assert described_size(path) == 0
    path.write_bytes(header.replace(b"caravan.fake", b"caravan.real"))
    assert described_size(path) == 0


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"precious")
    with pytest.raises(ModelError, match=r"model\.gguf exists already; --force overwrites it"):
        FakeModel(**SMALL).write(path)
    assert path.read_bytes() == b"precious"
    FakeModel(**SMALL).write(path, force=True)
    assert described_size(path) > path.stat().st_size


def test_what_cannot_be_written_is_told(tmp_path):
    if Path("/dev/full").exists():
        with pytest.raises(ModelError, match="cannot write /dev/full: the disk is full"):
            FakeModel(**SMALL).write(Path("/dev/full"), force=True)
        assert Path("/dev/full").exists()
    with pytest.raises(ModelError, match="No such file or directory"):
        FakeModel(**SMALL).write(tmp_path / "nowhere" / "model.gguf")
    with pytest.raises(ModelError, match=r"Is a directory|exists already"):
        FakeModel(**SMALL).write(tmp_path)


def test_a_damaged_header_is_told(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(FakeModel(**SMALL).header()[:5000])
    assert described_size(path) > 0
    with pytest.raises(ModelError, match=r"cut off or damaged"):
        describe(path)


def test_the_mark_holds_the_whole_size():
    header = FakeModel(**SMALL).header()
    at = header.index(b"caravan.fake") + len(b"caravan.fake")
    kind, size = struct.unpack_from("<IQ", header, at)
    assert kind == 10 and size > len(header)


def test_half_a_file_does_not_stay_behind(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "model.gguf"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(ModelError, match=r"cannot write .*model\.gguf: File too large"):
            FakeModel(**SMALL).write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert not path.exists()
