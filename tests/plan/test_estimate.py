"""The formula says about what the simulator says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from caravan.plan.estimate import Estimator
from caravan.plan.job import Job
from caravan.plan.ladder import all_splits
from caravan.plan.pipeline import Pipeline
from caravan.plan.predict import job_seconds
from planned import setting

SPLITS = all_splits(13, 3)[::7]


def crowded(where):
    """All devices on one host with two processors; everything that a profile can have."""
    devices = tuple(
        replace(device, host="one", threads=1.0, check=2e-6, check_graph=1e-3, turn=2e-3)
        for device in where.cluster.devices
    )
    cluster = replace(where.cluster, devices=devices, processors={"one": 2.0})
    return replace(where, cluster=cluster, traffic=replace(where.traffic, nodes=30.0, graph=9000.0))


def relayed(where):
    return replace(where, cluster=replace(where.cluster, between={}))


def errors(where, job):
    """Of each split, relative to the simulator."""
    found = Estimator(where, [job]).seconds((2, 0, 1), SPLITS)[0]
    played = [
        job_seconds(Pipeline(where, (2, 0, 1), tuple(int(n) for n in split)), job)
        for split in SPLITS
    ]
    return np.abs(found / np.array(played) - 1)


@pytest.mark.parametrize("change", [lambda where: where, crowded, relayed])
@pytest.mark.parametrize("ms", [0.0, 5.0])
@pytest.mark.parametrize(
    ("job", "most"),
    [
        (Job(100, 0, 1), 0.03),
        (Job(1500, 0, 1), 0.06),
        (Job(64, 64, 1), 0.05),
        (Job(600, 0, 4), 0.3),
        (Job(32, 256, 5), 0.3),
    ],
)
def test_near_the_simulator(change, ms, job, most):
    found = errors(change(setting([1.0, 3.0, 2.0], 12, ms=ms)), job)
    assert found.max() < most
    assert np.median(found) < most / 2


def test_several_jobs_and_splits_at_once_are_as_one_by_one():
    where = setting([1.0, 3.0, 2.0], 12)
    jobs = [Job(100, 8, 1), Job(700, 0, 2)]
    together = Estimator(where, jobs).seconds((0, 1, 2), SPLITS)
    for number, job in enumerate(jobs):
        for place, split in enumerate(SPLITS[:5]):
            (alone,) = Estimator(where, [job]).seconds((0, 1, 2), split[None, :])
            assert together[number, place] == pytest.approx(alone[0])
