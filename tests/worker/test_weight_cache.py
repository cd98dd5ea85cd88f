"""The weight cache: by raw protocol on a real worker, and when others meddle with its files."""

from __future__ import annotations

import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from caravan.errors import RemoteError
from caravan.wire.commands import BASE_8, Base
from caravan.wire.fnv import fnv1a_64
from caravan.worker.base_channel import BaseChannel
from caravan.worker.base_handlers import set_tensor_cached
from caravan.worker.local import Worker
from caravan.worker.store import Store
from caravan.worker.weights import Weights
from leaks import running
from wired import PATIENCE, wait_until
from worker.fakes import FakeDevice, lanes
from worker.raw_client import BaseClient, Closed, linear_records, record
from worker.test_channels import serving
from worker.test_worker_life import children, session_of

SIZE = 3 << 20
DATA = np.random.default_rng(0).bytes(SIZE)
DIGEST = fnv1a_64(DATA)
COMMAND = [sys.executable, "-m", "caravan", "worker"]


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """Of the workers that are started with a cache; it is none of the environment's."""
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "caravan"))
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "llama"))
    return tmp_path / "cache"


@pytest.fixture
def cached(directory) -> Iterator[Worker]:
    with Worker("CPU:1,CPU:1", options=("--cache", str(directory))) as worker:
        yield worker


