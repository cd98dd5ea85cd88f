"""A long prompt does not queue itself up before everybody else."""

from __future__ import annotations

import pytest

import caravan
from batching.test_batcher import GREEDY, Collected, answers, prompt, request
from caravan.batching import Batcher, Request
from caravan.errors import WorkerLost
from caravan.llm import ContextParams, Model
from e2e import tiny

PARAMS = ContextParams(n_batch=64, n_ubatch=8)


@pytest.mark.parametrize("options", [{}, {"extension": False}], ids=["extension", "base protocol"])
def test_few_micro_batches_are_under_way(tmp_path, options):
    with (
        caravan.LocalWorkers(2, threads=1) as workers,
        caravan.connect(workers.endpoints, **options) as cluster,
        Model(tiny.write(tmp_path / "tiny.gguf"), devices=cluster.devices) as model,
        Batcher(model, n_slots=2, n_ctx=512, params=PARAMS) as batcher,
    ):
        context = batcher.lanes[0].context
        decode, seen = context.decode, []

        def watched(parts):
            seen.append(sum(not mark.done for mark in context._marks))
            return decode(parts)

        context.decode = watched
        long = Request(prompt(3, 400), 2, GREEDY)
        assert [sink.finish() for sink in answers(batcher, [long, request()])] == ["length"] * 2
        assert len(seen) > 50
        # as many as stages
        assert 0 < max(seen) <= 2


def test_a_mark_waits_for_what_came_before_and_fails_with_the_device(tmp_path):
    with (
        caravan.Worker("CPU:1") as worker,
        caravan.connect([worker.endpoint]) as cluster,
        Model(tiny.write(tmp_path / "tiny.gguf"), devices=cluster.devices) as model,
        Batcher(model, n_slots=1, n_ctx=256) as batcher,
    ):
        answers(batcher, [request()])
        device = model.devices[0]
        device.mark().wait()
        worker.close()
        with pytest.raises(WorkerLost):
            device.mark().wait()
        last = Collected()
        batcher.submit(request(2), last)
        assert last.finish() == "error"
