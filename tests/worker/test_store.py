"""The files of the weight cache: what is an entry, what is evicted, what is damaged."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from blake3 import blake3

from caravan.wire.fnv import fnv1a_64
from caravan.worker.store import Store, default_limit

RNG = np.random.default_rng(5)


def put(store: Store, data: bytes, mtime: float | None = None) -> str:
    digest = blake3(data).hexdigest()
    with store.begin(digest, len(data)) as part:
        part.write(data)
        part.commit()
    if mtime is not None:
        os.utime(store.path(digest), (mtime, mtime))
    return digest


def digests(store: Store) -> list[str]:
    return [entry.digest for entry in store.entries()]


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "weights")


def test_what_is_stored_is_found(store):
    data = RNG.bytes(3 << 20)
    digest = put(store, data)
    with store.find(digest, len(data)) as file:
        assert file.read() == data
    assert store.path(digest) == store.directory / "tensors" / digest[:2] / digest
    (entry,) = store.entries()
    assert (entry.digest, entry.size, entry.path) == (digest, len(data), store.path(digest))
    assert store.verify(entry)


def test_an_empty_or_missing_directory_has_no_entries(tmp_path):
    assert Store(tmp_path).entries() == []
    missing = Store(tmp_path / "no")
    assert missing.entries() == []
    assert missing.find("ab" * 32, 1) is None
    assert missing.make_room(1)
    missing.sweep()


def test_nothing_appears_without_commit(store):
    digest = blake3(b"data").hexdigest()
    with store.begin(digest, 4) as part:
        part.write(b"da")
        assert store.find(digest, 4) is None
        assert store.entries() == []
    assert not list(store.path(digest).parent.iterdir())


def test_two_may_write_the_same(store):
    digest = blake3(b"data").hexdigest()
    with store.begin(digest, 4) as one, Store(store.directory).begin(digest, 4) as two:
        for part in (one, two):
            part.write(b"data")
        one.commit()
        with store.find(digest, 4) as file:
            two.commit()
            assert file.read() == b"data"
    assert [path.name for path in store.path(digest).parent.iterdir()] == [digest]


def test_entries_of_both_kinds_the_least_recently_used_first(store):
    store.directory.mkdir()
    cpp = store.directory / f"{fnv1a_64(b'cpp'):016x}"
    cpp.write_bytes(b"cpp")
    os.utime(cpp, (200, 200))
    new, old = put(store, b"new", 300), put(store, b"old", 100)
    assert digests(store) == [old, cpp.name, new]
    assert all(store.verify(entry) for entry in store.entries())


def test_what_is_no_entry_is_left_alone(store):
    digest = put(store, b"data")
    folder = store.path(digest).parent
    strangers = [
        store.directory / "README",
        store.directory / digest,
        folder / "short",
        folder / ("0" if digest[0] != "0" else "1").ljust(64, "0"),
        folder / f"{digest}.0123456789abcdef.part",
        store.directory / "tensors" / "xyz",
    ]
    for path in strangers:
        path.write_bytes(b"?")
    (folder / (digest[:2] + "d" * 62)).mkdir()
    (folder / (digest[:2] + "e" * 62)).symlink_to(store.path(digest))
    (store.directory / ("0" * 16)).symlink_to("nowhere")
    os.mkfifo(folder / (digest[:2] + "f" * 62))
    assert digests(store) == [digest]
    store.limit = 4
    assert store.make_room(4)
    assert digests(store) == []
    assert all(path.exists() for path in strangers)


def test_entries_are_removed(store):
    digest = put(store, b"data")
    (entry,) = store.entries()
    store.remove(entry)
    assert not store.path(digest).exists()
    store.remove(entry)


@pytest.mark.parametrize("content", [b"datA", b"", b"data!", b"dat"])
def test_damage_is_noticed(store, content):
    digest = put(store, b"data")
    store.path(digest).write_bytes(content)
    (entry,) = store.entries()
    assert not store.verify(entry)


def test_damage_of_a_file_of_llama_cpp_is_noticed(store):
    store.directory.mkdir()
    (store.directory / f"{fnv1a_64(b'cpp'):016x}").write_bytes(b"c++")
    (entry,) = store.entries()
    assert not store.verify(entry)


@pytest.mark.parametrize("content", [b"", b"dat", b"data!"])
def test_a_file_of_another_size_goes(store, content):
    digest = put(store, b"data")
    store.path(digest).write_bytes(content)
    assert store.find(digest, 4) is None
    assert not store.path(digest).exists()


def test_links_and_pipes_are_not_opened(store, tmp_path):
    digest = put(store, b"data")
    path = store.path(digest)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert store.find(digest, 4) is None
    path.unlink()
    os.mkfifo(path)
    assert store.find(digest, 4) is None
    assert path.exists()


# the bound


def test_the_least_recently_used_go_first(store):
    a, b, c = (put(store, bytes([k]) * 100, k + 1) for k in range(3))
    store.limit = 300
    with store.find(a, 100) as file:
        store.touch(file)
    d = put(store, bytes([9]) * 100)
    assert sorted(digests(store)) == sorted([a, c, d])
    assert not store.path(b).exists()


def test_what_is_bigger_than_the_bound_evicts_nothing(store):
    a = put(store, bytes(100))
    store.limit = 150
    assert store.begin(blake3(b"big").hexdigest(), 151) is None
    assert digests(store) == [a]


def test_the_bound_holds_however_much_is_stored(store):
    store.limit = 1000
    for k in range(60):
        put(store, bytes([k]) * 90)
        assert sum(entry.size for entry in store.entries()) <= 1000
    assert len(digests(store)) == 11


def test_what_others_store_counts_too(tmp_path):
    ours, theirs = Store(tmp_path, 1600), Store(tmp_path, 1600)
    for k in range(40):
        put(ours, bytes([k]) * 100)
        put(theirs, bytes([k, 1]) * 50)
    # each may be behind by what makes it look again
    assert sum(entry.size for entry in ours.entries()) <= 1600 + 2 * 100


def test_what_is_in_use_stays(store):
    store.limit = 250
    a, b = put(store, b"a" * 100, 1), put(store, b"b" * 100, 2)
    store.hold(a, 1)
    store.hold(a, 2)
    store.hold(b, 2)
    assert store.begin(blake3(b"c").hexdigest(), 100) is None
    store.let_go(1)
    assert store.begin(blake3(b"c").hexdigest(), 100) is None
    store.let_go(2)
    store.let_go(3)
    c = put(store, b"c" * 100)
    assert digests(store) == [b, c]


def test_an_open_file_may_be_evicted(store):
    a = put(store, b"a" * 100)
    with store.find(a, 100) as file:
        store.limit = 100
        put(store, b"b" * 100)
        assert not store.path(a).exists()
        assert file.read() == b"a" * 100


def test_by_default_half_of_what_is_free_is_added(store, monkeypatch):
    put(store, bytes(1000))
    usage = SimpleNamespace(free=6000)
    monkeypatch.setattr("caravan.worker.store.shutil.disk_usage", lambda path: usage)
    assert default_limit(store.directory) == 4000


def test_what_killed_processes_left_is_swept_away(store):
    digest = put(store, b"data")
    folder = store.path(digest).parent
    stale = [store.directory / "0.1.part", folder / f"{digest}.1.part"]
    fresh = [store.directory / "0.2.part", folder / f"{digest}.2.part"]
    for path in (*stale, *fresh):
        path.touch()
    for path in (*stale, store.path(digest)):
        os.utime(path, (0, 0))
    store.sweep()
    assert not any(path.exists() for path in stale)
    assert all(path.exists() for path in (*fresh, store.path(digest)))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
def test_a_directory_without_permissions_is_no_error(store):
    digest = put(store, b"data")
    folder: Path = store.path(digest).parent
    folder.chmod(0)
    try:
        assert store.find(digest, 4) is None
        assert store.entries() == []
        assert not store.discard(store.path(digest))
        with pytest.raises(OSError, match="denied"):
            store.begin(digest, 4)
    finally:
        folder.chmod(0o700)
