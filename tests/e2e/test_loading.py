"""Weights that travel once, or not at all: real workers, the sample model, the engine's numbers."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.engine.skeleton import Skeleton
from caravan.errors import ModelError, WorkerLost
from caravan.llm import Context, ContextParams, Model, ModelParams
from caravan.llm.loading import DeviceLoad
from caravan.models.tensors import read_tensors
from caravan.worker.store import Store
from e2e.processes import alive, children, descriptors, kill, running, wait_for
from e2e.test_faults import session_of
from held_link import held_link
from wired import Side

PARAMS = ContextParams(n_ctx=64, n_ubatch=16, n_threads=1)
N_PROMPT = 40
MB = 10**6
# a third of the sample's layers, and the others with the output
TOTALS = (24380928, 72195840)


def is_spare(session: int) -> bool:
    """Whether a session's process waits for its head: it is connected to its supervisor alone."""
    places = Path(f"/proc/{session}/fd")
    try:
        return [os.readlink(place)[:6] for place in places.iterdir()].count("socket") == 1
    except OSError:
        return False


@dataclass
class Pair:
    """Two workers, and where each of them keeps weights and has models of its own."""

    workers: list[caravan.Worker]
    caches: list[Path]
    shelf: Path
    full: list[Path] = field(default_factory=list)

    @property
    def endpoints(self) -> list[str]:
        return [worker.endpoint for worker in self.workers]

    def settle(self) -> None:
        """Wait until no session of an earlier head is left, and all is stored."""
        for worker in self.workers:
            wait_for(lambda pid=worker.pid: [*map(is_spare, children(pid))] == [True])

    def empty(self) -> None:
        for directory in (*self.caches, self.shelf):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    base = tmp_path_factory.mktemp("workers")
    caches, shelf = [base / "cache0", base / "cache1"], base / "shelf"
    shelf.mkdir()
    workers = [
        caravan.Worker("CPU:1", options=("--cache", str(cache), "--model-dir", str(shelf)))
        for cache in caches
    ]
    yield Pair(workers, caches, shelf)
    for worker in workers:
        worker.close()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> Path:
    """The head's, with nothing in it."""
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "head"))
    return tmp_path / "head"


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    """With empty caches, and no models."""
    started.settle()
    started.empty()
    yield started


@pytest.fixture
def kept(pair: Pair, started: Pair, smollm2: Path, tokens, expected) -> Pair:
    """With everything in their caches."""
    if not started.full:
        check(loaded(pair.endpoints, smollm2, tokens), expected, network=TOTALS)
        pair.settle()
        for cache in pair.caches:
            started.full.append(cache.with_name(f"{cache.name}.full"))
            shutil.copytree(cache, started.full[-1], copy_function=os.link)
    for cache, full in zip(pair.caches, started.full, strict=True):
        shutil.rmtree(cache)
        shutil.copytree(full, cache, copy_function=os.link)
    return pair


@dataclass
class Outcome:
    loads: Sequence[DeviceLoad]
    logits: np.ndarray


def loaded(
    endpoints: Sequence[str],
    path: Path,
    tokens: list[int],
    params: ModelParams | None = None,
    meanwhile: Callable[[caravan.Cluster], object] = lambda cluster: None,
    **options,
) -> Outcome:
    """Load, and compute the logits after 40 tokens."""
    loads: list[Sequence[DeviceLoad]] = [()]
    fractions: list[float] = []
    params = params or ModelParams(tensor_split=(1, 2), repack=False)
    with caravan.connect(endpoints, **options) as cluster:

        def progress(fraction: float) -> bool:
            fractions.append(fraction)
            meanwhile(cluster)
            return True

        with (
            Model(
                path, params, devices=cluster.devices, progress=progress, on_load=loads.append
            ) as model,
            Context(model, PARAMS) as context,
        ):
            context.decode(tokens)
            found = context.logits()
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    return Outcome(loads[-1], found)


def check(
    outcome: Outcome,
    expected: np.ndarray,
    disk: Sequence[int] = (0, 0),
    cache: Sequence[int] = (0, 0),
    network: Sequence[int] = (0, 0),
) -> None:
    sources = [(load.disk, load.cache, load.network) for load in outcome.loads]
    assert sources == list(zip(disk, cache, network, strict=True))
    assert np.array_equal(outcome.logits, expected)


def entries(cache: Path) -> list[Path]:
    return [entry.path for entry in Store(cache).entries()]


def check_kept(pair: Pair) -> None:
    """All that the workers were sent is in their caches, and right."""
    pair.settle()
    for cache, total in zip(pair.caches, TOTALS, strict=True):
        store = Store(cache)
        assert sum(entry.size for entry in store.entries()) <= total
        assert all(store.verify(entry) for entry in store.entries())
        assert not list(cache.rglob("*.part"))


