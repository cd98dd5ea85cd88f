"""Workers that die under many streams: every stream goes on, and none loses or repeats a token."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import caravan
from batching.test_batcher import GREEDY, Collected, alone, request
from caravan.batching import Batcher
from caravan.errors import WorkerLost
from caravan.llm import ContextParams, Model, Resume
from caravan.llm.resume import Resumed
from e2e import tiny
from e2e.processes import kill, session_of

PARAMS = ContextParams(n_batch=64, n_ubatch=32)
N_GEN = 40
# see `CLEAR` there
SEEDS = (0, 3, 8, 10, 13, 18, 24, 31)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture
def workers() -> Iterator[list[caravan.Worker]]:
    with caravan.LocalWorkers(2, threads=1) as workers:
        yield workers.workers


class Killer(Collected):
    """Kills when so many parts have come."""

    def __init__(self, after: int, pids: list[int]) -> None:
        super().__init__()
        self._after, self._pids = after, pids

    def __call__(self, chunk) -> None:
        super().__call__(chunk)
        if len(self.chunks) == self._after:
            while self._pids:
                kill(self._pids.pop())


@pytest.mark.parametrize("victim", ["first worker", "last worker", "session", "both sessions"])
@pytest.mark.parametrize("after", [1, 12])
def test_every_stream_goes_on(path, workers, victim, after):
    told: list[Resumed] = []
    requests = [request(seed, 10 + 13 * (seed % 8), N_GEN) for seed in SEEDS]
    with (
        caravan.connect([worker.endpoint for worker in workers]) as cluster,
        Model(path, devices=cluster.devices) as model,
        Batcher(
            model,
            n_slots=len(SEEDS),
            n_ctx=256,
            params=PARAMS,
            resume=Resume(on_resume=told.append),
        ) as batcher,
    ):
        pids = {
            "first worker": [workers[0].pid],
            "last worker": [workers[1].pid],
            "session": [session_of(workers[1])],
            "both sessions": [session_of(worker) for worker in workers],
        }[victim]
        sinks = [Collected() for _ in requests[1:]] + [Killer(after, pids)]
        for one, sink in zip(requests, sinks, strict=True):
            batcher.submit(one, sink)
        assert [sink.finish() for sink in sinks] == ["length"] * len(SEEDS)
        assert len(told) == 1
        texts = [sink.text for sink in sinks]
        assert all(sink.chunks[-1].usage.n_gen == N_GEN for sink in sinks)
    with Model(path) as model:
        assert texts == [alone(model, one) for one in requests]


def test_without_resume_all_streams_end_with_the_loss(path, workers):
    with (
        caravan.connect([worker.endpoint for worker in workers]) as cluster,
        Model(path, devices=cluster.devices) as model,
        Batcher(model, n_slots=2, n_ctx=256, params=PARAMS) as batcher,
    ):
        sinks = [Collected(), Killer(2, [session_of(workers[0])])]
        for seed, sink in enumerate(sinks):
            batcher.submit(request(seed, n=200), sink)
        assert [sink.finish() for sink in sinks] == ["error", "error"]
        assert isinstance(sinks[0].chunks[-1].error, WorkerLost)
        with pytest.raises(WorkerLost):
            batcher.submit(request(), Collected())


def test_a_worker_that_is_gone_for_good(path):
    """The model is on the other one then, and all streams go on there."""
    told: list[Resumed] = []
    with (
        caravan.Worker("CPU:1") as stays,
        caravan.Worker("CPU:1") as goes,
        caravan.connect([stays.endpoint, goes.endpoint]) as cluster,
        Model(path, devices=cluster.devices) as model,
        Batcher(
            model,
            n_slots=4,
            n_ctx=256,
            params=PARAMS,
            resume=Resume(wait=0.2, on_resume=told.append),
        ) as batcher,
    ):
        closing = threading.Event()

        def closer(chunk) -> None:
            last(chunk)
            closing.set()

        last = Collected()
        sinks = [Collected() for _ in range(3)]
        for seed, sink in enumerate([*sinks, closer]):
            batcher.submit(request(seed, n=200, sampling=GREEDY), sink)
        assert closing.wait(30)
        goes.close()
        assert [sink.finish() for sink in [*sinks, last]] == ["length"] * 4
        assert [resumed.devices for resumed in told] == [("RPC0",)]
