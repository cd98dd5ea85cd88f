"""Pipelines of stages that take what a test says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from caravan.plan.pipeline import HeadTimes, Pipeline, Setting, Traffic
from caravan.plan.profile import ClusterProfile, DeviceProfile, LinkProfile
from caravan.plan.times import DeviceTimes, Grid

UBATCH = 64
FREE = HeadTimes(0.0, 0.0, 0.0, 0.0, 0.0)
AT_ONCE = LinkProfile()
NOTHING = Traffic(0, 0, 0, 0, 0, 1, 0)


def traffic(**given: float) -> Traffic:
    """Nothing travels but what is given, for each token or output."""
    none = dict.fromkeys(("activation", "embedding", "fixed", "position", "mask", "logits"), 0.0)
    return Traffic(**{**none, "again": 1.0, **given})


def pipeline(
    seconds: Sequence[float],
    *,
    decode: Sequence[float] | None = None,
    output: float = 0.0,
    traffic: Traffic = NOTHING,
    head: HeadTimes = FREE,
    link: LinkProfile = AT_ONCE,
    to_head: LinkProfile | None = None,
    between: Mapping[tuple[int, int], LinkProfile] | None = None,
    processors: Mapping[str, float] | None = None,
    n_batch: int = 2048,
    **device: Any,
) -> Pipeline:
    """A stage of one layer for each of `seconds`, which it takes for a micro-batch, whatever its
    size; the last has the output layer as well.

    Args:
        decode: seconds of a step; as for a micro-batch.
        output: of the output layer.
        link: from each stage to the next, and to the head.
        to_head: another one to the head.
        between: instead of a link to the next stage.
        device: more of the DeviceProfile.
    """
    n = len(seconds)
    times = tuple(
        DeviceTimes(_grid(n, one, 0.0), _grid(n, other, output))
        for one, other in zip(seconds, decode or seconds, strict=True)
    )
    if between is None:
        between = {(i, i + 1): link for i in range(n - 1)}
    cluster = ClusterProfile(
        tuple(DeviceProfile(f"RPC{i}", 1.0, 1.0, **device) for i in range(n)),
        ((to_head or link),) * n,
        between,
        processors or {},
    )
    setting = Setting(
        cluster, times, traffic, head, n, n_ubatch=UBATCH, n_batch=n_batch, n_ctx=1 << 20
    )
    return Pipeline(setting, tuple(range(n)), (*[1] * (n - 1), 2))


def _grid(n_layer: int, seconds: float, output: float) -> Grid:
    table = np.full((1, 1, n_layer + 1), float(seconds))
    table[:, :, n_layer] = output
    return Grid((UBATCH,), (256,), table)


def slow(seconds: float = 0.0, rate: float = math.inf, way: str = "direct") -> LinkProfile:
    return LinkProfile(seconds, rate, way)
