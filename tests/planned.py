"""Made-up clusters and models for tests of plans, and the best of all splits, by trying them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from caravan.plan.job import Job
from caravan.plan.ladder import all_splits
from caravan.plan.memory import MemoryModel
from caravan.plan.pipeline import HeadTimes, Pipeline, Setting, Traffic
from caravan.plan.predict import job_seconds
from caravan.plan.profile import ClusterProfile, DeviceProfile, LinkProfile
from caravan.plan.times import DeviceTimes, Grid

GIB = 1 << 30
TOKENS = (1, 32, 512)
SEQUENCES = (1, 8)
KV = (256, 4096)


def times(speed: float, n_layer: int, output: float = 4.0) -> DeviceTimes:
    """A device that many times as fast as one which takes 100 ms for 512 tokens in a layer.

    Args:
        output: of the output layer, in layers.
    """

    def grid(tokens: Sequence[int], last: float) -> Grid:
        seconds = np.zeros((len(tokens), len(KV), n_layer + 1))
        for i, n in enumerate(tokens):
            for j, kv in enumerate(KV):
                # one token reads all weights, which takes as long as 8 tokens' arithmetic
                layer = (max(n, 8) / 512 * 0.1 + n * kv * 2e-9) / speed
                seconds[i, j, :-1], seconds[i, j, -1] = layer, layer * last
        return Grid(tuple(tokens), KV, seconds)

    return DeviceTimes(grid(TOKENS, 0.0), grid(SEQUENCES, output))


def setting(
    speeds: Sequence[float],
    n_layer: int = 30,
    *,
    ms: float = 0.0,
    gbit: float = 10.0,
    output: float = 4.0,
    memory: Sequence[float] | float = 64.0,
    links: Mapping[tuple[int, int], LinkProfile] | None = None,
    n_ctx: int = 8192,
) -> Setting:
    """Devices of such speeds, links of `ms` milliseconds in one direction, memory in GiB."""
    rooms = [memory] * len(speeds) if isinstance(memory, (int, float)) else memory
    link = LinkProfile(ms / 1e3, gbit * 1e9 / 8)
    devices = tuple(
        DeviceProfile(f"RPC{i}", 100 * speed, 10 * speed, 2e-4, 3e-4, int(r * GIB), int(r * GIB))
        for i, (speed, r) in enumerate(zip(speeds, rooms, strict=True))
    )
    pairs = [(i, j) for i in range(len(speeds)) for j in range(len(speeds)) if i != j]
    cluster = ClusterProfile(
        devices, (link,) * len(speeds), {pair: link for pair in pairs} | dict(links or {})
    )
    made = {speed: times(speed, n_layer, output) for speed in speeds}
    traffic = Traffic(8192.0, 8192.0, 2000.0, 16.0, 2.0, 0.1, 4 * 32000.0)
    head = HeadTimes(5e-4, 1e-4, 1e-6, 2e-4, 1e-4, 1e-4)
    each = tuple(made[speed] for speed in speeds)
    return Setting(cluster, each, traffic, head, n_layer, n_ctx=n_ctx)


def score(where: Setting, devices: Sequence[int], counts: Sequence[int], jobs: Sequence[Job]):
    """The mean of the jobs' seconds: of the logarithms, and back."""
    pipeline = Pipeline(where, tuple(devices), tuple(int(count) for count in counts))
    return math.exp(
        sum(math.log(max(job_seconds(pipeline, job), 1e-9)) for job in jobs) / len(jobs)
    )


def best_score(where: Setting, devices: Sequence[int], jobs: Sequence[Job], layers, room):
    """The least `score` of all splits that there is room for."""
    borders = np.concatenate(([0], np.cumsum(layers)))
    splits = all_splits(len(layers), len(devices))
    ends = np.cumsum(splits, axis=1)
    taken = borders[ends] - borders[ends - splits]
    fits = ((taken <= np.asarray(room)) | (splits == 0)).all(axis=1)
    return min((score(where, devices, split, jobs) for split in splits[fits]), default=None)


def memory(n_layer: int = 30, layer: int = 100 << 20, output: int = 200 << 20) -> MemoryModel:
    """A model of so many equal layers; 64 MiB to compute with on any device."""
    compute = {
        (role, blocks): 64 << 20
        for role in ("only", "first", "middle", "last")
        for blocks in range(4)
    }
    return MemoryModel((layer,) * n_layer + (output,), (layer // 10,) * n_layer + (0,), compute)
