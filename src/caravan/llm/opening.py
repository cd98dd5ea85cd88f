"""Workers and devices of a command that may be given workers, or may start its own.

`run` and `devices` open them by name; the bench takes all and picks for each test.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from caravan.backend import DEFAULT_POLL, RemoteDevice, open_routes
from caravan.errors import UsageError
from caravan.llm.connecting import connect, share
from caravan.llm.devices import EngineDevice, local_devices, pick
from caravan.transport.certificates import Tls
from caravan.trust.token import Token
from caravan.worker import names as device_names
from caravan.worker.local import LocalWorkers


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers that a command wants.

    Attributes:
        endpoints: those to connect to.
        local_workers: how many to start on this machine, instead of connecting to some.
        local_devices: devices of this machine to start a worker for, such as `local:CPU:1`.
        threads: of each started worker that names none; 0: an equal share of the cores.
        timeout: seconds that a worker may be silent.
        direct_copies: whether workers may copy to each other without passing the head.
        wire_dtype: how activations travel: f32, f16 or bf16.
        poll: 0...100, how long to look for an answer before sleeping; see `connect`.
        token: what workers that ask for one are shown; None: the environment's.
        tls: for the endpoints; workers that are started here do without.
    """

    endpoints: Sequence[str] = ()
    local_workers: int = 0
    local_devices: Sequence[str] = ()
    threads: int = 0
    timeout: float = 30.0
    direct_copies: bool = True
    wire_dtype: str = "f32"
    poll: int = DEFAULT_POLL
    token: Token | None = None
    tls: Tls | None = None


@contextmanager
def open_workers(wanted: Workers) -> Iterator[Sequence[RemoteDevice]]:
    """The workers' devices, those of this machine last, until the context is left.

    Raises what `connect` and `LocalWorkers` raise.
    """
    if wanted.local_workers and wanted.endpoints:
        raise UsageError("local workers and endpoints do not go together")
    threads = wanted.threads or share(wanted.local_devices, wanted.local_workers)
    endpoints = list(wanted.endpoints)
    with ExitStack() as stack:
        if wanted.local_workers:
            workers = LocalWorkers(wanted.local_workers, threads=threads)
            endpoints += stack.enter_context(workers).endpoints
        endpoints += wanted.local_devices
        if not endpoints:
            yield ()
            return
        cluster = connect(
            endpoints,
            timeout=wanted.timeout,
            direct_copies=wanted.direct_copies,
            wire_dtype=wanted.wire_dtype,
            poll=wanted.poll,
            threads=threads,
            token=wanted.token,
            tls=None if wanted.local_workers else wanted.tls,
        )
        stack.enter_context(cluster)
        for note in cluster.notes:
            print(f"caravan: note: {note}", file=sys.stderr)
        yield cluster.devices


@contextmanager
def open_devices(wanted: Workers, names: Sequence[str] = ()) -> Iterator[list[EngineDevice]]:
    """The devices to put a model on, until the context is left.

    Args:
        wanted: the workers; those of local devices follow from `names`.
        names: which of the devices, in this order; `none` alone: the CPU. Empty: those of the
            workers, then the engine's own.

    Raises UsageError for a device that does not exist, and what `open_workers` raises.
    """
    with open_workers(replace(wanted, local_devices=device_names.needed([names]))) as remote:
        yield _picked(remote, names)


def _picked(remote: Sequence[EngineDevice], names: Sequence[str]) -> list[EngineDevice]:
    devices = [*remote, *local_devices()]
    if list(names) == ["none"]:
        return []
    if names:
        devices = pick(names, devices)
        open_routes(devices)
    return devices
