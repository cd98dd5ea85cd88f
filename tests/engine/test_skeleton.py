"""Stand-ins of model files: what the engine sees before and after, and that nothing is read."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from caravan.engine import skeleton
from caravan.engine.skeleton import Skeleton
from caravan.errors import ModelError
from e2e.processes import descriptors

pytestmark = pytest.mark.skipif(not skeleton.available(), reason="this system has no stand-ins")

PAGE = mmap.PAGESIZE
HEADER = 1000
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


class Mapping:
    """A file's mapping as the engine makes it: of the size that the file had when it was opened."""

    def __init__(self, path: bytes, fd: int = -1) -> None:
        self.fd = os.open(path, os.O_RDONLY) if fd < 0 else fd
        self.size = os.fstat(self.fd).st_size
        self.address = 0

    def map(self, size: int = 0) -> None:
        self.size = size or self.size
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        found = _LIBC.mmap(None, self.size, mmap.PROT_READ, flags, self.fd, 0)
        assert found != ctypes.c_void_p(-1).value
        self.address = found

    @property
    def data(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def resident(self) -> int:
        """Bytes of the file that are in memory."""
        pages = ctypes.create_string_buffer(-(-self.size // PAGE))
        assert _LIBC.mincore(self.address, self.size, pages) == 0
        return sum(byte & 1 for byte in pages.raw) * PAGE

    def close(self) -> None:
        os.close(self.fd)
        if self.address:
            assert _LIBC.munmap(self.address, self.size) == 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(i % 253 for i in range(20 * PAGE + 77)))
    return path


@pytest.fixture
def mapped() -> Iterator[list[Mapping]]:
    mappings: list[Mapping] = []
    yield mappings
    for mapping in mappings:
        mapping.close()


def opened(stand_ins: Skeleton, mapped: list[Mapping]) -> list[Mapping]:
    mapped += [Mapping(name) for name in stand_ins.names]
    return mapped


def test_the_engine_sees_header_and_size_and_then_all(path, mapped):
    real = path.read_bytes()
    with Skeleton([(path, HEADER)]) as stand_ins:
        (mapping,) = opened(stand_ins, mapped)
        assert os.pread(mapping.fd, HEADER, 0) == real[:HEADER]
        assert mapping.size == len(real)
        stand_ins.cut()
        mapping.map()
        assert not stand_ins.laid
        assert stand_ins.lay()
        assert stand_ins.laid
        assert mapping.data == real
        # the engine asks before every tensor
        assert stand_ins.lay()
    # what is closed is not what is mapped
    assert mapping.data == real


def test_the_stand_in_takes_no_memory(path, mapped):
    with Skeleton([(path, HEADER)]) as stand_ins:
        (mapping,) = opened(stand_ins, mapped)
        stand_ins.cut()
        stand_ins.cut()
        mapping.map()
        assert os.fstat(mapping.fd).st_blocks * 512 == PAGE
        assert stand_ins.lay()


def test_parts_are_laid_each_in_its_place(path, tmp_path, mapped):
    other = tmp_path / "other"
    other.write_bytes(b"GGUF" * PAGE)
    with Skeleton([(path, HEADER), (other, other.stat().st_size), (path, 4)]) as stand_ins:
        for mapping in opened(stand_ins, mapped):
            stand_ins.cut()
            mapping.map()
        assert stand_ins.lay()
    assert [mapping.data for mapping in mapped] == [
        path.read_bytes(),
        other.read_bytes(),
        path.read_bytes(),
    ]


def test_two_loads_do_not_take_each_others_mappings(path, tmp_path, mapped):
    other = tmp_path / "other"
    other.write_bytes(bytes(path.stat().st_size))
    with Skeleton([(path, HEADER)]) as one, Skeleton([(other, HEADER)]) as two:
        for stand_ins in (one, two):
            stand_ins.cut()
        first, second = Mapping(one.names[0]), Mapping(two.names[0])
        mapped += [first, second]
        first.map(path.stat().st_size)
        assert not two.lay()
        second.map(path.stat().st_size)
        assert two.lay()
        assert one.lay()
        assert (first.data, second.data) == (path.read_bytes(), other.read_bytes())


def test_advice_about_a_range_does_not_hide_the_mapping(path, mapped):
    with Skeleton([(path, HEADER)]) as stand_ins:
        (mapping,) = opened(stand_ins, mapped)
        stand_ins.cut()
        mapping.map()
        for first, last in ((3, 5), (9, 10)):
            begin, size = mapping.address + first * PAGE, (last - first) * PAGE
            assert _LIBC.madvise(begin, size, mmap.MADV_RANDOM) == 0
        assert stand_ins.lay()
        assert mapping.data == path.read_bytes()


def test_files_that_were_not_mapped_are_not_to_be_used(path, mapped):
    with Skeleton([(path, HEADER), (path, HEADER)]) as stand_ins:
        assert not stand_ins.lay()
        first, _ = opened(stand_ins, mapped)
        first.map()
        assert not stand_ins.lay()
        assert not stand_ins.laid


def test_a_mapping_of_a_part_is_refused(path, mapped):
    with Skeleton([(path, HEADER)]) as stand_ins:
        (mapping,) = opened(stand_ins, mapped)
        mapping.map(PAGE)
        with pytest.raises(ModelError, match="only a part"):
            stand_ins.lay()


def test_nothing_of_the_file_is_read(tmp_path, mapped):
    path = tmp_path / "big"
    size = 96 << 20
    with path.open("wb") as file:
        for _ in range(size >> 20):
            file.write(os.urandom(1024) * 1024)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    seen = Mapping(os.fsencode(path))
    mapped.append(seen)
    # without populating
    seen.address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, seen.fd, 0)
    if seen.resident() > size // 10:
        pytest.skip("this file system does not drop what it has in memory")
    before = seen.resident()
    with Skeleton([(path, 5000)]) as stand_ins:
        mapping = Mapping(stand_ins.names[0])
        mapped.append(mapping)
        stand_ins.cut()
        mapping.map()
        assert stand_ins.lay()
    # the header, and what the system reads with it
    assert seen.resident() - before < 4 << 20
    assert ctypes.string_at(mapping.address + size - 1024, 1024) == os.pread(
        seen.fd, 1024, size - 1024
    )


def test_descriptors_are_ours_alone_and_given_back(path):
    before = descriptors(os.getpid())
    for _ in range(50):
        with Skeleton([(path, HEADER), (path, HEADER)]) as stand_ins:
            for name in stand_ins.names:
                assert not os.get_inheritable(int(name.rpartition(b"/")[2]))
        stand_ins.close()
    assert descriptors(os.getpid()) == before


@pytest.mark.parametrize(
    ("other", "header", "told"),
    [
        ("nothing", 8, "cannot read .*nothing: No such file"),
        ("", 1 << 20, "it ends in its header"),
        ("..", 8, "cannot read .*: "),
    ],
)
def test_a_file_that_cannot_be_read(path, other, header, told):
    before = descriptors(os.getpid())
    second = path.parent / other if other else path
    with pytest.raises(ModelError, match=told):
        Skeleton([(path, HEADER), (second, header)])
    assert descriptors(os.getpid()) == before


def test_a_system_without_them(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert not skeleton.available()
