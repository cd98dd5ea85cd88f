"""The devices that a run can use, and what is said about them.

Made from the connected workers' devices and the engine's own. Knows names and descriptions; loads
and connects nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from caravan.bench.values import AUTO, NO_DEVICE
from caravan.llm.devices import EngineDevice, pick

_MIB = 1 << 20


class WorkerDevice(EngineDevice, Protocol):
    """A device of a worker."""

    @property
    def endpoint(self) -> str:
        """`HOST:PORT` of the worker."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """All non-CPU devices: the engine's own and those of the workers.

    Attributes:
        local: the engine's own devices.
        default_local: those of them that `auto` uses (integrated GPUs only when there is no other).
        remote: RPC0, RPC1, … in the order of the endpoints.
        local_backends: names of the engine's backends other than CPU and RPC.
        cpu_info: names of this machine's CPUs.
        started: devices of this machine behind workers that were started for this run because a
            case names them, as in `local:CPU:1`.
    """

    local: tuple[EngineDevice, ...] = ()
    default_local: tuple[EngineDevice, ...] = ()
    remote: tuple[WorkerDevice, ...] = ()
    local_backends: tuple[str, ...] = ()
    cpu_info: str = ""
    started: tuple[WorkerDevice, ...] = ()

    @property
    def all(self) -> tuple[EngineDevice, ...]:
        """Every device, in the order of the engine's registry: workers were added last."""
        return self.local + self.remote + self.started

    @property
    def backends(self) -> str:
        """The text of the field `backends`."""
        return (
            ",".join((*self.local_backends, *(("RPC",) if self.remote + self.started else ())))
            or "CPU"
        )

    @property
    def gpu_info(self) -> str:
        """The text of the field `gpu_info`: what llama-bench knows of a worker is its endpoint."""
        texts = [device.description for device in self.local]
        texts += [device.endpoint for device in self.remote]
        return ", ".join(texts + [device.description for device in self.started])

    def pick(self, names: Sequence[str]) -> tuple[EngineDevice, ...]:
        """The devices of a case. Raises UsageError for an unknown one, with those there are."""
        if tuple(names) == AUTO:
            # Workers first, as the engine would order them: fewer hops between machines.
            return self.remote + self.default_local
        if tuple(names) == NO_DEVICE:
            return ()
        return tuple(pick(names, self.all))

    def listing(self) -> str:
        """The text of --list-devices."""
        rows = [(device, device.description) for device in self.local]
        rows += [(device, f"{device.description} at {device.endpoint}") for device in self.remote]
        rows += [(device, device.description) for device in self.started]
        lines = ["Available devices:"]
        for device, text in rows:
            free, total = (size // _MIB for size in device.memory())
            lines.append(f"  {device.name}: {text} ({total} MiB, {free} MiB free)")
        return "\n".join(lines if rows else [*lines, "  (none)"]) + "\n"
