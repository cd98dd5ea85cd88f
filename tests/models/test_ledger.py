"""Digests that outlive a process, for as long as the file stays what it was."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from caravan.errors import ModelError
from caravan.models import sidecar
from caravan.models.digest import digest_of_bytes
from caravan.models.ledger import Ledger, known_header
from caravan.models.lock import locked
from caravan.models.tensors import read_header
from models import handmade

ONE, TWO = bytes(range(32)), bytes(range(32, 64))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    tensors = [handmade.tensor(b"a", (8,), 0, 0), handmade.tensor(b"b", (4,), 0, 32)]
    path.write_bytes(handmade.gguf([], tensors, bytes(48)))
    return path


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "digests"


@pytest.fixture
def saved(model: Path, kept: Path) -> Path:
    """The sidecar of a ledger that knows the first tensor's digest."""
    ledger = Ledger.open(model, kept)
    ledger.note("a", ONE)
    assert ledger.save()
    (path,) = sidecar.sidecars(kept)
    return path


def test_what_was_noted_is_there_the_next_time(model, kept, saved, monkeypatch):
    first = Ledger.open(model, kept)
    monkeypatch.setattr("caravan.models.ledger.parse_header", None)
    second = Ledger.open(model, kept)
    assert second.header == first.header == known_header(model, kept) == read_header(model)
    assert second.tensors == second.header.tensors
    assert (second.digest("a"), second.digest("b")) == (ONE, None)
    assert repr(second) == "<Ledger m.gguf: 1 of 2 digests>"


def test_the_cache_is_the_default(model, monkeypatch, tmp_path):
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "cache"))
    ledger = Ledger.open(model)
    ledger.note("b", TWO)
    assert ledger.save()
    assert len(sidecar.sidecars(tmp_path / "cache" / "digests")) == 1
    assert Ledger.open(model).digest("b") == TWO