# three ways in


def test_what_was_sent_once_is_not_sent_again(kept, smollm2, tokens, expected, own_cache):
    check_kept(kept)
    again = loaded(kept.endpoints, smollm2, tokens)
    check(again, expected, cache=TOTALS)
    assert len(list(own_cache.glob("digests/*.digests"))) == 1
    kept.settle()
    assert Store(kept.caches[0]).entries()


_HEAD = """
import json, sys
import caravan
from caravan import engine
from caravan.llm import Model, ModelParams
path, *endpoints = sys.argv[1:]
def counters():
    lines = open("/proc/self/io").read().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}
engine.load()
with caravan.connect(endpoints) as cluster:
    before = counters()
    loads = []
    model = Model(path, ModelParams(tensor_split=(1, 2)), devices=cluster.devices,
                  on_load=loads.append)
    after = counters()
    streams = [device.link.stream for device in cluster.devices]
    print(json.dumps({
        "read": after["rchar"] - before["rchar"],
        "disk": after["read_bytes"] - before["read_bytes"],
        "sent": sum(stream.bytes_sent for stream in streams),
        "received": sum(stream.bytes_received for stream in streams),
        "network": [load.network for load in loads[-1]],
    }))
    model.close()
"""


def test_a_second_load_reads_and_sends_next_to_nothing(kept, smollm2, tokens):
    loaded(kept.endpoints, smollm2, tokens)  # the digests are known from here on
    kept.settle()
    words = [sys.executable, "-c", _HEAD, str(smollm2), *kept.endpoints]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["network"] == [0, 0]
    assert found["sent"] + found["received"] < sum(TOTALS) / 100
    # the header, a few times: of a model of this size it is more than one part of a hundred
    header = min(span.offset for span in read_tensors(smollm2).values())
    assert found["read"] < 4 * header + MB
    assert found["disk"] < 4 * header + MB


def test_a_worker_that_has_the_file_reads_its_own(pair, smollm2, tokens, expected):
    (pair.shelf / "deep").mkdir()
    shutil.copyfile(smollm2, pair.shelf / "deep" / "another name.gguf")
    check(loaded(pair.endpoints, smollm2, tokens), expected, disk=TOTALS)
    pair.settle()
    assert entries(pair.caches[0]) == []


def test_a_file_of_the_same_names_is_not_the_same_model(pair, smollm2, tokens, expected):
    other = pair.shelf / smollm2.name
    shutil.copyfile(smollm2, other)
    spans = read_tensors(smollm2)
    same = spans["blk.7.ffn_up.weight"]
    with other.open("r+b") as file:
        for span in spans.values():
            if span != same:
                file.seek(span.offset)
                byte = file.read(1)
                file.seek(span.offset)
                file.write(bytes([byte[0] ^ 1]))
    outcome = loaded(pair.endpoints, smollm2, tokens)
    assert np.array_equal(outcome.logits, expected)
    assert sum(load.disk for load in outcome.loads) in (0, same.size)
    assert sum(load.disk + load.network for load in outcome.loads) == sum(TOTALS)


def test_each_device_has_its_own_sources(kept, smollm2, tokens, expected):
    shutil.rmtree(kept.caches[0])
    outcome = loaded(kept.endpoints, smollm2, tokens)
    check(outcome, expected, cache=(0, TOTALS[1]), network=(TOTALS[0], 0))


# a cache that is wrong


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGES = {"flipped": flipped, "short": lambda data: data[:-1], "empty": lambda data: b""}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_not_used_and_replaced(kept, smollm2, tokens, expected, damage):
    victims = [entries(cache)[3] for cache in kept.caches]
    sizes = [path.stat().st_size for path in victims]
    for path in victims:
        status, data = path.stat(), path.read_bytes()
        # others have a link to it
        path.unlink()
        path.write_bytes(DAMAGES[damage](data))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    outcome = loaded(kept.endpoints, smollm2, tokens)
    assert np.array_equal(outcome.logits, expected)
    # one content may belong to several tensors, as norms' often does
    for load, size in zip(outcome.loads, sizes, strict=True):
        assert load.network >= size
        assert load.cache >= load.total - 4 * size
    kept.settle()
    for path, size in zip(victims, sizes, strict=True):
        assert path.stat().st_size == size
    check_kept(kept)


@contextmanager
def nearly_full(worker: caravan.Worker) -> Iterator[None]:
    """As a disk on which no file gets bigger than so much."""
    pids = (worker.pid, *children(worker.pid))
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        for pid in (worker.pid, *children(worker.pid)):
            resource.prlimit(
                pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )


