"""What a decode step costs in messages: one segment to each worker, one answer from the last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import caravan
from caravan.llm import Context, ContextParams, Model, ModelParams

STEPS = 10


@pytest.fixture(params=["workers", "one worker"])
def cluster(request: pytest.FixtureRequest) -> Iterator[caravan.Cluster]:
    if request.param == "workers":
        with (
            caravan.LocalWorkers(3, threads=1) as workers,
            caravan.connect(workers.endpoints) as cluster,
        ):
            yield cluster
    else:
        with (
            caravan.Worker("CPU:1,CPU:1,CPU:1") as worker,
            caravan.connect([worker.endpoint]) as cluster,
        ):
            yield cluster


def test_a_step_is_one_segment_to_each_and_one_answer(
    smollm2: Path, cluster: caravan.Cluster
) -> None:
    cluster.routes()  # waits for the direct ways, so that nothing is relayed
    streams = [device.link.stream for device in cluster.devices]
    with (
        Model(smollm2, ModelParams(repack=False), devices=cluster.devices) as model,
        Context(model, ContextParams(n_ctx=256)) as context,
    ):
        context.decode(list(range(100, 110)))
        for token in range(3):
            context.decode([token])
            context.synchronize()
        sent = [stream.segments for stream in streams]
        received = [stream.bytes_received for stream in streams]
        for token in range(STEPS):
            context.decode([token])
            context.synchronize()
        assert [s.segments - n for s, n in zip(streams, sent, strict=True)] == [STEPS] * 3
        answers = [s.bytes_received - n for s, n in zip(streams, received, strict=True)]
        logits = 16 + 4 * model.n_vocab
        assert answers == [0, 0, STEPS * logits]
