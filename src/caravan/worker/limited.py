"""`LimitedDevice`: a device of which all sessions together may hold no more than the user allows.

Tells heads the limit as its memory, whatever the protocol, and refuses what passes it. Everything
else is the device that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from caravan.errors import AllocationError, WorkerStartError
from caravan.wire.extension import DeviceInfo
from caravan.worker.device import Device, DeviceBuffer
from caravan.worker.graph import Graph
from caravan.worker.table import Table
from caravan.worker.tally import Row


def limited(devices: list[Device], limits: Sequence[int], row: Row) -> list[Device]:
    """The devices under their limits: one for all of them, or one for each.

    Raises WorkerStartError when there are more or fewer.
    """
    if len(limits) == 1:
        limits = [limits[0]] * len(devices)
    if len(limits) != len(devices):
        raise WorkerStartError(
            f"{len(limits)} limits of memory for {len(devices)}"
            f" device{'s' if len(devices) != 1 else ''}: give one for each, or one that holds"
            " for each"
        )
    return [
        LimitedDevice(device, limit, row) for device, limit in zip(devices, limits, strict=True)
    ]


class LimitedDevice:
    """See the module.

    Args:
        device: the real one.
        limit: bytes that all sessions may hold of it together.
        row: what they hold.
    """

    def __init__(self, device: Device, limit: int, row: Row) -> None:
        self._device = device
        self._limit = limit
        self._row = row
        self.index = device.index
        self.name = device.name
        self.alignment = device.alignment
        self.max_size = device.max_size
        self.pads = device.pads
        self.guarded = device.guarded

    def __repr__(self) -> str:
        return f"<LimitedDevice of {self._limit} bytes: {self._device!r}>"

    def info(self) -> DeviceInfo:
        free, total = self.memory()
        return replace(self._device.info(), memory_free=free, memory_total=total)

    def memory(self) -> tuple[int, int]:
        """Both at most what the limit leaves; of a device that does not say, just that."""
        free, total = self._device.memory()
        left = max(0, self._limit - self._row.held(self.index))
        return (min(free, left), min(total, self._limit)) if total else (left, self._limit)

    def allocate(self, size: int) -> DeviceBuffer:
        """Raises AllocationError, which names the limit where that is the reason."""
        if not self._row.take(self.index, size, self._limit):
            held = self._row.held(self.index)
            raise AllocationError(
                f"{self.name}: no room for a buffer of {_mib(size)}: the worker has a --max-memory"
                f" of {_mib(self._limit)}{f', of which {_mib(held)} are in use' if held else ''}"
            )
        try:
            buffer = self._device.allocate(size)
        except BaseException:
            self._row.give_back(self.index, size)
            raise
        return _Counted(buffer, lambda: self._row.give_back(self.index, size))

    def supports(self, tensor: int) -> bool:
        return self._device.supports(tensor)

    def estimate(self, table: Table) -> int:
        return self._device.estimate(table)

    def compute(self, graph: Graph) -> int:
        return self._device.compute(graph)

    def alloc_size(self, tensor: int) -> int:
        return self._device.alloc_size(tensor)

    def init_tensor(self, buffer: DeviceBuffer, tensor: int) -> int:
        return self._device.init_tensor(buffer, tensor)


class _Counted:
    """Memory of a limited device, which counts until it is freed."""

    def __init__(self, buffer: DeviceBuffer, freed: Callable[[], None]) -> None:
        self._buffer = buffer
        self._freed = freed
        self.pointer = buffer.pointer
        self.base = buffer.base
        self.size = buffer.size
        self.view = buffer.view
        self.read, self.write = buffer.read, buffer.write
        self.narrow, self.widen = buffer.narrow, buffer.widen
        self.fill, self.clear, self.copy = buffer.fill, buffer.clear, buffer.copy

    def free(self) -> None:
        self.view = None
        self._buffer.free()
        self._freed()


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"
