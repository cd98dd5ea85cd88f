"""LOAD: weights that the worker's machine has itself. Content decides."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from caravan.trace.spans import Kind
from caravan.wire.commands import EXT, LOAD_ENTRY, Ext
from caravan.wire.extension import MAX_LOAD, Source, Status
from caravan.wire.records import SPAN
from caravan.worker import intake
from caravan.worker.ext_channel import MAX_LOADING, ExtChannel
from caravan.worker.library import Library
from caravan.worker.loader import Loader
from caravan.worker.local import Worker
from caravan.worker.store import Store
from models import handmade
from wired import PATIENCE, Side, wait_until
from worker.fakes import FakeDevice
from worker.raw_client import ExtClient
from worker.shelf import Shelf, digest_of
from worker.test_channels import Peer, hold, serving
from worker.test_store import put

NONE, DISK, CACHE = Source.NONE, Source.DISK, Source.CACHE
A, B, C = (np.random.default_rng(k).bytes(300_000) for k in range(3))


def entry(address: int, data: bytes, name: str = "t", digest: bytes | None = None) -> bytes:
    return LOAD_ENTRY.pack(address, len(data), digest or digest_of(data), name.encode())


def ask(peer: Peer, *entries: bytes) -> int:
    return peer.ext(Ext.LOAD, len(entries), tail=b"".join(entries))


def load(peer: Peer, *entries: bytes) -> list[int]:
    seq = ask(peer, *entries)
    number, status, answered, body = peer.answer()
    assert (number, status, answered) == (Ext.LOAD, 0, seq), body
    return list(body)


class Site:
    """A connection to fake devices, on a machine with models and a cache."""

    def __init__(self, path: Path, *devices: FakeDevice) -> None:
        (path / "models").mkdir()
        self.shelf = Shelf(path / "models")
        self.store = Store(path / "weights")
        self.devices = devices
        self.loader = Loader(self.shelf.library, self.store)
        self.peer: Peer
        self.base = 0

    def memory(self, offset: int = 0, size: int = len(A)) -> bytes:
        return bytes(self.devices[0].buffers[0].data[offset : offset + size])


@pytest.fixture(params=[True, False], ids=["host", "hidden"])
def site(request, tmp_path) -> Iterator[Site]:
    site = Site(tmp_path, FakeDevice(host=request.param))
    with serving(ExtChannel, site.devices, site.loader) as (peer, made):
        peer.lane = made[0]
        site.peer = peer
        site.base = peer.alloc(1 << 20)
        yield site
    site.loader.close()


def test_it_is_read_from_a_model_directory(site):
    ledger = site.shelf.add("m.gguf", u=B, t=A)
    assert load(site.peer, entry(site.base + 64, A)) == [DISK]
    assert site.memory(64) == A
    assert ledger.digests == {"t": digest_of(A)}
    assert ledger.saved == 1
    assert not site.store.directory.exists()


def test_it_is_read_from_the_cache(site):
    digest = put(site.store, A, mtime=1000)
    assert load(site.peer, entry(site.base, A)) == [CACHE]
    assert site.memory() == A
    assert site.store.path(digest).stat().st_mtime > 1000


def test_a_model_directory_comes_first(site):
    put(site.store, A)
    site.shelf.add("m.gguf", t=A)
    assert load(site.peer, entry(site.base, A)) == [DISK]


def test_each_tensor_has_its_own_answer(site):
    site.shelf.add("m.gguf", t=A)
    put(site.store, B)
    got = load(
        site.peer,
        entry(site.base, A),
        entry(site.base + 300_000, C, "c"),
        entry(site.base + 600_000, B, "b"),
    )
    assert got == [DISK, NONE, CACHE]
    assert site.memory() == A
    assert site.memory(600_000) == B
    assert site.peer.lane.counters.bytes_loaded == 600_000
    assert site.peer.lane.counters.bytes_in == 0


def test_no_entries_no_answers(site):
    assert load(site.peer) == []


def test_a_name_alone_is_nothing(site):
    """Names and sizes are known to everybody: nothing of what lies there is to be seen."""
    ledger = site.shelf.add("m.gguf", t=B)
    before = site.memory()
    assert load(site.peer, entry(site.base, A)) == [NONE]
    assert ledger.digests == {"t": digest_of(B)}
    assert site.memory() == before


def test_after_a_wrong_place_the_others_are_tried(site):
    site.shelf.add("m1.gguf", t=B)
    site.shelf.add("m2.gguf", t=C).digests["t"] = digest_of(A)
    put(site.store, A)
    assert load(site.peer, entry(site.base, A)) == [CACHE]
    assert site.memory() == A


@pytest.mark.parametrize("content", [A[:-1] + b"?", A[:-1], A + b"?", b""])
def test_a_damaged_cache_entry_is_removed_and_never_used(site, content, capsys):
    digest = put(site.store, A)
    path = site.store.path(digest)
    path.write_bytes(content)
    assert load(site.peer, entry(site.base, A)) == [NONE]
    assert not path.exists()
    assert f"removed '{path}'" in capsys.readouterr().err


@pytest.mark.parametrize("size", [0, 1, len(A) - 1, len(A) + 1])
def test_a_head_that_is_wrong_about_a_size_damages_no_cache(site, size, capsys):
    digest = put(site.store, A)
    wrong = LOAD_ENTRY.pack(site.base, size, digest_of(A), b"t")
    assert load(site.peer, wrong) == [NONE]
    assert load(site.peer, entry(site.base, A)) == [CACHE]
    assert site.store.path(digest).exists()
    assert not capsys.readouterr().err


def shortened(path: Path) -> None:
    os.truncate(path, 1000)


def removed(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [shortened, removed, replaced, pipe], ids=lambda f: f.__name__)
def test_a_model_file_that_changes_is_a_miss(site, change):
    ledger = site.shelf.add("m.gguf", s=B, t=A)
    assert load(site.peer, entry(site.base, B, "s")) == [DISK]
    change(ledger.path)
    assert load(site.peer, entry(site.base, A)) == [NONE]
    assert "t" not in ledger.digests


@pytest.fixture
def meddling(site, monkeypatch) -> None:
    """While the worker reads, the head writes to the same memory, as SET and another LOAD can."""
    preadv = os.preadv

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        got = preadv(fd, buffers, offset)
        if site.devices[0].buffers[0].view is not None:
            site.devices[0].buffers[0].data[: len(B)] = B
        return got

    monkeypatch.setattr(intake.os, "preadv", read)


@pytest.mark.parametrize("known", [None, A], ids=["unknown", "known"])
def test_what_a_head_writes_meanwhile_is_not_taken_for_the_files(site, known, meddling):
    ledger = site.shelf.add("m.gguf", t=A)
    if known is not None:
        ledger.digests["t"] = digest_of(known)
    load(site.peer, entry(site.base, B))
    load(site.peer, entry(site.base, A))
    assert ledger.digests == {"t": digest_of(A)}


def test_what_a_head_writes_meanwhile_damages_no_cache(site, meddling):
    digest = put(site.store, A)
    load(site.peer, entry(site.base, A))
    assert site.store.path(digest).exists()


def test_many_at_a_time(site):
    tensors = {f"t{k}": bytes([k]) * 1000 for k in range(256)}
    site.shelf.add("m.gguf", **tensors)
    entries = [
        entry(site.base + 1000 * k, data, name) for k, (name, data) in enumerate(tensors.items())
    ]
    for _ in range(3):
        assert load(site.peer, *entries) == [DISK] * MAX_LOAD
    assert site.memory(0, 256_000) == b"".join(tensors.values())


def test_without_sources_nothing_is_found():
    with serving(ExtChannel, [FakeDevice()]) as (peer, _):
        base = peer.alloc(1 << 20)
        assert load(peer, entry(base, A), entry(base, B)) == [NONE, NONE]


@pytest.mark.parametrize(
    "payload",
    [
        struct.pack("<I", 1),
        struct.pack("<I", 2) + entry(1 << 40, A),
        struct.pack("<I", MAX_LOAD + 1) + (MAX_LOAD + 1) * entry(1 << 40, A),
        struct.pack("<I", 1) + entry(5 << 40, A),
        struct.pack("<I", 1) + entry((1 << 40) + (1 << 20), A),
        struct.pack("<I", 1) + entry(0, A),
        struct.pack("<I", 1) + LOAD_ENTRY.pack(1 << 40, 1, bytes(32), b"\xff\xfe"),
        struct.pack("<I", 1) + LOAD_ENTRY.pack(1 << 40, 1, bytes(32), b"a\nb"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(site, payload):
    seq = site.peer.ext(Ext.LOAD, *struct.unpack("<I", payload[:4]), tail=payload[4:])
    number, status, answered, body = site.peer.answer()
    assert (number, status, answered) == (Ext.LOAD, Status.BAD_REQUEST, seq)
    assert body
    # the connection goes on
    assert load(site.peer, entry(site.base, A)) == [NONE]


def test_a_buffer_of_another_device_is_refused(tmp_path):
    site = Site(tmp_path, FakeDevice(0), FakeDevice(1))
    with serving(ExtChannel, site.devices, site.loader) as (peer, made):
        other = made[1].buffers.allocate(site.devices[1], 1000)
        ask(peer, entry(other.base, b"x" * 10))
        assert peer.answer()[1] == Status.BAD_REQUEST
    site.loader.close()


def test_what_the_host_can_reach_is_loaded_while_the_device_computes(site):
    site.shelf.add("m.gguf", t=A)
    hold(site.peer, site.devices[0], site.base + 500_000)
    fence = site.peer.ext(Ext.FENCE)
    question = ask(site.peer, entry(site.base, A))
    if site.devices[0].buffers[0].view is None:
        site.devices[0].gate.set()
        answers = {site.peer.answer()[2] for _ in range(2)}
        assert answers == {fence, question}
    else:
        assert site.peer.answer()[2:] == (question, bytes([DISK]))
        site.devices[0].gate.set()
        assert site.peer.answer()[2] == fence
    assert site.memory() == A


class Slow:
    """Reading that goes on a piece at a time."""

    def __init__(self, monkeypatch) -> None:
        self.reading = threading.Event()
        self.go_on = threading.Event()
        self.pieces = 0
        monkeypatch.setattr(intake, "PIECE", 1000)
        self._read = os.preadv
        monkeypatch.setattr(intake.os, "preadv", self)

    def __call__(self, fd: int, buffers: list, offset: int) -> int:
        self.pieces += 1
        self.reading.set()
        assert self.go_on.wait(PATIENCE)
        return self._read(fd, buffers, offset)


def test_while_something_is_read_others_are_answered(site, monkeypatch):
    site.shelf.add("m.gguf", t=A)
    slow = Slow(monkeypatch)
    question = ask(site.peer, entry(site.base, A))
    assert slow.reading.wait(PATIENCE)
    ping = site.peer.ext(Ext.PING)
    assert site.peer.answer()[2] == ping
    fence = site.peer.ext(Ext.FENCE)
    assert site.peer.answer()[2] == fence
    slow.go_on.set()
    assert site.peer.answer()[2:] == (question, bytes([DISK]))


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_buffer_is_freed_after_the_piece_that_is_being_read(site, known, monkeypatch):
    ledger = site.shelf.add("m.gguf", t=A)
    if known:
        ledger.digests["t"] = digest_of(A)
    # what is only hashed is in nobody's way
    in_place = known and site.devices[0].buffers[0].view is not None
    slow = Slow(monkeypatch)
    question = ask(site.peer, entry(site.base, A))
    assert slow.reading.wait(PATIENCE)
    buffer = site.devices[0].buffers[0]
    seen = []

    def free() -> None:
        seen.append(slow.go_on.is_set())
        buffer.freed = True

    buffer.free = free
    site.peer.ext(Ext.FREE, site.base >> 40)
    fence = site.peer.ext(Ext.FENCE)
    if in_place:
        table = site.peer.lane.buffers
        wait_until(lambda: any(pin.ending for pin in table._pins.values()))
        assert not buffer.freed
        slow.go_on.set()
    else:
        wait_until(lambda: buffer.freed)
        slow.go_on.set()
    answers = dict((site.peer.answer()[2:]) for _ in range(2))
    assert answers == {fence: b"", question: bytes([NONE])}
    assert buffer.freed
    if in_place:
        assert seen == [True]
    if in_place or not known:
        assert slow.pieces == 1
    assert not any(buffer.data[2000:])


def test_too_many_questions_are_refused_and_room_comes_back(site, monkeypatch):
    site.shelf.add("m.gguf", t=A)
    slow = Slow(monkeypatch)
    entries = [entry(site.base, A)] * MAX_LOAD
    asked = {ask(site.peer, *entries) for _ in range(MAX_LOADING // MAX_LOAD)}
    refused = ask(site.peer, entry(site.base, A))
    number, status, seq, _text = site.peer.answer()
    assert (number, status, seq) == (Ext.LOAD, Status.BUSY, refused)
    site.peer.ext(Ext.FREE, site.base >> 40)
    slow.go_on.set()
    assert {site.peer.answer()[2] for _ in asked} == asked
    base = site.peer.alloc(1 << 20)
    assert load(site.peer, entry(base, A)) == [DISK]


def test_an_empty_buffer_and_an_empty_tensor(site):
    base = site.peer.alloc(0)
    site.shelf.add("m.gguf", t=b"")
    assert load(site.peer, entry(base, b""), entry(base, b"", "u")) == [DISK, NONE]


def test_pins_of_one_buffer_do_not_concern_another(site):
    table = site.peer.lane.buffers
    with table.pin(site.base >> 40) as pin:
        other = site.peer.alloc(100)
        site.peer.ext(Ext.FREE, other >> 40)
        site.peer.ext(Ext.FENCE)
        assert site.peer.answer()[0] == Ext.FENCE
        assert not pin.ending
        freeing = Side(lambda: table.remove(site.base >> 40))
        wait_until(lambda: pin.ending)
        with pytest.raises(Exception, match="no buffer"), table.pin(site.base >> 40):
            pass
        assert freeing.running
    freeing.join()


# a real worker


@pytest.fixture
def models(tmp_path, monkeypatch) -> Path:
    """A directory with a model of two tensors, named a and b."""
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "caravan"))
    path = tmp_path / "models" / "deep" / "m.gguf"
    path.parent.mkdir(parents=True)
    data = np.random.default_rng(9).bytes(2 << 20)
    tensors = [
        handmade.tensor(b"a", (1 << 18,), 0, 0),
        handmade.tensor(b"b", (1 << 18,), 0, 1 << 20),
    ]
    path.write_bytes(handmade.gguf([], tensors, data))
    return tmp_path / "models"


def content(models: Path) -> tuple[bytes, bytes]:
    data = (models / "deep" / "m.gguf").read_bytes()[-(2 << 20) :]
    return data[: 1 << 20], data[1 << 20 :]


def question(*entries: bytes) -> bytes:
    return struct.pack("<I", len(entries)) + b"".join(entries)


def test_a_real_worker_loads_and_notes(models, tmp_path):
    a, b = content(models)
    options = ("--cache", str(tmp_path / "weights"), "--model-dir", str(models))
    with Worker("CPU:1,CPU:1", options=options) as worker:
        for _ in range(2):
            with ExtClient(worker.endpoint) as client:
                assert client.session.sources == ["disk", "cache"]
                client.call(Ext.TIMELINE, 1)
                _, base = client.alloc(4 << 20)
                wanted = [entry(base, b, "b"), entry(base + (2 << 20), a, "a")]
                assert client.call_raw(Ext.LOAD, question(*wanted)).body == bytes([DISK] * 2)
                assert client.get(base, 1 << 20) == b
                assert client.get(base + (2 << 20), 1 << 20) == a
                spans = np.frombuffer(client.call_raw(Ext.TIMELINE, b"\1").body[8:], SPAN)
                assert spans["size"][spans["kind"] == Kind.LOAD].tolist() == [1 << 20] * 2
    assert list((tmp_path / "caravan" / "digests").iterdir())
    ledger = next(iter(Library([str(models)]).copies("?", 1 << 20, digest_of(a))))
    assert ledger.known


def test_what_is_no_model_is_told_once_however_many_sessions_meet_it(models, capfd):
    a, _ = content(models)
    bad = models / "bad.gguf"
    bad.write_text("no model")
    with Worker("CPU:1", options=("--model-dir", str(models)), verbose=True) as worker:
        for _ in range(3):
            with ExtClient(worker.endpoint) as client:
                _, base = client.alloc(1 << 20)
                wanted = entry(base, a, "a")
                assert client.call_raw(Ext.LOAD, question(wanted)).body == bytes([DISK])
                client.post_raw(Ext.BYE, b"")
                client.assert_closed()
    told = capfd.readouterr().err
    assert told.count(str(bad)) == 1
    assert f"caravan worker: skipped: {bad} is not a GGUF file: " in told


def test_two_devices_of_a_session_load_side_by_side(models):
    a, b = content(models)
    options = ("--model-dir", str(models))
    with Worker("CPU:1,CPU:1", options=options) as worker, ExtClient(worker.endpoint) as one:
        assert one.session.sources == ["disk"]
        with ExtClient(worker.endpoint, 1, one.key) as two:
            for client, data, name in ((one, a, "a"), (two, b, "b")):
                _, base = client.alloc(1 << 20)
                wanted = entry(base, data, name)
                assert client.call_raw(Ext.LOAD, question(wanted)).body == bytes([DISK])
                assert client.get(base, 1 << 20) == data


def test_a_simulated_device_answers_and_keeps_nothing(models, tmp_path):
    a, _ = content(models)
    cache = tmp_path / "weights"
    options = ("--cache", str(cache), "--model-dir", str(models))
    sim = "sim:GFLOPS=100,GBPS=50"
    with Worker(sim, options=options) as worker, ExtClient(worker.endpoint) as client:
        _, base = client.alloc(4 << 20)
        wanted = [entry(base, a, "a"), entry(base, A, "t")]
        assert client.call_raw(Ext.LOAD, question(*wanted)).body == bytes([DISK, NONE])
        assert client.get(base, 64) == bytes(64)
        client.set(base, A)
        client.post(Ext.KEEP, base, len(A), digest_of(A))
        client.fence()
        client.post_raw(Ext.BYE, b"")
        client.assert_closed()
    assert not list(cache.iterdir())


def test_a_worker_without_either_says_so(worker):
    with ExtClient(worker.endpoint) as client:
        assert client.session.sources == []
        _, base = client.alloc(1 << 20)
        assert client.call_raw(Ext.LOAD, question(entry(base, A))).body == bytes([NONE])
        client.post(Ext.KEEP, base, len(A), digest_of(A))
        client.fence()


def test_the_table_says_what_the_tests_rely_on():
    assert EXT[Ext.LOAD].aside
    assert EXT[Ext.KEEP].silent
