"""`open_devices`: the devices of a command that may be given workers, or may start its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from caravan.backend import connect
from caravan.errors import UsageError
from caravan.llm.cores import physical_cores
from caravan.llm.devices import EngineDevice, local_devices
from caravan.worker.local import LocalWorkers


@contextmanager
def open_devices(
    endpoints: Sequence[str] = (),
    *,
    local_workers: int = 0,
    worker_threads: int = 0,
    names: Sequence[str] = (),
    timeout: float = 30.0,
) -> Iterator[list[EngineDevice]]:
    """The devices to put a model on, until the context is left.

    Args:
        endpoints: workers to connect to.
        local_workers: how many to start on this machine, with `worker_threads` each (0: an equal
            share of the cores); they end with the context.
        names: which of the devices, in this order; `none` alone: the CPU. Empty: those of the
            workers, then the engine's own.
        timeout: seconds that a worker may be silent.

    Raises UsageError for a device that does not exist, and what `connect` and `LocalWorkers` raise.
    """
    with ExitStack() as stack:
        if local_workers:
            if endpoints:
                raise UsageError("local workers and endpoints do not go together")
            threads = worker_threads or max(1, physical_cores() // local_workers)
            workers = LocalWorkers(local_workers, threads=threads)
            endpoints = stack.enter_context(workers).endpoints
        remote: list[EngineDevice] = []
        if endpoints:
            remote.extend(stack.enter_context(connect(endpoints, timeout=timeout)).devices)
        yield _picked(remote, names)


def _picked(remote: list[EngineDevice], names: Sequence[str]) -> list[EngineDevice]:
    own: list[EngineDevice] = list(local_devices())
    if not names:
        return remote + own
    if list(names) == ["none"]:
        return []
    known = {device.name: device for device in (*remote, *own)}
    for name in names:
        if name not in known:
            raise UsageError(f"no device {name!r}; there are: {', '.join(known) or 'none'}")
    return [known[name] for name in names]