def test_another_name_of_the_file_has_the_same_sidecar(model, kept, saved, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert Ledger.open(link, kept).digest("a") == ONE


def touch(path: Path) -> None:
    before = path.stat().st_mtime_ns
    os.utime(path, ns=(before, before + 1))


def grow(path: Path) -> None:
    before = path.stat()
    with path.open("ab") as file:
        file.write(b"\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    before = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)


def rewrite(path: Path) -> None:
    """As an image does that is laid over another one, or a copy that keeps times."""
    before = path.stat()
    # a file system's clock may tick as seldom as a hundred times a second
    while os.stat(path).st_ctime_ns == before.st_ctime_ns:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [touch, grow, replace, rewrite])
def test_a_file_that_changed_is_another_file(model, kept, saved, change):
    old = Ledger.open(model, kept)
    assert old.current()
    change(model)
    assert not old.current()
    assert not old.save()
    new = Ledger.open(model, kept)
    assert new.digest("a") is None
    new.note("b", TWO)
    assert new.save()
    again = Ledger.open(model, kept)
    assert (again.digest("a"), again.digest("b")) == (None, TWO)


def test_a_file_that_is_gone_is_not_current(model, kept):
    ledger = Ledger.open(model, kept)
    model.unlink()
    assert not ledger.current()
    assert not ledger.save()


def test_a_relative_path_stays_what_it_was(model, kept, tmp_path, monkeypatch):
    monkeypatch.chdir(model.parent)
    ledger = Ledger.open(Path(model.name), kept)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert ledger.current()


def test_two_that_save_keep_what_both_know(model, kept):
    first, second = Ledger.open(model, kept), Ledger.open(model, kept)
    first.note("a", ONE)
    second.note("b", TWO)
    assert first.save() and second.save()
    ledger = Ledger.open(model, kept)
    assert (ledger.digest("a"), ledger.digest("b")) == (ONE, TWO)


def test_many_that_save_at_once_keep_what_all_know(tmp_path, kept):
    path = tmp_path / "m.gguf"
    names = [f"t{i}" for i in range(20)]
    tensors = [handmade.tensor(name.encode(), (8,), 0, 32 * i) for i, name in enumerate(names)]
    path.write_bytes(handmade.gguf([], tensors, bytes(32 * len(names))))

    def one(name: str) -> None:
        ledger = Ledger.open(path, kept)
        ledger.note(name, ONE)
        assert ledger.save()

    threads = [threading.Thread(target=one, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [Ledger.open(path, kept).digest(name) for name in names] == [ONE] * len(names)


def test_a_sidecar_cut_off_anywhere_is_replaced(model, kept, saved):
    whole = saved.read_bytes()
    for length in range(0, len(whole), 7):
        saved.write_bytes(whole[:length])
        assert Ledger.open(model, kept).digest("a") is None
    ledger = Ledger.open(model, kept)
    ledger.note("b", TWO)
    assert ledger.save()
    assert Ledger.open(model, kept).digest("b") == TWO


def test_a_sidecar_with_one_wrong_bit_is_not_used(model, kept, saved):
    whole = saved.read_bytes()
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1
        saved.write_bytes(bytes(data))
        ledger = Ledger.open(model, kept)
        assert ledger.digest("a") is None
        assert list(ledger.tensors) == ["a", "b"]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(path="/elsewhere"),
        lambda data: data.update(size=float(data["size"])),
        lambda data: data.pop("inode"),
        lambda data: data.update(tensors=[]),
        lambda data: data.update(architecture=7),
        lambda data: data.update(layers="30"),
        lambda data: data.update(split=None),
        lambda data: data.update(splits=True),
        lambda data: data.update(start=-1),
        lambda data: data.update(start=data["end"]),
        lambda data: data.update(end=data["start"]),
        lambda data: data.pop("split_tensors"),
        lambda data: data["tensors"].update(a=[0, 1 << 40, ""]),
        lambda data: data["tensors"].update(a=[0, 8, ""]),
        lambda data: data["tensors"].update(a=[-8, 8, ""]),
        lambda data: data["tensors"].update(a=[data["start"], -8, ""]),
        lambda data: data["tensors"].update(a=[True, 8, ""]),
        lambda data: data["tensors"].update(a=["0", 8, ""]),
        lambda data: data["tensors"].update(a=[data["start"], 8]),
        lambda data: data["tensors"].update(a=[data["start"], 8, 1]),
        lambda data: data["tensors"].update(a=[data["start"], 8, "00"]),
        lambda data: data["tensors"].update(a=[data["start"], 8, "g" * 64]),
        lambda data: data["tensors"].update(a=None),
    ],
)
def test_nothing_in_a_sidecar_is_believed_unseen(model, kept, saved, change):
    """Even one whose checksum is right: another version may have written it."""
    data = json.loads(saved.read_bytes().partition(b"\n")[2])
    change(data)
    for body in (json.dumps(data).encode(), b"[" * 100_000, b"1", b"\xff"):
        checksum = digest_of_bytes(body).hex().encode()
        saved.write_bytes(sidecar._MARK + checksum + b"\n" + body)
        ledger = Ledger.open(model, kept)
        assert ledger.digest("a") is None
        assert [span.size for span in ledger.tensors.values()] == [32, 16]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
def test_a_pipe_in_its_place_is_replaced(model, kept, saved):
    saved.unlink()
    os.mkfifo(saved)
    ledger = Ledger.open(model, kept)
    assert ledger.digest("a") is None
    ledger.note("a", TWO)
    assert ledger.save()
    assert Ledger.open(model, kept).digest("a") == TWO


def test_what_cannot_be_written_is_no_error(model, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the directory should be")
    ledger = Ledger.open(model, blocked)
    ledger.note("a", ONE)
    assert not ledger.save()


def test_a_full_disk_leaves_nothing_behind(model, kept, saved, monkeypatch):
    ledger = Ledger.open(model, kept)
    ledger.note("b", TWO)
    write_bytes = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        write_bytes(path, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert not ledger.save()
    assert [path.suffix for path in kept.iterdir() if path.name != ".lock"] == [".digests"]
    assert Ledger.open(model, kept).digest("a") == ONE


@pytest.mark.skipif(sys.platform == "win32", reason="another way of locking")
def test_a_lock_that_somebody_keeps_delays_and_does_not_stop(model, kept, saved, monkeypatch):
    monkeypatch.setattr(sidecar, "_WAIT_SECONDS", 0.1)
    ledger = Ledger.open(model, kept)
    ledger.note("b", TWO)
    with locked(kept / ".lock"):
        assert ledger.save()
    assert Ledger.open(model, kept).digest("b") == TWO


def test_only_what_is_a_digest_of_a_tensor_is_noted(model, kept):
    ledger = Ledger.open(model, kept)
    for name, digest in (("c", ONE), ("a", b"short")):
        with pytest.raises(ModelError):
            ledger.note(name, digest)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"GGUF", b"GGUF" + bytes(100)])
def test_what_is_no_model_has_no_ledger(tmp_path, kept, data):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=str(path)):
        Ledger.open(path, kept)


def test_a_file_that_ends_before_its_data_has_no_ledger(model, kept):
    os.truncate(model, model.stat().st_size - 1)
    with pytest.raises(ModelError, match="is cut off"):
        Ledger.open(model, kept)


def test_a_header_without_data_is_known_too(model, kept):
    os.truncate(model, model.stat().st_size - 1)
    assert known_header(model, kept) == read_header(model)


def test_a_part_without_tensors(tmp_path, kept):
    path = tmp_path / "m.gguf"
    path.write_bytes(handmade.gguf([handmade.key(b"split.count", handmade.U16, 2)], []))
    ledger = Ledger.open(path, kept)
    assert ledger.save()
    again = Ledger.open(path, kept)
    assert (again.tensors, again.header.splits, again.header) == ({}, 2, ledger.header)


def test_a_name_that_is_no_text(model, kept):
    odd = model.parent / os.fsdecode(b"\xff\xfe.gguf")
    try:
        model.rename(odd)
    except OSError:
        pytest.skip("no such names here")
    ledger = Ledger.open(odd, kept)
    ledger.note("a", ONE)
    assert ledger.save()
    assert Ledger.open(odd, kept).digest("a") == ONE