class Tensor:
    """A tensor of bytes in a buffer of its own, on a client of its own."""

    def __init__(self, worker: Worker, size: int = SIZE, device: int = 0) -> None:
        self.client = BaseClient(worker.endpoint)
        self.size = size
        self.handle, self.base = self.client.alloc(size, device)
        self.record = record(1, (size // 4,), self.handle, self.base)

    def __enter__(self) -> Tensor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()

    def set(self, data: bytes = DATA, flagged: int = 1, offset: int = 0) -> None:
        """Returns when it is done."""
        self.client.post(Base.SET_TENSOR, self.record.tobytes(), flagged, offset, tail=data)
        self.client.call(Base.DEVICE_COUNT)

    def ask(self, digest: int = DIGEST, offset: int = 0) -> int:
        return self.client.call(Base.SET_TENSOR_HASH, self.record.tobytes(), offset, digest)[0]

    def get(self) -> bytes:
        return self.client.get(self.record, self.size)


def told(worker: Worker, words: str) -> None:
    wait_until(lambda: any(words in line for line in worker.messages()))


def test_what_one_client_sets_another_gets_by_its_hash(cached, directory):
    with Tensor(cached) as first, Tensor(cached, SIZE + 8, device=1) as second:
        assert first.ask() == 0
        first.set()
        assert [path.name for path in directory.iterdir()] == [f"{DIGEST:016x}"]
        assert (directory / f"{DIGEST:016x}").read_bytes() == DATA
        told(cached, f"saved to '{directory / f'{DIGEST:016x}'}'")
        assert second.ask(offset=8) == 1
        assert second.get() == bytes(8) + DATA
        assert second.ask(1) == 0


def test_it_outlives_the_worker(directory):
    for hit in (0, 1):
        options = ("--cache", str(directory), "--protocol", "7")
        with Worker("CPU:1", options=options) as worker, Tensor(worker) as tensor:
            assert tensor.ask() == hit
            tensor.set()


def test_only_what_is_flagged_is_stored(cached, directory):
    with Tensor(cached) as tensor:
        tensor.set(flagged=0)
        assert not list(directory.iterdir())
        tensor.set(b"little", offset=5)
        assert (directory / f"{fnv1a_64(b'little'):016x}").read_bytes() == b"little"


def test_a_local_worker_stores_and_finds_nothing_by_default(worker, tmp_path):
    with Tensor(worker) as tensor:
        tensor.set()
        assert tensor.ask() == 0
        # nor looked at
        tensor.record = record(1, (SIZE,), 12345, 67)
        assert tensor.ask() == 0
    assert not list(tmp_path.iterdir())


def test_answers_come_in_order(cached):
    with Tensor(cached) as tensor:
        tensor.set()
        tensor.client.post(Base.BUFFER_CLEAR, tensor.handle, 7)
        payload = tensor.record.tobytes()
        tensor.client.post(Base.GET_TENSOR, payload, 0, 4)
        tensor.client.post(Base.SET_TENSOR_HASH, payload, 0, DIGEST)
        tensor.client.post(Base.GET_TENSOR, payload, 0, 4)
        tensor.client.post(Base.SET_TENSOR_HASH, payload, 0, 1)
        tensor.client.post(Base.MEMSET_TENSOR, payload, 0, 2, 1)
        tensor.client.post(Base.GET_TENSOR, payload, 0, 4)
        answers = [tensor.client.reply() for _ in range(5)]
        assert answers == [b"\7" * 4, b"\1", DATA[:4], b"\0", b"\1\1" + DATA[2:4]]


def test_half_a_tensor_is_not_stored(cached, directory):
    spare = children(cached.pid)
    with Tensor(cached) as tensor:
        session = session_of(cached, spare)
        fixed = BASE_8[Base.SET_TENSOR].request.pack(tensor.record.tobytes(), 1, 0)
        head = struct.pack("<BQ", Base.SET_TENSOR, len(fixed) + SIZE)
        tensor.client.send(head, fixed, DATA[: SIZE // 2])
    wait_until(lambda: not running(session))
    assert not list(directory.iterdir())


# what is in the way


def damage(path: Path) -> None:
    path.write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))


def longer(path: Path) -> None:
    path.write_bytes(DATA + b"more")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def shorter(path: Path) -> None:
    path.write_bytes(DATA[:1000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "meddle",
    [damage, longer, folder, link, dangling, pipe, shorter, empty],
    ids=lambda f: f.__name__,
)
def test_a_file_that_is_not_what_it_should_be_is_a_miss(cached, directory, meddle):
    path = directory / f"{DIGEST:016x}"
    with Tensor(cached) as tensor:
        tensor.set()
        meddle(path)
        assert tensor.ask() == 0
        # what was damaged goes, and is said; the rest is not ours
        if meddle in (damage, shorter, empty):
            assert not path.exists()
            told(cached, f"removed '{path}': its content is not what its name says")
        else:
            assert os.path.lexists(path)
        # the client goes on with the data itself
        tensor.set()
        assert tensor.get() == DATA
        assert tensor.ask() == (meddle is not folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_a_miss(cached, directory):
    with Tensor(cached) as tensor:
        tensor.set()
        (directory / f"{DIGEST:016x}").chmod(0)
        assert tensor.ask() == 0


def test_a_tensor_with_too_little_room_is_a_miss(cached):
    with Tensor(cached) as big, Tensor(cached, SIZE - 4) as small:
        big.set()
        assert small.ask() == 0
        assert big.ask(offset=4) == 0
        assert big.ask(offset=SIZE) == 0
        assert big.ask() == 1


@pytest.mark.parametrize(
    ("fields", "offset"),
    [
        ({"buffer": 99}, 0),
        ({"data": 5}, 0),
        ({"type": 9999}, 0),
        ({}, SIZE + 1),
        ({"ne": 1 << 20}, 0),
    ],
)
def test_a_tensor_that_cannot_be_ends_the_connection(cached, fields, offset):
    with Tensor(cached) as tensor:
        for name, value in fields.items():
            tensor.record[name] = value
        with pytest.raises(Closed):
            tensor.ask(offset=offset)


def test_when_the_disk_is_full_it_goes_on_without_storing(cached, directory):
    spare = children(cached.pid)
    with Tensor(cached) as tensor:
        # as good as a full disk: a file cannot grow further
        resource.prlimit(session_of(cached, spare), resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for _ in range(2):
            tensor.set()
        assert tensor.get() == DATA
        assert tensor.ask() == 0
        assert not list(directory.iterdir())
        told(cached, "cannot save to")
        assert sum("cannot save" in line for line in cached.messages()) == 1


def test_a_directory_that_goes_is_made_again(cached, directory):
    with Tensor(cached) as tensor:
        shutil.rmtree(directory)
        assert tensor.ask() == 0
        tensor.set()
        assert tensor.ask() == 1
        assert tensor.get() == DATA


def test_when_there_is_a_file_in_its_place_it_goes_on_without_storing(cached, directory):
    with Tensor(cached) as tensor:
        directory.rmdir()
        directory.touch()
        tensor.set()
        assert tensor.ask() == 0
        assert tensor.get() == DATA
        told(cached, "this session saves no more")


def test_what_was_used_least_recently_makes_room(directory):
    options = ("--cache", str(directory), "--cache-size", str(2 * SIZE + 100))
    with Worker("CPU:1", options=options) as worker, Tensor(worker) as tensor:
        others = [bytes([k]) * SIZE for k in range(2)]
        for number, data in enumerate((DATA, others[0])):
            tensor.set(data)
            os.utime(directory / f"{fnv1a_64(data):016x}", (number, number))
        assert tensor.ask() == 1
        tensor.set(others[1])
        assert [tensor.ask(fnv1a_64(data)) for data in (DATA, *others)] == [1, 0, 1]


# the directory


def started(*arguments: str, **variables: str) -> list[str]:
    """The first lines of a worker's output."""
    with subprocess.Popen(
        [*COMMAND, "-p", "0", "-d", "CPU:1", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    ) as process:
        lines = [process.stdout.readline().rstrip("\n") for _ in range(5)]
        process.terminate()
    return lines


@pytest.mark.parametrize("options", [[], ["-c"], ["--cache"]])
def test_it_is_in_caravans_cache_by_default(tmp_path, options):
    place = tmp_path / "caravan" / "weights"
    lines = started(*options, CARAVAN_CACHE=str(tmp_path / "caravan"), LLAMA_CACHE="/nowhere")
    assert lines[2].startswith(f"  local cache    : {place} (at most ")
    assert place.is_dir()


@pytest.mark.parametrize("option", ["-c", "--cache"])
def test_a_named_one_is_made_and_announced(tmp_path, option):
    place = tmp_path / "a" / "b"
    lines = started(option, str(place), "--cache-size", "1.5G", CARAVAN_CACHE=str(tmp_path / "c"))
    assert lines[2] == f"  local cache    : {place} (at most 1.5 GiB)"
    assert place.is_dir()
    assert not (tmp_path / "c").exists()


def test_without_one_none_is_made(tmp_path):
    lines = started("--no-cache", CARAVAN_CACHE=str(tmp_path / "c"))
    assert lines[2] == "  local cache    : n/a"
    assert not list(tmp_path.iterdir())


def test_model_directories_are_announced(tmp_path):
    lines = started("--no-cache", "--model-dir", str(tmp_path), f"--model-dir={tmp_path}/..")
    assert lines[3:5] == [f"  models         : {tmp_path}", f"  models         : {tmp_path.parent}"]


def test_one_that_cannot_be_made_is_an_error_if_it_was_asked_for(tmp_path):
    (tmp_path / "file").touch()
    for options in (["-c"], ["-c", str(tmp_path / "file" / "x")], ["-c", str(tmp_path / "file")]):
        done = subprocess.run(
            [*COMMAND, "-p", "0", *options],
            capture_output=True,
            text=True,
            env={**os.environ, "CARAVAN_CACHE": str(tmp_path / "file")},
        )
        assert done.returncode == 1
        assert done.stderr.startswith("caravan: error: cannot create the cache directory ")
        assert done.stderr.count("\n") == 1


def test_one_that_cannot_be_made_is_a_warning_otherwise(tmp_path, capfd):
    (tmp_path / "file").touch()
    assert started(CARAVAN_CACHE=str(tmp_path / "file"))[2] == "  local cache    : n/a"
    assert "; no weights are kept\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--no-cache", "--cache", "x"],
        ["--no-cache", "-c"],
        ["--no-cache", "--cache-size", "1G"],
        ["--cache-size", "none"],
        ["--model-dir", "/no/such/directory"],
    ],
)
def test_options_that_make_no_sense(options, tmp_path):
    done = subprocess.run(
        [*COMMAND, "-p", "0", *options],
        capture_output=True,
        text=True,
        env={**os.environ, "CARAVAN_CACHE": str(tmp_path)},
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_a_file_is_replaced_in_one_step(tmp_path, monkeypatch):
    """Who has it open reads on, and there is never half a one under its name."""
    weights = Weights(Store(tmp_path))
    weights.store(DATA)
    seen = []
    whole = os.replace

    def spy(source: str, target: str) -> None:
        seen.append((Path(source).read_bytes(), Path(target).read_bytes()))
        whole(source, target)

    monkeypatch.setattr(os, "replace", spy)
    entry = weights.find(DIGEST, SIZE)
    with entry:
        weights.store(DATA)
        assert entry.read_into(memoryview(bytearray(SIZE)))
    assert seen == [(DATA, DATA)]
    assert [path.name for path in tmp_path.iterdir()] == [f"{DIGEST:016x}"]


# devices that the host cannot reach into


@dataclass(frozen=True)
class Ask:
    """SET_TENSOR_HASH of the tensor at the start of a buffer, as a handler gets it."""

    lane: object
    weights: Weights
    payload: bytes

    def __call__(self, digest: int) -> bytes:
        (part,) = set_tensor_cached(
            self.lane, self.payload + struct.pack("<QQ", 0, digest), self.weights
        )
        return part


@pytest.fixture(params=[True, False], ids=["host", "hidden"])
def fake(request, tmp_path) -> tuple[Ask, FakeDevice]:
    device = FakeDevice(host=request.param)
    (lane,), buffers = lanes(device)
    buffer = buffers.allocate(device, 4096)
    tensor = record(1, (1024,), buffer.handle, buffer.base).tobytes()
    return Ask(lane, Weights(Store(tmp_path)), tensor), device


def test_a_hit_reaches_any_memory(fake):
    ask, device = fake
    ask.weights.store(DATA[:4000])
    assert ask(fnv1a_64(DATA[:4000])) == b"\1"
    assert bytes(device.buffers[0].data) == DATA[:4000] + bytes(96)


def test_a_file_longer_than_the_tensor_reaches_no_memory(fake):
    ask, device = fake
    ask.weights.store(DATA[:5000])
    assert ask(fnv1a_64(DATA[:5000])) == b"\0"
    assert device.buffers[0].data == bytes(4096)


def test_damage_is_not_written_to_memory_out_of_reach(fake, tmp_path):
    ask, device = fake
    (tmp_path / f"{5:016x}").write_bytes(b"no" * 20)
    assert ask(5) == b"\0"
    if device.buffers[0].view is None:
        assert not any(device.buffers[0].data)


def test_a_file_that_ends_early_is_a_miss_and_stays(fake, tmp_path):
    """Somebody may be writing it."""
    ask, _ = fake
    ask.weights.store(DATA[:4000])
    path = tmp_path / f"{fnv1a_64(DATA[:4000]):016x}"
    entry = ask.weights.find(fnv1a_64(DATA[:4000]), 4000)
    os.truncate(path, 100)
    with entry:
        assert not entry.read_into(memoryview(bytearray(4000)))
    assert path.exists()


def test_an_empty_buffer(tmp_path):
    device = FakeDevice()
    (lane,), buffers = lanes(device)
    buffer = buffers.allocate(device, 0)
    tensor = record(1, (0,), buffer.handle, buffer.base).tobytes()
    weights = Weights(Store(tmp_path))
    ask = Ask(lane, weights, tensor)
    assert ask(fnv1a_64(b"")) == b"\0"
    weights.store(b"")
    assert ask(fnv1a_64(b"")) == b"\1"


@pytest.mark.parametrize("host", [True, False], ids=["host", "hidden"])
def test_what_goes_to_any_memory_is_stored(host, tmp_path):
    with serving(BaseChannel, [FakeDevice(host=host)], 8, Weights(Store(tmp_path))) as (peer, _):
        handle, base = peer.base_alloc(1 << 16, 0)
        tensor = record(1, (1024,), handle, base).tobytes()
        peer.base(Base.SET_TENSOR, tensor, 1, 0, tail=DATA[:4096])
        peer.base(Base.GET_TENSOR, tensor, 0, 4096)
        assert peer.reply() == DATA[:4096]
        assert (tmp_path / f"{fnv1a_64(DATA[:4096]):016x}").read_bytes() == DATA[:4096]


def test_while_the_device_computes_weights_are_stored_and_questions_wait(tmp_path):
    device = FakeDevice()
    with serving(BaseChannel, [device], 8, Weights(Store(tmp_path))) as (peer, _):
        handle, base = peer.base_alloc(1 << 16, 0)
        nodes, parts = linear_records(handle, base)
        tail = struct.pack("<2QI", *nodes, len(parts))
        device.gate.clear()
        peer.base(
            *(Base.GRAPH_COMPUTE, 0, 0, len(nodes)),
            tail=tail + b"".join(part.tobytes() for part in parts.values()),
        )
        assert device.computing.wait(PATIENCE)
        tensor = record(1, (1024,), handle, base + 32768).tobytes()
        peer.base(Base.SET_TENSOR, tensor, 1, 0, tail=DATA[:4096])
        wait_until(lambda: (tmp_path / f"{fnv1a_64(DATA[:4096]):016x}").exists())
        peer.base(Base.SET_TENSOR_HASH, tensor, 0, 1)
        assert not peer.transport.wait_readable(0.05)
        device.gate.set()
        assert peer.reply() == b"\0"
        peer.base(Base.GET_TENSOR, tensor, 0, 4096)
        assert peer.reply() == DATA[:4096]


def test_of_another_device_it_is_refused(fake):
    ask, _ = fake
    other = FakeDevice(1)
    buffer = ask.lane.buffers.allocate(other, 64)
    tensor = record(1, (16,), buffer.handle, buffer.base).tobytes()
    with pytest.raises(RemoteError, match="belongs to another device"):
        replace(ask, payload=tensor)(1)
