"""Vectors of texts over workers: the same numbers, and no loss that is not got over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.errors import WorkerLost
from caravan.llm import ContextParams, Embedder, Model, ModelParams
from e2e.architectures import ENCODERS, make
from e2e.processes import kill, session_of

N_PROMPT = 200
PARAMS = ContextParams(n_ctx=256, n_ubatch=64)


@pytest.fixture(scope="module")
def workers() -> Iterator[caravan.LocalWorkers]:
    with caravan.LocalWorkers(2) as started:
        yield started


@pytest.fixture(scope="module")
def texts(tokens: list[int]) -> list[list[int]]:
    """Short ones, and one that is computed in parts."""
    return [tokens[:9], tokens[9:30], tokens[:3], tokens]


@pytest.fixture(scope="module")
def expected(smollm2: Path, texts: list[list[int]]) -> np.ndarray:
    with Model(smollm2, ModelParams(repack=False)) as model, Embedder(model, PARAMS) as embedder:
        return embedder.embed(texts)


def test_two_workers_compute_what_the_engine_does_alone(workers, smollm2, texts, expected):
    with (
        caravan.connect(workers.endpoints) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Embedder(model, PARAMS) as embedder,
    ):
        np.testing.assert_array_equal(embedder.embed(texts), expected)


@pytest.mark.parametrize("arch", ENCODERS)
def test_encoders_compute_the_same_on_a_worker(workers, tmp_path, arch):
    path = tmp_path / f"{arch}.gguf"
    make(path, arch)
    some = [[1, 2, 3], [4] * 60, [7, 8]]
    with Model(path, ModelParams(repack=False)) as model, Embedder(model) as embedder:
        alone = embedder.embed(some)
    with (
        caravan.connect(workers.endpoints) as cluster,
        Model(path, devices=cluster.devices) as model,
        Embedder(model) as embedder,
    ):
        np.testing.assert_array_equal(embedder.embed(some), alone)


def lose_session(worker: caravan.Worker) -> None:
    """The process that serves the head ends: it has more connections than the spare."""
    kill(session_of(worker))


def test_a_loss_is_got_over(workers, smollm2, texts, expected):
    losses = []
    resume = caravan.Resume(on_resume=losses.append)
    with (
        caravan.connect(workers.endpoints) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Embedder(model, PARAMS, resume=resume) as embedder,
    ):
        for number in range(2):
            lose_session(workers.workers[number])
            np.testing.assert_array_equal(embedder.embed(texts), expected)
    assert [resumed.n_tokens for resumed in losses] == [0, 0]


def test_a_loss_is_told_where_nobody_wants_it_to_be_got_over(workers, smollm2, texts):
    with (
        caravan.connect(workers.endpoints) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Embedder(model, PARAMS) as embedder,
    ):
        lose_session(workers.workers[1])
        with pytest.raises(WorkerLost, match="RPC1"):
            embedder.embed(texts)
