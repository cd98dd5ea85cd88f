"""KEEP: what heads have sent is stored beside everything else, and only if it is what they say."""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from caravan.wire.commands import Ext
from caravan.wire.extension import Status
from caravan.worker import keeper as module
from caravan.worker.ext_channel import ExtChannel
from caravan.worker.keeper import Keeper
from caravan.worker.loader import Loader
from caravan.worker.local import Worker
from caravan.worker.pace import Pace
from caravan.worker.store import Part, Store
from leaks import running
from wired import PATIENCE, wait_until
from worker.fakes import FakeDevice
from worker.raw_client import ExtClient
from worker.shelf import digest_of
from worker.test_channels import Peer, hold, serving
from worker.test_load import CACHE, NONE, entry, load, question
from worker.test_store import digests, put
from worker.test_weight_cache import told
from worker.test_worker_life import children, session_of

A, B, C = (np.random.default_rng(k).bytes(300_000) for k in range(3))
HEX = [digest_of(data).hex() for data in (A, B, C)]


class Rate(Pace):
    """Never rests, or always until it is told that there is no time left."""

    def __init__(self) -> None:
        super().__init__(lambda: (0, 0))
        self.resting = False
        self.rested = threading.Event()

    def rest(self, took: float, sleep: Callable[[float], bool]) -> None:
        while self.resting:
            self.rested.set()
            if sleep(0.01):
                return


class Site:
    """A connection to a fake device, on a machine with a cache."""

    def __init__(self, path: Path, device: FakeDevice) -> None:
        self.store = Store(path)
        self.device = device
        self.pace = Rate()
        self.keeper = Keeper(self.store, self.pace)
        self.peer: Peer
        self.base = 0
        self._slots = cycle((0, 340_000, 680_000))

    def keep(self, data: bytes, digest: bytes | None = None) -> None:
        """Send it, beside the two before it, and have it kept; returns when that has been read."""
        address = self.base + next(self._slots)
        self.peer.ext(Ext.SET, address, tail=data)
        self.peer.ext(Ext.KEEP, address, len(data), digest or digest_of(data))
        self.fence()

    def fence(self) -> None:
        seq = self.peer.ext(Ext.FENCE)
        assert self.peer.answer() == (Ext.FENCE, 0, seq, b"")

    def free(self) -> None:
        self.peer.ext(Ext.FREE, self.base >> 40)
        self.fence()

    def idle(self) -> None:
        wait_until(lambda: not self.keeper.pending)

    def files(self) -> list[Path]:
        """Everything in the directory, parts too."""
        return [path for path in self.store.directory.rglob("*") if path.is_file()]


@pytest.fixture(params=[True, False], ids=["host", "hidden"])
def site(request, tmp_path, monkeypatch) -> Iterator[Site]:
    monkeypatch.setattr(module, "_PIECE", 100_000)
    site = Site(tmp_path / "weights", FakeDevice(host=request.param))
    with serving(ExtChannel, [site.device], Loader(None, site.store)) as (peer, made):
        made[0].keeper = site.keeper
        peer.lane = made[0]
        site.peer = peer
        site.base = peer.alloc(1 << 20)
        yield site
        site.pace.resting = False
        site.keeper.close()


def test_what_is_kept_is_found_again(site):
    site.keep(A)
    site.keep(B)
    site.idle()
    assert sorted(digests(site.store)) == sorted(HEX[:2])
    assert all(site.store.verify(entry) for entry in site.store.entries())
    assert load(site.peer, entry(site.base + 10, A), entry(site.base, C)) == [CACHE, NONE]
    assert len(site.files()) == 2


def test_what_has_arrived_otherwise_is_not_kept_and_told(site, capsys):
    site.keep(A, digest=digest_of(B))
    site.idle()
    assert site.files() == []
    assert "not kept" in capsys.readouterr().err


def test_what_is_there_already_counts_as_used(site):
    put(site.store, A, mtime=1000)
    path = site.store.path(HEX[0])
    inode = path.stat().st_ino
    site.keep(A)
    site.idle()
    assert path.stat().st_mtime > 1000
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("content", [b"", A[:-1], A + b"?"])
def test_a_truncated_entry_is_replaced(site, content):
    put(site.store, A)
    site.store.path(HEX[0]).write_bytes(content)
    site.keep(A)
    site.idle()
    assert site.store.path(HEX[0]).read_bytes() == A


def test_a_damaged_entry_is_replaced_by_what_is_sent_then(site):
    put(site.store, A)
    site.store.path(HEX[0]).write_bytes(A[:-1] + b"?")
    assert load(site.peer, entry(site.base, A)) == [NONE]
    site.keep(A)
    site.idle()
    assert load(site.peer, entry(site.base, A)) == [CACHE]


