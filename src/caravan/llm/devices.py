"""What the engine can compute on besides its CPU: the shape of a device, and the engine's own.

`EngineDevice` is what a model wants of a device; the workers' devices in `backend` have that shape
without importing it. Knows nothing of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

from caravan import engine
from caravan.engine.layouts import DEVICE_TYPE_ACCEL, DEVICE_TYPE_GPU, DEVICE_TYPE_IGPU
from caravan.errors import CaravanError, UsageError
from caravan.worker.names import numbered

_MAX_BACKENDS = 16  # GGML_SCHED_MAX_BACKENDS
_WORKERS = "RPC"  # the registry of the workers' devices, which are GPUs to the engine


class Hold(Protocol):
    """What was put on a device at some time."""

    def check(self) -> None:
        """Raises WorkerLost once it is lost, for good: also when the device has come back."""


class Mark(Protocol):
    """A moment in the work of a device."""

    def wait(self) -> object:
        """Until everything before it has been done; raises WorkerLost."""


class EngineDevice(Protocol):
    """A ggml device.

    Attributes:
        handle: address of its ggml_backend_device.
        name: as in `RPC0` or `CUDA0`.
        allocation_error: why the newest refused allocation was refused, where that is known.
        simulated: whether it only costs time and computes nothing.
    """

    @property
    def handle(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def allocation_error(self) -> CaravanError | None: ...

    @property
    def simulated(self) -> bool: ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes; (0, 0) where the device does not say."""

    def check(self) -> None:
        """Raises WorkerLost once the device is lost, until it has come back."""

    def hold(self) -> Hold:
        """What is put on the device from now on."""

    def mark(self) -> Mark | None:
        """This moment; None where nobody can wait for it alone."""

    def without_weights(self) -> AbstractContextManager[None]:
        """Inside, a file that has no data may be loaded onto it; for simulated ones only."""

    def watched_sizes(self, watcher: Callable[[bytes, int], None]) -> AbstractContextManager[None]:
        """Inside, `watcher` is told name and padded bytes of each tensor whose size the engine asks
        for on this thread; of a device that cannot be watched, it is told nothing."""


@dataclass(frozen=True, slots=True)
class LocalDevice:
    """A device of the engine itself, on this machine."""

    handle: int
    name: str
    description: str
    allocation_error: CaravanError | None = None
    simulated: bool = False

    def memory(self) -> tuple[int, int]:
        free, total = engine.load().ggml.dev_memory(self.handle)
        return free, total

    def check(self) -> None:
        """Never lost: it shares this process's fate."""

    def hold(self) -> Hold:
        return self

    def mark(self) -> Mark | None:
        return None

    def without_weights(self) -> AbstractContextManager[None]:
        raise UsageError(f"{self.name} is no simulated device")

    def watched_sizes(self, watcher: Callable[[bytes, int], None]) -> AbstractContextManager[None]:
        return nullcontext()


def local_devices() -> list[LocalDevice]:
    """The engine's own GPUs, integrated ones too; empty for an engine that has the CPU only."""
    ggml = engine.load().ggml
    found = []
    for handle in ggml.devices():
        kind, registry = ggml.dev_type(handle), ggml.reg_name(ggml.dev_backend_reg(handle))
        if kind in (DEVICE_TYPE_GPU, DEVICE_TYPE_IGPU) and registry != _WORKERS.encode():
            name, about = ggml.dev_name(handle), ggml.dev_description(handle)
            found.append(LocalDevice(handle, name.decode(), about.decode("utf-8", "replace")))
    return found


def cpu() -> LocalDevice:
    """The engine's own CPU, which holds what is on no other device."""
    ggml = engine.load().ggml
    handle = ggml.dev_by_name(b"CPU")
    about: bytes = ggml.dev_description(handle)
    return LocalDevice(handle, "CPU", about.decode("utf-8", "replace"))


_Device = TypeVar("_Device", bound=EngineDevice)


def pick(names: Sequence[str], devices: Sequence[_Device]) -> list[_Device]:
    """The devices of these names, in this order; `local:CPU:1` may stand there several times.

    Raises UsageError for a name that none of `devices` has.
    """
    known = {device.name: device for device in devices}
    for name in numbered(names):
        if name == "CPU":
            raise UsageError(
                "CPU computes what is on no device and stands in no list of them: local:CPU is a"
                " worker on it, and none alone leaves everything to it"
            )
        if name not in known:
            there_are = ", ".join(known) or "none (use --rpc or --local-workers)"
            raise UsageError(f"no device {name!r}; there are: {there_are}")
    return [known[name] for name in numbered(names)]


def check_count(devices: Sequence[EngineDevice]) -> None:
    """Raises UsageError for more devices than the engine can use; it would end the process."""
    # its scheduler counts the CPU and the accelerators as well
    check_room(len(devices), lambda kind: kind == DEVICE_TYPE_ACCEL)


def check_room(count: int, beside: Callable[[int], bool]) -> None:
    """Whether the engine can use so many devices beside the CPU and those that it lists whose type
    is one of `beside`; raises UsageError."""
    ggml = engine.load().ggml
    room = _MAX_BACKENDS - 1 - sum(beside(ggml.dev_type(device)) for device in ggml.devices())
    if count > room:
        raise UsageError(f"{count} devices are more than the {room} that the engine can use")


def check_all(holds: Iterable[Hold]) -> None:
    """Raises WorkerLost if one of them is lost."""
    for hold in holds:
        hold.check()
