"""What the tests of loading share: workers that keep weights, a load, and where it came from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import caravan
from caravan.llm import Context, ContextParams, Model, ModelParams
from caravan.llm.loading import DeviceLoad
from caravan.worker.store import Store
from e2e.processes import children, wait_for

PARAMS = ContextParams(n_ctx=64, n_ubatch=16, n_threads=1)
N_PROMPT = 40
MB = 10**6
# a third of the sample's layers, and the others with the output
TOTALS = (24380928, 72195840)
THIRDS = ModelParams(tensor_split=(1, 2), repack=False)


def is_spare(session: int) -> bool:
    """Whether a session's process waits for its head: it is connected to its supervisor alone."""
    places = Path(f"/proc/{session}/fd")
    try:
        return [os.readlink(place)[:6] for place in places.iterdir()].count("socket") == 1
    except OSError:
        return False


def resident(pid: int) -> int:
    """Bytes of memory that belong to a process alone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


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

    def sessions(self) -> list[int]:
        """The processes that will serve the next head; `settle` first."""
        return [pid for worker in self.workers for pid in children(worker.pid)]

    def empty(self) -> None:
        for directory in (*self.caches, self.shelf):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()


@contextmanager
def two_keepers(base: Path) -> Iterator[Pair]:
    """Two workers, each with a cache of its own, and one directory of models."""
    caches, shelf = [base / "cache0", base / "cache1"], base / "shelf"
    shelf.mkdir()
    options = ("--model-dir", str(shelf))
    workers = [caravan.Worker("CPU:1", options=("--cache", str(c), *options)) for c in caches]
    try:
        yield Pair(workers, caches, shelf)
    finally:
        for worker in workers:
            worker.close()


@dataclass
class Outcome:
    loads: Sequence[DeviceLoad]
    logits: np.ndarray


def logits(model: Model, tokens: list[int]) -> np.ndarray:
    with Context(model, PARAMS) as context:
        context.decode(tokens)
        return context.logits()


def loaded(
    endpoints: Sequence[str],
    path: Path,
    tokens: list[int],
    **options,
) -> Outcome:
    """Load, and compute the logits after 40 tokens."""
    loads: list[Sequence[DeviceLoad]] = [()]
    fractions: list[float] = []
    with (
        caravan.connect(endpoints, **options) as cluster,
        Model(
            path,
            THIRDS,
            devices=cluster.devices,
            progress=lambda fraction: fractions.append(fraction) is None,
            on_load=loads.append,
        ) as model,
    ):
        found = logits(model, tokens)
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
