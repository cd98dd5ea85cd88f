"""Files of a model, read in ranges: what is there, what is remembered, and files that change."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from caravan.errors import ModelError
from caravan.llm.weights import WeightFiles
from caravan.models.digest import digest_of_bytes
from e2e.processes import descriptors
from models import handmade

A = bytes(range(1, 41))
B = bytes(range(100, 116))


def never() -> bool:
    return False


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "cache"))


def write(path: Path, **tensors: bytes) -> Path:
    """A GGUF file with these tensors, f32, one after the other."""
    entries, data = [], b""
    for name, content in tensors.items():
        data += bytes(-len(data) % 32)
        entries.append(handmade.tensor(name.encode(), (len(content) // 4,), 0, len(data)))
        data += content
    path.write_bytes(handmade.gguf([], entries, data))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "m.gguf", a=A, b=B)


@pytest.fixture
def files(path: Path):
    files = WeightFiles([path])
    yield files
    files.close()


def content(files: WeightFiles, name: str) -> bytes:
    file, span = files.find(name)
    target = memoryview(bytearray(span.size))
    files.read_into(file, span.offset, target)
    return bytes(target)


def test_tensors_are_read_where_they_lie(files):
    assert (files.names(), files.size) == (["a", "b"], 56)
    assert (content(files, "a"), content(files, "b")) == (A, B)
    file, span = files.find("a")
    middle = memoryview(bytearray(7))
    files.read_into(file, span.offset + 3, middle)
    assert bytes(middle) == A[3:10]
    files.read_into(file, span.offset, memoryview(b""))
    assert files.find("c") is None
    assert repr(files) == "<WeightFiles m.gguf: 2 tensors>"


def test_a_system_that_reads_little_at_a_time(files, monkeypatch):
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: whole(fd, [parts[0][:3]], at))
    assert content(files, "a") == A


def test_parts_are_one_model(tmp_path):
    paths = [
        write(tmp_path / "1.gguf"),
        write(tmp_path / "2.gguf", a=A),
        write(tmp_path / "3.gguf", b=B),
    ]
    files = WeightFiles(paths)
    assert (files.names(), files.size) == (["a", "b"], 56)
    assert [files.find(name).file for name in "ab"] == [1, 2]
    assert (content(files, "a"), content(files, "b")) == (A, B)
    # one without tensors has a header all the same
    sizes = [path.stat().st_size for path in paths]
    assert files.headers() == list(zip(paths, [24, sizes[1] - 40, sizes[2] - 16], strict=True))
    assert files.read_digest("b", never) == digest_of_bytes(B)
    files.save()
    files.close()
    again = WeightFiles(paths)
    assert [again.digest(name) for name in "ab"] == [None, digest_of_bytes(B)]
    again.close()


def test_a_digest_is_read_once(files, path):
    assert files.digest("a") is None
    assert files.read_digest("a", never) == files.digest("a") == digest_of_bytes(A)
    files.save()
    other = WeightFiles([path])
    assert (other.digest("a"), other.digest("b")) == (digest_of_bytes(A), None)
    other.close()


def test_nothing_is_saved_where_nothing_was_read(files, tmp_path):
    files.save()
    assert not (tmp_path / "cache").exists()


def test_reading_a_digest_can_be_stopped(files):
    assert files.read_digest("a", lambda: True) is None
    assert files.digest("a") is None


def test_a_file_that_becomes_shorter(files, path):
    os.truncate(path, path.stat().st_size - 20)
    with pytest.raises(ModelError, match=r"m\.gguf became shorter while it was loaded"):
        content(files, "b")
    with pytest.raises(ModelError, match=r"m\.gguf became shorter while it was loaded"):
        files.read_digest("b", never)
    with pytest.raises(ModelError, match=r"m\.gguf was changed while it was loaded"):
        files.check_unchanged()


def test_a_disk_that_fails(files, monkeypatch):
    def fail(fd, parts, at):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ModelError, match=r"cannot read .*m\.gguf: Input/output error"):
        content(files, "a")
    with pytest.raises(ModelError, match=r"Input/output error"):
        files.read_digest("a", never)


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    # by a program that was quicker than the file system's clock
    os.utime(path, ns=(1, 1))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("change", [overwritten, replaced, Path.unlink])
def test_digests_of_a_file_that_was_changed_are_not_kept(files, path, change, tmp_path):
    files.check_unchanged()
    files.read_digest("a", never)
    change(path)
    with pytest.raises(ModelError, match=r"m\.gguf was changed while it was loaded"):
        files.check_unchanged()
    files.save()
    assert not (tmp_path / "cache").exists()


def test_only_blocks_are_fetched(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *values: told.append(values[1:]))
    names = {"token_embd.weight": A, "blk.0.ffn_up.weight": B}
    files = WeightFiles([write(tmp_path / "m.gguf", **names)])
    files.fetch(files.names())
    assert told == [(*files.find("blk.0.ffn_up.weight").span, os.POSIX_FADV_WILLNEED)]
    files.close()


@pytest.mark.parametrize("second", [b"no model", None, b"GGUF"])
def test_a_part_that_is_none_leaves_nothing_open(path, tmp_path, second):
    other = tmp_path / "other.gguf"
    if second is not None:
        other.write_bytes(second)
    before = descriptors(os.getpid())
    with pytest.raises(ModelError, match=r"other\.gguf"):
        WeightFiles([path, other])
    assert descriptors(os.getpid()) == before


def test_closing_twice(files):
    files.close()
    files.close()
