"""Which devices a worker lends: `-d CPU:1,CPU:1`, `-d CUDA0`, `-d sim:…`, or the default.

Parsing knows no engine; `choose` matches the wishes with what the engine has, in a session process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from caravan.errors import UsageError, WorkerStartError
from caravan.wire.extension import SIMULATED
from caravan.worker.speed import Speed

CPU, ACCEL = 0, 3
MAX_DEVICES = 16


@dataclass(frozen=True, slots=True)
class Wish:
    """One entry of `-d`; `threads` is 0 where none were given, `speed` that of a simulated one."""

    name: str
    threads: int = 0
    speed: Speed | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A device of the engine: what `choose` needs of it."""

    handle: int
    name: str
    description: str
    type: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """A device to lend; with a `speed` it is one that is simulated after `device`."""

    device: Found
    threads: int
    speed: Speed | None = None


def default_threads() -> int:
    """Half of the hardware's threads, at least one."""
    return max(1, (os.cpu_count() or 1) // 2)


def parse(text: str) -> list[Wish]:
    """The entries of `-d`, separated by ',' or '/'; raises UsageError."""
    wishes = [_wish(entry) for entry in _entries(text)]
    if len(wishes) > MAX_DEVICES:
        raise UsageError(f"{len(wishes)} devices are more than {MAX_DEVICES}")
    return wishes


def _entries(text: str) -> list[str]:
    """One a device: KEY=VALUE parts belong to the simulated device before them."""
    entries: list[str] = []
    for part in map(str.strip, text.replace("/", ",").split(",")):
        if not part:
            raise UsageError(f"device list {text!r} has an empty entry")
        if "=" not in part or ":" in part:
            entries.append(part)
        elif entries and entries[-1].startswith(f"{SIMULATED}:"):
            entries[-1] += f",{part}"
        else:
            raise UsageError(f"device list {text!r}: {part!r} does not follow a sim device")
    return entries


def _wish(entry: str) -> Wish:
    name, colon, rest = entry.partition(":")
    if name == SIMULATED:
        return Wish(name, speed=Speed.parse(rest))
    if not name:
        raise UsageError(f"device {entry!r} has no name")
    if colon and not (rest.isascii() and rest.isdigit() and 0 < int(rest) <= 512):
        raise UsageError(f"device {entry!r}: threads must be a number in 1..512")
    return Wish(name, int(rest) if colon else 0)


def choose(wishes: Sequence[Wish], found: Sequence[Found], threads: int) -> list[Chosen]:
    """A device for every wish, or the default for none; raises WorkerStartError."""
    if not wishes:
        devices = [device for device in found if device.type not in (CPU, ACCEL)]
        devices = devices or [device for device in found if device.type == CPU][:1]
        if not devices:
            raise WorkerStartError("No devices found")
        return [Chosen(device, threads) for device in devices]
    return [_chosen(wish, found, threads) for wish in wishes]


def _chosen(wish: Wish, found: Sequence[Found], threads: int) -> Chosen:
    if wish.speed is not None:
        kind = next((device for device in found if device.type == CPU), None)
        if kind is None:
            raise WorkerStartError("the engine has no CPU device to simulate")
        return Chosen(kind, 0, wish.speed)
    device = next((device for device in found if device.name == wish.name), None)
    if device is None:
        known = ", ".join(f"{d.name} ({d.description})" for d in found) or "none"
        raise WorkerStartError(f"unknown device {wish.name!r}; available devices: {known}")
    if wish.threads and device.type != CPU:
        raise WorkerStartError(f"device {wish.name!r} takes no number of threads")
    return Chosen(device, wish.threads or threads)