def test_a_full_disk_costs_a_warning(pair, smollm2, tokens, expected):
    with nearly_full(pair.workers[0]):
        outcome = loaded(pair.endpoints, smollm2, tokens)
        check(outcome, expected, network=TOTALS)
        pair.settle()
    told = [line for line in pair.workers[0].messages() if "cannot save" in line]
    assert len(told) == 1
    assert "saves no more" in told[0]
    assert not [line for line in pair.workers[1].messages() if "cannot save" in line]
    assert not list(pair.caches[0].rglob("*.part"))
    assert sum(path.stat().st_size for path in entries(pair.caches[1])) > TOTALS[1] / 2
    # and the next one finds what there is
    again = loaded(pair.endpoints, smollm2, tokens)
    assert np.array_equal(again.logits, expected)
    assert again.loads[1].cache > 0


def test_two_heads_fill_the_same_cache(pair, smollm2, tokens, expected):
    sides = [Side(lambda: loaded(pair.endpoints, smollm2, tokens)) for _ in range(2)]
    for side in sides:
        outcome = side.join()
        assert np.array_equal(outcome.logits, expected)
        assert [load.done for load in outcome.loads] == list(TOTALS)
    check_kept(pair)


# where weights stay, and how they go


@pytest.mark.parametrize(
    "params",
    [
        ModelParams(n_gpu_layers=10, repack=False),
        ModelParams(n_gpu_layers=0, repack=False),
        ModelParams(overrides=((r"blk\.\d\.ffn", "CPU"),), repack=False),
        ModelParams(tensor_split=(1, 0), repack=False),
        ModelParams(split_mode="none", main_gpu=1, repack=False),
        ModelParams(lazy_mode="on", repack=False),
        ModelParams(load_mode="mmap", repack=False),
    ],
    ids=["some layers", "no layer", "overrides", "one device", "main_gpu", "lazy", "mmap"],
)
def test_what_stays_here_comes_from_the_file(kept, smollm2, tokens, expected, params):
    outcome = loaded(kept.endpoints, smollm2, tokens, params)
    assert np.array_equal(outcome.logits, expected)
    assert all(load.done == load.total for load in outcome.loads)


@pytest.mark.parametrize(
    "params",
    [
        ModelParams(load_mode="none", repack=False),
        ModelParams(load_mode="dio", repack=False),
        ModelParams(check_tensors=True, repack=False),
    ],
    ids=["none", "dio", "check_tensors"],
)
def test_loads_that_the_engine_does_itself(kept, smollm2, tokens, expected, params):
    outcome = loaded(kept.endpoints, smollm2, tokens, params)
    assert np.array_equal(outcome.logits, expected)


def test_the_stand_in_takes_no_memory_even_if_no_device_gets_anything(pair, smollm2, monkeypatch):
    sizes = []
    whole = Skeleton.lay

    def lay(stand_ins: Skeleton) -> bool:
        sizes.extend(os.stat(name).st_blocks * 512 for name in stand_ins.names)
        return whole(stand_ins)

    monkeypatch.setattr(Skeleton, "lay", lay)
    with caravan.connect(pair.endpoints) as cluster:
        Model(smollm2, ModelParams(n_gpu_layers=0), devices=cluster.devices).close()
    assert sizes
    assert max(sizes) < 4 * MB


def test_an_engine_that_maps_nothing(kept, smollm2, tokens, expected, monkeypatch):
    monkeypatch.setattr(Skeleton, "lay", lambda stand_ins: False)
    before = descriptors(os.getpid())
    check(loaded(kept.endpoints, smollm2, tokens), expected, cache=TOTALS)
    wait_for(lambda: descriptors(os.getpid()) == before)


def test_a_system_without_stand_ins(kept, smollm2, tokens, expected, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    check(loaded(kept.endpoints, smollm2, tokens), expected, cache=TOTALS)


def test_stand_ins_that_cannot_be_made(kept, smollm2, tokens, expected, monkeypatch):
    def fail(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "ftruncate", fail)
    before = descriptors(os.getpid())
    check(loaded(kept.endpoints, smollm2, tokens), expected, cache=TOTALS)
    wait_for(lambda: descriptors(os.getpid()) == before)


def test_no_load_leaves_a_file_open(kept, smollm2):
    with caravan.connect(kept.endpoints) as cluster:
        Model(smollm2, devices=cluster.devices).close()
        before = descriptors(os.getpid())
        for _ in range(3):
            Model(smollm2, devices=cluster.devices).close()
        assert descriptors(os.getpid()) == before


def test_workers_without_cache_and_models(smollm2, tokens, expected, own_cache):
    with caravan.LocalWorkers(2, threads=1) as workers:
        check(loaded(workers.endpoints, smollm2, tokens), expected, network=TOTALS)
    assert not own_cache.exists()


def test_the_base_protocol(kept, smollm2, tokens, expected):
    outcome = loaded(kept.endpoints, smollm2, tokens, extension=False)
    check(outcome, expected, network=TOTALS)


def test_one_worker_of_each_kind(kept, smollm2, tokens, expected):
    with caravan.Worker("CPU:1", options=("--no-extension",)) as base:
        outcome = loaded([base.endpoint, kept.endpoints[1]], smollm2, tokens)
    check(outcome, expected, network=(TOTALS[0], 0), cache=(0, TOTALS[1]))


def test_two_models_at_once(kept, smollm2, tokens, expected):
    """From the same file, onto the same devices: each load has its own tensors."""
    with caravan.connect(kept.endpoints) as cluster:

        def load() -> np.ndarray:
            params = ModelParams(tensor_split=(1, 2), repack=False)
            with (
                Model(smollm2, params, devices=cluster.devices) as model,
                Context(model, PARAMS) as context,
            ):
                context.decode(tokens)
                return context.logits()

        for side in [Side(load) for _ in range(2)]:
            assert np.array_equal(side.join(), expected)


# files that change under a load


@pytest.fixture
def copy(smollm2, tmp_path) -> Path:
    return Path(shutil.copyfile(smollm2, tmp_path / "m.gguf"))


def cut_off(path: Path) -> None:
    os.truncate(path, 20 * MB)


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"GGUF and so on")
    other.rename(path)