@pytest.mark.parametrize(
    ("address", "size"), [(0, 1), (5 << 40, 1), ((1 << 40) + (1 << 20), 1), (1 << 40, 1 << 40)]
)
def test_an_address_that_makes_no_sense_is_refused(site, address, size):
    seq = site.peer.ext(Ext.KEEP, address, size, digest_of(A))
    assert site.peer.answer()[:3] == (Ext.KEEP, Status.BAD_REQUEST, seq)
    site.fence()


def test_nothing_and_nowhere(site):
    empty = site.peer.alloc(0)
    site.peer.ext(Ext.KEEP, empty, 0, digest_of(b""))
    site.peer.ext(Ext.KEEP, site.base, 0, digest_of(b""))
    site.fence()
    assert not site.keeper.pending
    assert site.files() == []


def test_it_comes_after_what_was_sent_before_it(site):
    hold(site.peer, site.device, site.base + 500_000)
    site.peer.ext(Ext.SET, site.base, tail=A)
    site.peer.ext(Ext.KEEP, site.base, len(A), digest_of(A))
    site.device.gate.set()
    site.fence()
    site.idle()
    assert digests(site.store) == [HEX[0]]


# the end of a buffer


def test_a_buffer_is_stored_before_it_is_freed(site):
    site.pace.resting = True
    site.keep(C)
    assert site.pace.rested.wait(PATIENCE)
    site.keep(A)
    site.keep(B)
    assert site.keeper.pending == 3
    site.free()
    assert site.device.buffers[0].freed
    assert not site.keeper.pending
    assert sorted(digests(site.store)) == sorted(HEX)
    assert len(site.files()) == 3


def test_when_that_takes_too_long_the_rest_is_dropped(site):
    site.pace.resting = True
    site.keep(A)
    assert site.pace.rested.wait(PATIENCE)
    site.keep(B)
    clock = iter(range(1000))
    site.keeper._now = lambda: 0.5 * next(clock)
    site.free()
    assert site.device.buffers[0].freed
    assert not site.keeper.pending
    assert digests(site.store) == [HEX[0]]
    assert len(site.files()) == 1


def test_what_lies_elsewhere_is_not_hurried(site):
    site.pace.resting = True
    site.keep(A)
    assert site.pace.rested.wait(PATIENCE)
    other = site.peer.alloc(100)
    site.peer.ext(Ext.FREE, other >> 40)
    site.fence()
    assert site.keeper.pending == 1
    assert digests(site.store) == []


def test_only_what_lies_in_memory_is_held_against_eviction(site):
    site.store.limit = 700_000
    site.keep(A)
    site.keep(B)
    site.idle()
    site.keep(C)
    site.idle()
    assert sorted(digests(site.store)) == sorted(HEX[:2])
    site.free()
    site.base = site.peer.alloc(1 << 20)
    site.keep(C)
    site.idle()
    assert HEX[2] in digests(site.store)
    assert len(digests(site.store)) == 2


def test_a_cache_full_of_what_is_in_use_is_told_once(site, capsys):
    site.store.limit = 100_000
    for _ in range(3):
        site.keep(A)
    site.idle()
    assert site.files() == []
    assert capsys.readouterr().err.count("--cache-size") == 1


# what is in the way


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.EFBIG]
)
@pytest.mark.parametrize("step", ["__init__", "write", "commit"])
def test_a_failing_disk_ends_the_storing_and_nothing_else(site, number, step, monkeypatch, capsys):
    put(site.store, C)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Part, step, fail)
    for data in (A, B, A):
        site.keep(data)
    site.idle()
    site.keep(B)
    assert not site.keeper.pending
    err = capsys.readouterr().err
    assert err.count("cannot save") == err.count("\n") == 1
    assert os.strerror(number) in err
    assert digests(site.store) == [HEX[2]]
    if step != "__init__":
        assert len(site.files()) == 1
    assert load(site.peer, entry(site.base, C)) == [CACHE]
    site.free()


def test_a_failing_disk_does_not_hold_up_the_end_of_a_buffer(site, monkeypatch):
    site.pace.resting = True
    site.keep(A)
    assert site.pace.rested.wait(PATIENCE)
    site.keep(B)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Part, "write", fail)
    site.free()
    assert site.device.buffers[0].freed
    assert site.files() == []


