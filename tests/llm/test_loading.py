"""A load apart from the engine: who asks, who reads digests, how far it is, and every end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from caravan.errors import ModelError, RemoteError, WorkerLost
from caravan.llm import loading as loading_module
from caravan.llm.loading import DeviceLoad, Loading
from caravan.llm.weights import WeightFiles
from caravan.models.digest import digest_of_bytes
from caravan.wire.extension import Source
from e2e.processes import descriptors
from llm.test_weights import write
from stream.fake_link import FakeLink, Place
from wired import PATIENCE, Side, wait_until

NAMES = [f"blk.{i}.w" for i in range(4)]
SIZE = 3 << 20
LOST = WorkerLost("host:1", "RPC0", "SET", OSError("gone"))


def content(name: str) -> bytes:
    return bytes([ord(name[4])]) * SIZE


class Device:
    """As much of a RemoteDevice as a load needs."""

    def __init__(self, name: str = "RPC0", **options) -> None:
        self.name = name
        self.endpoint = "host:1"
        self.link = FakeLink(name, **options)


class Tensor:
    """As much of a RemoteTensor as a load needs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name

    def kept(self, extension: bool) -> Place:
        return Place(1000 + NAMES.index(self._name))


Start = Callable[..., Loading]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "cache"))
    return write(tmp_path / "m.gguf", **{name: content(name) for name in NAMES})


@pytest.fixture
def start(path) -> Iterator[Start]:
    made: list[Loading] = []

    def load(*devices) -> Loading:
        made.append(Loading(WeightFiles([path]), devices))
        return made[-1]

    yield load
    for loading in made:
        loading.close()


def take(loading: Loading, device: Device, *names: str) -> None:
    for name in names:
        assert loading.take(device, Tensor(name), 0, SIZE)


def always() -> bool:
    return True


def known(path: Path) -> list[bool]:
    """Which of the digests the sidecar has."""
    files = WeightFiles([path])
    found = [files.digest(name) is not None for name in NAMES]
    files.close()
    return found


def loaded(start: Start, path: Path, device: Device) -> Loading:
    loading = start(device)
    take(loading, device, *NAMES)
    assert loading.wait(always)
    loading.close()
    return loading


def test_the_first_time_all_is_read_asked_and_sent(start, path):
    device = Device(found={})
    loading = loaded(start, path, device)
    assert loading.state() == [DeviceLoad("RPC0", "host:1", 4 * SIZE, 0, 0, 4 * SIZE)]
    assert device.link.memory == {1000 + i: content(name) for i, name in enumerate(NAMES)}
    kept = device.link.verbs("keep")
    digests = [digest_of_bytes(content(name)) for name in NAMES]
    assert kept == [("keep", 1000 + i, SIZE, digest) for i, digest in enumerate(digests)]
    assert known(path) == [True] * 4
    assert loading.fraction == 1.0


def test_the_second_time_nothing_is_read(start, path, monkeypatch):
    loaded(start, path, Device(found={}))
    monkeypatch.setattr(os, "preadv", None)
    device = Device(found=dict.fromkeys(NAMES, Source.CACHE))
    loading = loaded(start, path, device)
    assert loading.state() == [DeviceLoad("RPC0", "host:1", 4 * SIZE, 0, 4 * SIZE, 0)]
    assert device.link.verbs("bring", "keep") == []


def test_without_sources_no_digest_is_read(start, path):
    device = Device(sources=())
    loaded(start, path, device)
    assert device.link.verbs("load", "keep") == []
    assert known(path) == [False] * 4


def test_a_tensor_of_several_devices_is_read_once(start, path, monkeypatch):
    read = []
    whole = WeightFiles.read_digest
    monkeypatch.setattr(
        WeightFiles,
        "read_digest",
        lambda files, name, stop: read.append(name) or whole(files, name, stop),
    )
    devices = [Device(f"RPC{i}", found=dict.fromkeys(NAMES, Source.DISK)) for i in range(2)]
    loading = start(*devices)
    for device in devices:
        take(loading, device, NAMES[0], NAMES[0], NAMES[1])
    assert loading.wait(always)
    assert sorted(read) == NAMES[:2]
    assert [load.disk for load in loading.state()] == [3 * SIZE] * 2


