"""The real rig: starts local workers, connects, asks the engine what it has.

Everything that it starts ends when its context is left, also after Ctrl-C. With `loader`, the only
room of the bench that needs the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import caravan
from caravan import engine
from caravan.backend import RemoteDevice, open_routes
from caravan.bench.devices import Inventory, WorkerDevice
from caravan.bench.loader import LlmModel
from caravan.bench.plan import Case
from caravan.bench.result import Host
from caravan.bench.session import Settings
from caravan.engine.layouts import DEVICE_TYPE_ACCEL, DEVICE_TYPE_CPU, DEVICE_TYPE_IGPU
from caravan.engine.library import Engine
from caravan.llm import local_devices
from caravan.llm.loader import OnLoad
from caravan.llm.opening import Workers, open_workers
from caravan.llm.splitter import Splitter
from caravan.stream.telemetry import DeviceStats
from caravan.worker.names import is_local

ShowLoad = Callable[[], AbstractContextManager[OnLoad | None]]


@dataclass(frozen=True, slots=True)
class EngineRig:
    """A `session.Rig` over the engine and the workers.

    Attributes:
        show_load: shows how far a load is.
        fit: whether to refuse what does not fit before it is loaded.
        splitter: who decides how layers are split where no case says it.
    """

    inventory: Inventory
    host: Host
    show_load: ShowLoad
    fit: bool = True
    splitter: Splitter | None = None

    def load(self, case: Case) -> LlmModel:
        devices = self.inventory.pick(case.devices)
        open_routes(devices)
        with self.show_load() as on_load:
            return LlmModel(case, devices, on_load, self.fit, self.splitter)

    def totals(self, case: Case) -> dict[str, DeviceStats | None]:
        found: dict[str, DeviceStats | None] = {}
        for device in self.inventory.pick(case.devices):
            # nobody counts for the engine's own devices
            found[device.name] = device.stats() if isinstance(device, RemoteDevice) else None
        return found


@contextmanager
def open_rig(settings: Settings, show_load: ShowLoad = nullcontext) -> Iterator[EngineRig]:
    """Everything that the run needs, until the context is left. Raises CaravanError."""
    engine.set_verbose(settings.verbose)
    wanted = Workers(
        settings.endpoints,
        local_workers=settings.local_workers,
        local_devices=settings.local_devices,
        threads=settings.worker_threads or 0,
        timeout=settings.timeout,
        direct_copies=settings.direct_copies,
        wire_dtype=settings.wire_dtype,
        token=settings.token,
        tls=settings.tls,
    )
    with open_workers(wanted) as remote:
        loaded = engine.load()
        inventory = inventory_of(loaded, tuple(remote))
        host = host_of(loaded, inventory, settings)
        yield EngineRig(inventory, host, show_load, settings.fit, settings.splitter)


def inventory_of(loaded: Engine, remote: tuple[WorkerDevice, ...]) -> Inventory:
    """The engine's own devices and these of workers."""
    ggml = loaded.ggml
    local = tuple(local_devices())
    discrete = tuple(device for device in local if ggml.dev_type(device.handle) != DEVICE_TYPE_IGPU)
    cpus: list[str] = []
    backends: dict[str, None] = {}
    for handle in ggml.devices():
        kind, backend = ggml.dev_type(handle), ggml.reg_name(ggml.dev_backend_reg(handle)).decode()
        if kind in (DEVICE_TYPE_CPU, DEVICE_TYPE_ACCEL):
            cpus.append(ggml.dev_description(handle).decode(errors="replace"))
        if kind != DEVICE_TYPE_CPU and not backend.startswith("RPC"):
            backends[backend] = None
    return Inventory(
        local=local,
        default_local=discrete or local,
        remote=tuple(device for device in remote if not is_local(device.name)),
        started=tuple(device for device in remote if is_local(device.name)),
        local_backends=tuple(backends),
        cpu_info=", ".join(cpus),
    )


def host_of(loaded: Engine, inventory: Inventory, settings: Settings) -> Host:
    """What the records of this run have in common."""
    return Host(
        caravan_version=caravan.__version__,
        engine_version=loaded.version,
        engine_commit=loaded.commit,
        engine_api=loaded.api_version,
        backends=inventory.backends,
        cpu_info=inventory.cpu_info,
        gpu_info=inventory.gpu_info,
        local_workers=settings.local_workers,
        worker_threads=settings.worker_threads,
        direct_copies=settings.direct_copies,
        wire_dtype=settings.wire_dtype,
    )
