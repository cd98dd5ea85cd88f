"""`Setting`s: of devices that are there, measured, and of devices that are only described.

Joins what others find out: the model's own graph, the speeds of devices and links, the times of
layers. Called by `auto` and the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from caravan.backend import RemoteDevice
from caravan.errors import UsageError
from caravan.llm.devices import EngineDevice
from caravan.llm.params import ContextParams, ModelParams
from caravan.plan.job import Job
from caravan.plan.measure import measure_cluster, times_of
from caravan.plan.pipeline import Setting
from caravan.plan.profile import ClusterProfile
from caravan.plan.times import DeviceTimes
from caravan.plan.work import ModelWork

Step = Callable[[str], None]


def work_of(
    path: Path,
    params: ModelParams,
    context: ContextParams,
    jobs: Sequence[Job],
    *,
    exact: bool = False,
) -> ModelWork:
    """What the model computes for such jobs.

    Args:
        context: of one request.
        exact: look at the very micro-batches of these jobs. Without it at the same ones for all, so
            that what was measured for one job is good for others.

    Blocks for some tenths of a second. Raises what the engine has against model or context.
    """
    return ModelWork.of(
        path,
        # which device has which layer is to be found out
        replace(params, tensor_split=()),
        replace(context, n_seq_max=1),
        sizes=micro_batches(jobs, context.n_ubatch) if exact else (),
        sequences=sorted({1, *(job.concurrency for job in jobs)}),
    )


def micro_batches(jobs: Sequence[Job], n_ubatch: int) -> list[int]:
    """Their sizes, in tokens, ascending."""
    sizes = {min(job.prompt, n_ubatch) for job in jobs} | {job.prompt % n_ubatch for job in jobs}
    return sorted(sizes - {0})


def require_remote(devices: Sequence[EngineDevice]) -> list[RemoteDevice]:
    """Them, as what can be measured. Raises UsageError for others."""
    found = []
    for device in devices:
        if not isinstance(device, RemoteDevice):
            raise UsageError(f"{device.name} is no device that can be measured")
        found.append(device)
    return found


def measured(
    work: ModelWork,
    context: ContextParams,
    devices: Sequence[RemoteDevice],
    on_step: Step | None = None,
    *,
    fresh: bool = False,
    ordered: bool = False,
) -> Setting:
    """Of devices that are there, from what is known of them, or is measured now.

    Args:
        on_step: told, in a line, what is being measured.
        fresh: measure what is known already.
        ordered: no other order of the devices is thought of.

    Raises WorkerLost.
    """
    cluster = measure_cluster(devices, fresh=fresh, on_step=on_step, ordered=ordered)
    times = times_of(devices, work, cluster, fresh=fresh, on_step=on_step)
    return _setting(work, context, cluster, times)


def described(work: ModelWork, context: ContextParams, cluster: ClusterProfile) -> Setting:
    """Of devices that need not exist, by their speeds alone."""
    times = tuple(work.times(device) for device in cluster.devices)
    return _setting(work, context, cluster, times)


def _setting(
    work: ModelWork,
    context: ContextParams,
    cluster: ClusterProfile,
    times: tuple[DeviceTimes, ...],
) -> Setting:
    return Setting(
        cluster,
        times,
        work.traffic,
        work.head,
        work.n_layer,
        n_ubatch=context.n_ubatch,
        n_batch=context.n_batch,
        n_ctx=context.n_ctx,
    )