def test_what_is_not_a_whole_tensor_of_the_file_is_left_to_the_engine(start):
    device = Device()
    loading = start(device)
    other = Tensor(NAMES[0])
    assert not loading.take(device, other, 4, SIZE - 4)
    assert not loading.take(device, other, 0, SIZE - 4)
    assert not loading.take(device, other, 0, 0)
    other.name = lambda: "made.up"
    assert not loading.take(device, other, 0, SIZE)
    assert loading.left_here() == NAMES
    take(loading, device, NAMES[2])
    assert loading.left_here() == [NAMES[0], NAMES[1], NAMES[3]]


def test_those_that_are_empty_for_longest_are_read_for_first(start, monkeypatch):
    """Both devices get work from the start, although the engine names all of one first."""
    order = []
    go_on = threading.Event()
    whole = WeightFiles.read_digest

    def slow(files, name, stop):
        order.append(name)
        assert go_on.wait(PATIENCE)
        return whole(files, name, stop)

    monkeypatch.setattr(WeightFiles, "read_digest", slow)
    devices = [Device(f"RPC{i}", found=dict.fromkeys(NAMES, Source.DISK)) for i in range(2)]
    loading = start(*devices)
    take(loading, devices[0], NAMES[0], NAMES[1])
    wait_until(lambda: order)
    take(loading, devices[1], NAMES[2], NAMES[3])
    go_on.set()
    assert loading.wait(always)
    assert order == [NAMES[0], NAMES[2], NAMES[1], NAMES[3]]


def test_reading_does_not_run_far_ahead_of_sending(start, monkeypatch):
    """Nor of the answers, which say what is to be sent."""
    read = []
    whole = WeightFiles.read_digest
    monkeypatch.setattr(loading_module, "_AHEAD", 2 * SIZE)
    monkeypatch.setattr(
        WeightFiles,
        "read_digest",
        lambda files, name, stop: read.append(name) or whole(files, name, stop),
    )
    device = Device()
    loading = start(device)
    take(loading, device, *NAMES)
    wait_until(lambda: device.link.questions)
    wait_until(lambda: loading._deliveries[device].backlog == 3 * SIZE)
    assert read == NAMES[:3]
    device.link.found = {}
    for wanted, ticket in list(device.link.questions):
        ticket.resolve(bytes(len(wanted)))
    wait_until(lambda: len(read) == 4)

    def step() -> bool:
        for wanted, ticket in list(device.link.questions):
            ticket.resolve(bytes(len(wanted)))
        return True

    assert loading.wait(step)
    assert loading._deliveries[device].backlog == 0
    assert loading.state()[0].network == 4 * SIZE


# how far it is


def test_the_fraction_goes_up_to_the_end(start):
    seen = []
    device = Device(found={NAMES[0]: Source.DISK})
    loading = start(device)
    seen.append(loading.fraction)
    take(loading, device, *NAMES[:3])
    wait_until(lambda: loading.state()[0].done == 3 * SIZE)
    seen.append(loading.fraction)
    assert loading.wait(lambda: seen.append(loading.fraction) is None)
    assert seen[:2] == [0.0, 0.75]
    assert seen == sorted(seen)
    # what stays here is there once the engine has loaded
    assert seen[-1] == 1.0


def test_the_fraction_of_tensors_that_go_to_several_places(start):
    """More bytes than the file has: it must not go back when that is known."""
    seen = []
    devices = [Device(f"RPC{i}", found=dict.fromkeys(NAMES, Source.CACHE)) for i in range(3)]
    devices[2].link.found = None
    loading = start(*devices)
    for device in devices:
        take(loading, device, *NAMES[:2])
    wait_until(lambda: sum(load.done for load in loading.state()) == 4 * SIZE)
    wait_until(lambda: devices[2].link.questions)
    seen.append(loading.fraction)

    def step() -> bool:
        seen.append(loading.fraction)
        for wanted, ticket in list(devices[2].link.questions):
            if not ticket.done:
                ticket.resolve(bytes([Source.DISK]) * len(wanted))
        return True

    assert loading.wait(step)
    assert seen == sorted(seen)
    assert seen[:2] == [4 / 6, 6 / 8]
    assert seen[-1] == 1.0


def test_it_is_told_of_now_and_then_and_at_the_end(start, monkeypatch):
    """Not of every piece: they come by the thousand in a second."""

    class Clock:
        now = 5.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(loading_module, "time", clock)
    device = Device(found={}, arrives=False)
    loading = start(device)
    take(loading, device, NAMES[0])
    seen = []

    def step() -> bool:
        seen.append(loading.state()[0].network)
        return True

    side = Side(lambda: loading.wait(step))
    wait_until(lambda: seen and len(device.link.flying) == 3)
    for count, ticket in enumerate(list(device.link.flying), 1):
        ticket.resolve(b"")
        wait_until(lambda done=count: loading.state()[0].network == done << 20)
        if count == 1:
            clock.now += 1.0
            wait_until(lambda: len(seen) == 2)
    assert side.join()
    assert seen == [0, 1 << 20, SIZE]


