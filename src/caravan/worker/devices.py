"""Which devices a worker lends: `-d CPU:1,CPU:1`, `-d CUDA0`, or the default.

Parsing knows no engine; `choose` matches the wishes with what the engine has, in a session process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from caravan.errors import UsageError, WorkerStartError

CPU, ACCEL = 0, 3
MAX_DEVICES = 16


@dataclass(frozen=True, slots=True)
class Wish:
    """One entry of `-d`; `threads` is 0 where none were given."""

    name: str
    threads: int


@dataclass(frozen=True, slots=True)
class Found:
    """A device of the engine: what `choose` needs of it."""

    handle: int
    name: str
    description: str
    type: int


def default_threads() -> int:
    """Half of the hardware's threads, at least one."""
    return max(1, (os.cpu_count() or 1) // 2)


def parse(text: str) -> list[Wish]:
    """The entries of `-d`, separated by ',' or '/'; raises UsageError."""
    wishes = []
    for part in text.replace("/", ",").split(","):
        name, colon, threads = part.strip().partition(":")
        if not name:
            raise UsageError(f"device list {text!r} has an empty entry")
        if colon and not (threads.isascii() and threads.isdigit() and 0 < int(threads) <= 512):
            raise UsageError(f"device {part.strip()!r}: threads must be a number in 1..512")
        wishes.append(Wish(name, int(threads) if colon else 0))
    if len(wishes) > MAX_DEVICES:
        raise UsageError(f"{len(wishes)} devices are more than {MAX_DEVICES}")
    return wishes


def choose(wishes: Sequence[Wish], found: Sequence[Found], threads: int) -> list[tuple[Found, int]]:
    """(device, threads) for every wish, or the default for none; raises WorkerStartError."""
    if not wishes:
        chosen = [device for device in found if device.type not in (CPU, ACCEL)]
        chosen = chosen or [device for device in found if device.type == CPU][:1]
        if not chosen:
            raise WorkerStartError("No devices found")
        return [(device, threads) for device in chosen]
    by_name = {device.name: device for device in found}
    pairs = []
    for wish in wishes:
        device = by_name.get(wish.name)
        if device is None:
            known = ", ".join(f"{d.name} ({d.description})" for d in found) or "none"
            raise WorkerStartError(f"unknown device {wish.name!r}; available devices: {known}")
        if wish.threads and device.type != CPU:
            raise WorkerStartError(f"device {wish.name!r} takes no number of threads")
        pairs.append((device, wish.threads or threads))
    return pairs