@pytest.mark.parametrize("change", [cut_off, touched, replaced])
def test_a_file_that_changes_while_it_is_loaded(pair, copy, change, own_cache):
    with (
        held_link(pair.endpoints[0], 5 * MB) as link,
        caravan.connect([link.endpoint, pair.endpoints[1]]) as cluster,
    ):
        side = Side(lambda: Model(copy, devices=cluster.devices))
        wait_for(lambda: link.held)
        change(copy)
        link.release()
        with pytest.raises(ModelError, match=r"m\.gguf (became shorter|was changed) while it was"):
            side.join()
    assert not list(own_cache.glob("digests/*.digests"))


# workers that go, and people who do not wait


def resident(pid: int) -> int:
    """Bytes of memory that belong to a process alone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def test_a_worker_that_is_killed_while_it_is_loaded(pair, smollm2):
    with (
        held_link(pair.endpoints[0], 5 * MB) as link,
        caravan.connect([link.endpoint, pair.endpoints[1]]) as cluster,
    ):
        loads: list[Sequence[DeviceLoad]] = []
        params = ModelParams(tensor_split=(1, 2))
        side = Side(lambda: Model(smollm2, params, devices=cluster.devices, on_load=loads.append))
        wait_for(lambda: link.held and loads and loads[-1][1].done == TOTALS[1])
        other = session_of(pair.workers[1])
        assert resident(other) > TOTALS[1]
        kill(session_of(pair.workers[0]))
        with pytest.raises(WorkerLost, match="lost RPC0"):
            side.join()
        wait_for(lambda: resident(other) < TOTALS[1] / 2)


def test_ctrl_c_while_it_loads(pair, smollm2, own_cache):
    with held_link(pair.endpoints[0], 5 * MB) as link:
        endpoints = f"{link.endpoint},{pair.endpoints[1]}"
        with running("run", "-q", "-m", str(smollm2), "-p", "x", "--rpc", endpoints) as run:
            wait_for(lambda: link.held)
            sessions = [pid for worker in pair.workers for pid in children(worker.pid)]
            busy = [pid for pid in sessions if resident(pid) > 20 * MB]
            held, free = busy
            run.interrupt()
            assert run.finish() == 130, run.lines
            assert [line for line in run.lines if line] == ["caravan: interrupted"]
            assert run.text == ""
            # while the link holds what it has
            wait_for(lambda: not alive(free))
            link.release()
            wait_for(lambda: not alive(held))
    pair.settle()


def test_a_head_that_is_killed_while_it_loads(pair, smollm2):
    with held_link(pair.endpoints[0], 5 * MB) as link:
        endpoints = f"{link.endpoint},{pair.endpoints[1]}"
        with running("run", "-q", "-m", str(smollm2), "-p", "x", "--rpc", endpoints) as run:
            wait_for(lambda: link.held)
            kill(run.process.pid)
            run.finish()
    pair.settle()


def test_stopped_by_its_caller(pair, smollm2, tokens, expected):
    with (
        held_link(pair.endpoints[0], 5 * MB) as link,
        caravan.connect([link.endpoint, pair.endpoints[1]]) as cluster,
    ):
        with pytest.raises(ModelError, match="loading was stopped"):
            Model(smollm2, devices=cluster.devices, progress=lambda fraction: not link.held)
        link.release()
        # the devices are as good as before
        params = ModelParams(tensor_split=(1, 2), repack=False)
        with (
            Model(smollm2, params, devices=cluster.devices) as model,
            Context(model, PARAMS) as context,
        ):
            context.decode(tokens)
            assert np.array_equal(context.logits(), expected)