def test_a_load_onto_nothing(start):
    loading = start(Device())
    assert loading.wait(always)
    assert loading.fraction == 1.0
    assert loading.state() == [DeviceLoad("RPC0", "host:1", 0, 0, 0, 0)]


# the ends


def test_stopped(start, path):
    device = Device(found={}, arrives=False)
    loading = start(device)
    take(loading, device, *NAMES)
    wait_until(lambda: device.link.flying)
    assert not loading.wait(lambda: False)
    loading.close()
    posted = list(device.link.log)
    assert str(loading._deliveries[device].error) == "loading was stopped"
    # the digests that were read are worth something all the same
    assert any(known(path))
    wait_until(lambda: loading._deliveries[device].done)
    assert device.link.verbs("bring", "keep") == [c for c in posted if c[0] in ("bring", "keep")]


def test_stopped_before_the_engine_has_said_all(start, path):
    device = Device(found={})
    loading = start(device)
    take(loading, device, NAMES[0])
    loading.close()
    loading.close()
    assert all(delivery.error for delivery in loading._deliveries.values())


def test_a_loss_comes_out(start):
    devices = [Device(arrives=False, found={}), Device("RPC1", found={})]
    loading = start(*devices)
    take(loading, devices[0], NAMES[0])
    take(loading, devices[1], NAMES[1])
    wait_until(lambda: devices[0].link.flying)
    devices[0].link.lose(LOST)
    with pytest.raises(WorkerLost) as caught:
        loading.wait(always)
    assert caught.value is LOST


def test_a_worker_that_refuses_every_question(start, path):
    device = Device()
    device.link.error = None
    loading = start(device)
    take(loading, device, *NAMES)

    def step() -> bool:
        for _, ticket in list(device.link.questions):
            if not ticket.done:
                ticket.fail(RemoteError(2, "what is LOAD?"))
        return True

    assert loading.wait(step)
    assert loading.state()[0].network == 4 * SIZE


def test_a_file_that_is_cut_off_meanwhile(start, path):
    device = Device(found={})
    loading = start(device)
    os.truncate(path, path.stat().st_size - SIZE // 2)
    take(loading, device, *NAMES)
    with pytest.raises(ModelError, match=r"m\.gguf became shorter while it was loaded"):
        loading.wait(always)
    loading.close()
    assert known_of(path) == []


def test_a_file_that_is_cut_off_while_it_is_sent(start, path):
    device = Device(sources=(), arrives=False)
    loading = start(device)
    take(loading, device, *NAMES)
    wait_until(lambda: device.link.in_flight == 8 << 20)
    os.truncate(path, path.stat().st_size - SIZE)
    device.link.arrives = True

    def step() -> bool:
        for ticket in list(device.link.flying):
            if not ticket.done:
                ticket.resolve(b"")
        return True

    with pytest.raises(ModelError, match=r"m\.gguf became shorter while it was loaded"):
        loading.wait(step)


def known_of(path: Path) -> list[Path]:
    return [file for file in path.parent.glob("cache/**/*") if file.is_file()]


def test_a_file_that_is_changed_meanwhile(start, path):
    device = Device(found={})
    loading = start(device)
    take(loading, device, *NAMES)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelError, match=r"m\.gguf was changed while it was loaded"):
        loading.wait(always)
    loading.close()
    assert known_of(path) == []


def test_a_digest_that_cannot_be_read(start, monkeypatch):
    def fail(files, name, stop):
        raise ModelError("cannot read m.gguf: Input/output error")

    monkeypatch.setattr(WeightFiles, "read_digest", fail)
    device = Device()
    loading = start(device)
    take(loading, device, *NAMES)
    with pytest.raises(ModelError, match="Input/output"):
        loading.wait(always)


def test_no_file_stays_open(start, path):
    before = descriptors(os.getpid())
    slow = Device(found={}, arrives=False)
    slow.link.stream.taken.clear()
    loading = start(slow, Device("RPC1"))
    take(loading, slow, *NAMES)
    wait_until(lambda: slow.link.verbs("drain"))
    loading.close()
    # a thread that waits for a socket may still look into it
    assert descriptors(os.getpid()) == before + 1
    slow.link.stream.taken.set()
    wait_until(lambda: descriptors(os.getpid()) == before)
