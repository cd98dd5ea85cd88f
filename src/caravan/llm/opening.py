"""Workers and devices of a command that may be given workers, or may start its own.

`run` opens devices by name; the bench takes the workers' and picks for each test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from caravan.backend import RemoteDevice, connect
from caravan.errors import UsageError
from caravan.llm.cores import physical_cores, share_of_cores
from caravan.llm.devices import EngineDevice, local_devices
from caravan.worker.local import LocalWorkers


@contextmanager
def open_workers(
    endpoints: Sequence[str], *, local_workers: int, worker_threads: int, timeout: float
) -> Iterator[Sequence[RemoteDevice]]:
    """The workers' devices, until the context is left; for the arguments see `open_devices`."""
    with ExitStack() as stack:
        if local_workers:
            if endpoints:
                raise UsageError("local workers and endpoints do not go together")
            threads = worker_threads or share_of_cores(physical_cores(), local_workers)
            workers = LocalWorkers(local_workers, threads=threads)
            endpoints = stack.enter_context(workers).endpoints
        if not endpoints:
            yield ()
        else:
            yield stack.enter_context(connect(endpoints, timeout=timeout)).devices


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
    with open_workers(
        endpoints, local_workers=local_workers, worker_threads=worker_threads, timeout=timeout
    ) as remote:
        yield _picked(remote, names)


def _picked(remote: Sequence[EngineDevice], names: Sequence[str]) -> list[EngineDevice]:
    devices = [*remote, *local_devices()]
    if not names:
        return devices
    if list(names) == ["none"]:
        return []
    known = {device.name: device for device in devices}
    for name in names:
        if name not in known:
            raise UsageError(f"no device {name!r}; there are: {', '.join(known) or 'none'}")
    return [known[name] for name in names]
