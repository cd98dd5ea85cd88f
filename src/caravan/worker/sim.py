"""`SimDevice`: a device that costs time and nothing else.

It takes part like any other (buffers, checks, stored graphs, queue, copies), but its memory is not
there (reads give zeros, writes are dropped) and a computation is a wait, as long as the cost model
says. What it refuses is what the engine's device that it stands for would refuse.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from caravan.errors import AllocationError
from caravan.transport.base import Buffer as Bytes
from caravan.wire.dtypes import WireType
from caravan.wire.extension import MAX_BUFFER_SIZE, SIMULATED, DeviceInfo
from caravan.worker.cost import nanoseconds
from caravan.worker.device import Device, DeviceBuffer
from caravan.worker.graph import Graph
from caravan.worker.speed import Speed
from caravan.worker.table import Table

_CPU = 0
# Where every buffer claims to lie. Nobody goes there: the host has no view of it, and the engine is
# only asked which ops it knows.
_NOWHERE = 1 << 44
# A sleeper wakes this late or later; the rest of a wait is spent looking at the clock.
_WAKE_NS = 60_000
# A graph that starts so soon after the one before it had been waiting for that.
_BACK_TO_BACK_NS = 300_000


class SimBuffer:
    """A size that counts against its device's memory."""

    def __init__(self, device: SimDevice, size: int) -> None:
        self._device = device
        self.pointer = 0
        self.base = _NOWHERE
        self.size = size
        self.view: memoryview | None = None

    def read(self, offset: int, size: int) -> Bytes:
        return bytes(size)

    def write(self, offset: int, data: Bytes) -> None:
        pass

    def narrow(self, offset: int, size: int, dtype: WireType) -> Bytes:
        return bytes(dtype.travels(size))

    def widen(self, offset: int, data: Bytes, dtype: WireType) -> None:
        pass

    def fill(self, offset: int, size: int, value: int) -> None:
        pass

    def clear(self, value: int) -> None:
        pass

    def copy(self, offset: int, source: DeviceBuffer, source_offset: int, size: int) -> None:
        pass

    def free(self) -> None:
        self._device.used -= self.size


class Pace:
    """Waits that end on time: what one oversleeps, the next that follows at once makes up for."""

    def __init__(
        self,
        now: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now = now
        self._sleep = sleep
        self._ended = -_BACK_TO_BACK_NS
        self._late = 0

    def spend(self, ns: int) -> None:
        """Wait for `ns` nanoseconds, without the GIL but for the last moments."""
        start = self._now()
        if start - self._ended < _BACK_TO_BACK_NS:
            start -= self._late
        deadline = start + ns
        now = self._now()
        while now < deadline:
            if deadline - now > _WAKE_NS:
                self._sleep((deadline - now - _WAKE_NS) * 1e-9)
            now = self._now()
        self._ended, self._late = now, now - deadline


class SimDevice:
    """See the module.

    Args:
        speed: the cost model's numbers.
        kind: a CPU device, whose ops and tensor sizes it has; it is never opened.
    """

    def __init__(self, speed: Speed, kind: Device, pace: Pace | None = None) -> None:
        self._kind = kind
        self._pace = pace or Pace()
        self.speed = speed
        self.index = kind.index
        self.name = SIMULATED
        self.alignment = kind.alignment
        self.max_size = min(speed.memory, MAX_BUFFER_SIZE)
        self.pads = False
        self.guarded = False
        self.used = 0

    def __repr__(self) -> str:
        return f"<SimDevice {self.index}: {self.speed}, {self.used} bytes used>"

    def info(self) -> DeviceInfo:
        free, total = self.memory()
        return DeviceInfo(
            self.name,
            f"simulated, {self.speed}",
            _CPU,
            0,
            free,
            total,
            self.alignment,
            self.max_size,
            self.pads,
        )

    def memory(self) -> tuple[int, int]:
        return self.speed.memory - self.used, self.speed.memory

    def allocate(self, size: int) -> SimBuffer:
        if size > self.speed.memory - self.used:
            raise AllocationError(f"{self.name}: no room for a buffer of {size} bytes")
        self.used += size
        return SimBuffer(self, size)

    def supports(self, tensor: int) -> bool:
        return self._kind.supports(tensor)

    def estimate(self, table: Table) -> int:
        return nanoseconds(table, self.speed)

    def compute(self, graph: Graph) -> int:
        self._pace.spend(graph.nanoseconds)
        return 0

    def alloc_size(self, tensor: int) -> int:
        return self._kind.alloc_size(tensor)

    def init_tensor(self, buffer: DeviceBuffer, tensor: int) -> int:
        return 0
