"""A device and its memory without an engine: computing waits until the test lets it."""

from __future__ import annotations

import threading

import numpy as np

from caravan.errors import AllocationError
from caravan.wire.dtypes import WireType
from caravan.wire.extension import GRAPH_LRU
from caravan.worker.buffers import BufferTable
from caravan.worker.graph import Graph
from caravan.worker.lane import GraphStore, Lane
from caravan.worker.table import Table


class FakeBuffer:
    """Memory of a fake device; `host` False hides it, as a GPU's is hidden."""

    def __init__(self, pointer: int, size: int, host: bool) -> None:
        self.pointer = pointer
        self.base = pointer << 24
        self.size = size
        self.data = bytearray(size)
        self.view = memoryview(self.data) if host else None
        self.freed = False

    def read(self, offset: int, size: int) -> bytes | memoryview:
        part = memoryview(self.data)[offset : offset + size]
        return part if self.view is not None else bytes(part)

    def write(self, offset: int, data) -> None:
        self.data[offset : offset + len(data)] = data

    def narrow(self, offset: int, size: int, dtype: WireType) -> bytes:
        values = np.frombuffer(self.read(offset, size), np.float32)
        if dtype is WireType.F16:
            return values.astype(np.float16).tobytes()
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()

    def widen(self, offset: int, data, dtype: WireType) -> None:
        values = np.frombuffer(data, np.uint16)
        if dtype is WireType.F16:
            wide = values.view(np.float16).astype(np.float32)
        else:
            wide = (values.astype(np.uint32) << 16).view(np.float32)
        self.write(offset, wide.tobytes())

    def fill(self, offset: int, size: int, value: int) -> None:
        self.data[offset : offset + size] = bytes([value]) * size

    def clear(self, value: int) -> None:
        self.fill(0, self.size, value)

    def copy(self, offset: int, source: FakeBuffer, source_offset: int, size: int) -> None:
        self.write(offset, bytes(source.data[source_offset : source_offset + size]))

    def free(self) -> None:
        self.freed = True


class FakeDevice:
    """Computes nothing; `gate` holds every computation up while it is clear."""

    def __init__(self, index: int = 0, *, host: bool = True) -> None:
        self.index = index
        self.name = f"FAKE{index}"
        self.max_size = 1 << 24
        self.alignment = 32
        self.pads = False
        self.guarded = False
        self.gate = threading.Event()
        self.gate.set()
        self.computing = threading.Event()
        self.computed: list[Graph] = []
        self.status = 0
        self.buffers: list[FakeBuffer] = []
        self._host = host

    def memory(self) -> tuple[int, int]:
        return 1, 2

    def allocate(self, size: int) -> FakeBuffer:
        if size > 1 << 20:
            raise AllocationError("no room")
        buffer = FakeBuffer(16 * self.index + len(self.buffers) + 1, size, self._host)
        self.buffers.append(buffer)
        return buffer

    def supports(self, tensor: int) -> bool:
        return True

    def estimate(self, table: Table) -> int:
        return 0

    def compute(self, graph: Graph) -> int:
        self.computing.set()
        assert self.gate.wait(10)
        self.computed.append(graph)
        return self.status

    def alloc_size(self, tensor: int) -> int:
        return 42


def lanes(*devices: FakeDevice, limit: int = GRAPH_LRU, lru: bool = True):
    """(lanes, the buffer table that they share)."""
    buffers = BufferTable()
    return [Lane(device, buffers, GraphStore(limit, lru)) for device in devices], buffers