class FullDisk(io.StringIO):
    """A log in a file on the disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_nobody_needs_to_be_told_that_the_disk_is_full(site, monkeypatch):
    monkeypatch.setattr(module.Part, "write", FullDisk.write)
    monkeypatch.setattr(sys, "stderr", FullDisk())
    site.pace.resting = True
    site.keep(A)
    site.keep(B)
    site.free()
    assert site.device.buffers[0].freed
    site.idle()
    assert not site.files()


def test_a_file_that_goes_before_it_is_whole_is_not_stored_and_others_are(site, capsys):
    site.pace.resting = True
    site.keep(A)
    wait_until(lambda: site.files())
    shutil.rmtree(site.store.directory)
    site.pace.resting = False
    site.keep(B)
    site.idle()
    assert digests(site.store) == [HEX[1]]
    assert not capsys.readouterr().err


def test_two_sessions_that_store_the_same(site):
    other = Keeper(Store(site.store.directory), Rate())
    lane = site.peer.lane
    buffer = lane.buffers.get(site.base >> 40)
    site.keep(A)
    for keeper in (other, site.keeper, other):
        keeper.keep(lane, buffer, 0, len(A), digest_of(A))
    site.idle()
    wait_until(lambda: not other.pending)
    other.close()
    assert [path.read_bytes() for path in site.files()] == [A]


# the end of the session


def test_the_end_in_order_stores_the_rest(site):
    site.pace.resting = True
    site.keep(A)
    assert site.pace.rested.wait(PATIENCE)
    site.keep(B)
    assert site.keeper.drain(PATIENCE)
    assert sorted(digests(site.store)) == sorted(HEX[:2])


def test_no_end_waits_for_ever(site):
    hold(site.peer, site.device, site.base + 900_000)
    site.pace.resting = True
    lane = site.peer.lane
    blocked = threading.Event()
    site.store.has = lambda *_: blocked.wait(PATIENCE)
    site.keeper.keep(lane, lane.buffers.get(site.base >> 40), 0, len(A), digest_of(A))
    assert not site.keeper.drain(0.01)
    blocked.set()
    site.device.gate.set()


def test_an_end_at_once_leaves_nothing_unfinished(site):
    site.pace.resting = True
    site.keep(A)
    assert site.pace.rested.wait(PATIENCE)
    assert len(site.files()) == 1
    site.keeper.close()
    assert site.files() == []
    assert digests(site.store) == []


# a real worker


@pytest.fixture
def worker(tmp_path) -> Iterator[Worker]:
    with Worker("CPU:1,CPU:1", options=("--cache", str(tmp_path / "weights"))) as running_one:
        yield running_one


def sent(client: ExtClient, data: bytes) -> int:
    """Send a tensor and have it kept."""
    _, base = client.alloc(len(data))
    client.set(base, data)
    client.post(Ext.KEEP, base, len(data), digest_of(data))
    return base


def bye(client: ExtClient) -> None:
    client.post_raw(Ext.BYE, b"")
    client.assert_closed()


def loaded(client: ExtClient, data: bytes) -> tuple[int, bytes]:
    _, base = client.alloc(len(data))
    (source,) = client.call_raw(Ext.LOAD, question(entry(base, data))).body
    return source, client.get(base, len(data))


def test_what_one_head_sends_the_next_one_finds(worker, tmp_path):
    data = np.random.default_rng(7).bytes(20 << 20)
    with ExtClient(worker.endpoint) as client:
        assert client.session.sources == ["cache"]
        assert loaded(client, data) == (NONE, bytes(len(data)))
        sent(client, data)
        bye(client)
    store = Store(tmp_path / "weights")
    wait_until(lambda: digests(store) == [digest_of(data).hex()])
    with ExtClient(worker.endpoint) as client:
        assert loaded(client, data) == (CACHE, data)


def test_leaving_with_a_free_stores_too(worker, tmp_path):
    with ExtClient(worker.endpoint) as client:
        base = sent(client, A)
        client.post(Ext.FREE, base >> 40)
        bye(client)
    store = Store(tmp_path / "weights")
    wait_until(lambda: digests(store) == [HEX[0]])


def test_a_broken_connection_ends_at_once(worker, tmp_path):
    spare = children(worker.pid)
    data = np.random.default_rng(7).bytes(64 << 20)
    with ExtClient(worker.endpoint) as client:
        session = session_of(worker, spare)
        sent(client, data)
        client.fence()
    wait_until(lambda: not running(session))
    store = Store(tmp_path / "weights")
    assert all(store.verify(entry) for entry in store.entries())
    assert not list((tmp_path / "weights").rglob("*.part"))


def test_a_full_disk_is_told_once_and_reading_goes_on(worker, tmp_path):
    store = Store(tmp_path / "weights")
    put(store, A)
    spare = children(worker.pid)
    with ExtClient(worker.endpoint) as client:
        # as good as a full disk: a file cannot grow further
        session = session_of(worker, spare)
        resource.prlimit(session, resource.RLIMIT_FSIZE, (1 << 10, 1 << 10))
        for data in (B, C, B):
            sent(client, data)
        told(worker, "this session saves no more")
        assert loaded(client, A) == (CACHE, A)
        bye(client)
    assert sum("cannot save" in line for line in worker.messages()) == 1
    assert digests(store) == [HEX[0]]
    assert not list(store.directory.rglob("*.part"))
