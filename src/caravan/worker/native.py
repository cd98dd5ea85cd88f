"""`NativeDevice` and `NativeBuffer`: one ggml device and its memory, as the worker needs them.

The only part of the worker that calls the engine. A device opens its ggml backend at first use, so
that a spare session process costs no device memory.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable

import numpy as np

from caravan.engine import casts, layouts
from caravan.engine.library import Engine
from caravan.errors import AllocationError, DeviceError
from caravan.transport.base import Buffer as Bytes
from caravan.wire.dtypes import WireType
from caravan.wire.extension import MAX_BUFFER_SIZE, DeviceInfo
from caravan.worker.device import DeviceBuffer
from caravan.worker.graph import Graph
from caravan.worker.table import Table

CPU = 0
_I8 = 24
_HUGE = 2 << 20
_BIG = 64 << 20
# glibc's M_MMAP_THRESHOLD, and the size from which memory is the system's again once it is freed.
_MMAP_THRESHOLD = -3
_RETURNED = 4 << 20
# Read at once from memory that the host cannot reach; it takes as much of the host's.
_MAX_READ = 1 << 30


def _nothing(size: int) -> None:
    """Nobody counts what is freed."""


class NativeBuffer:
    """A ggml buffer.

    Args:
        host: whether the host can reach its memory.
        freed: told its size when it is freed.

    Attributes:
        pointer: the ggml_backend_buffer.
        base: the real address of its first byte.
        view: its memory, where the host can reach it; None elsewhere.
    """

    def __init__(
        self, engine: Engine, pointer: int, host: bool, freed: Callable[[int], None] = _nothing
    ) -> None:
        self._ggml = engine.ggml
        self._freed = freed
        self.pointer = pointer
        self.base: int = self._ggml.buffer_get_base(pointer)
        self.size: int = self._ggml.buffer_get_size(pointer)
        self.view: memoryview | None = None
        if host:
            # a head shall not read what lay in this process's heap before: keys, say
            if self.size < 2 * _RETURNED:
                ctypes.memset(self.base, 0, self.size)
            _advise_huge_pages(self.base, self.size)
            memory = (ctypes.c_char * self.size).from_address(self.base)
            self.view = memoryview(memory).cast("B")

    def read(self, offset: int, size: int) -> Bytes:
        """The bytes; lent from device memory where the host can reach it."""
        if self.view is not None:
            return self.view[offset : offset + size]
        if size > _MAX_READ:
            raise AllocationError(f"{size} bytes at once: there may be {_MAX_READ}")
        data = bytearray(size)
        pointer = ctypes.addressof(ctypes.c_char.from_buffer(data)) if size else 0
        self._ggml.backend_tensor_get(self._tensor(), pointer, offset, size)
        return data

    def write(self, offset: int, data: Bytes) -> None:
        if self.view is not None:
            self.view[offset : offset + len(data)] = data
            return
        source = np.frombuffer(data, np.uint8)
        self._ggml.backend_tensor_set(self._tensor(), source.ctypes.data, offset, len(data))

    def narrow(self, offset: int, size: int, dtype: WireType) -> Bytes:
        """`size` bytes of f32 at a multiple of 4, as a type of half their size."""
        if self.view is not None:
            return casts.narrow(self._ggml, self.base + offset, size, dtype.word)
        data = np.frombuffer(self.read(offset, size), np.uint8)
        return casts.narrow(self._ggml, data.ctypes.data, size, dtype.word)

    def widen(self, offset: int, data: Bytes, dtype: WireType) -> None:
        """Write numbers of that type as f32 at a multiple of 4."""
        if self.view is not None:
            casts.widen(self._ggml, data, self.base + offset, dtype.word)
            return
        wide = np.empty(len(data) // 2, np.float32)
        casts.widen(self._ggml, data, wide.ctypes.data, dtype.word)
        self.write(offset, wide.view(np.uint8).data)

    def fill(self, offset: int, size: int, value: int) -> None:
        if self.view is not None:
            ctypes.memset(self.base + offset, value, size)
        else:
            self._ggml.backend_tensor_memset(self._tensor(), value, offset, size)

    def clear(self, value: int) -> None:
        self._ggml.buffer_clear(self.pointer, value)

    def copy(self, offset: int, source: DeviceBuffer, source_offset: int, size: int) -> None:
        """Copy from another buffer of the same device, or from host memory."""
        if self.view is not None and source.view is not None:
            ctypes.memmove(self.base + offset, source.base + source_offset, size)
            return
        self.write(offset, bytes(source.read(source_offset, size)))

    def free(self) -> None:
        self.view = None
        self._ggml.buffer_free(self.pointer)
        self._freed(self.size)

    def _tensor(self) -> int:
        """A tensor of bytes over the whole buffer, for calls that want one."""
        record = np.zeros(1, layouts.GGML_TENSOR)
        record["type"] = _I8
        record["buffer"] = self.pointer
        record["ne"] = (self.size, 1, 1, 1)
        record["nb"] = (1, self.size, self.size, self.size)
        record["data"] = self.base
        self._record = record  # kept alive for the call
        return int(record.ctypes.data)


def _advise_huge_pages(base: int, size: int) -> None:
    """Weights are read from end to end for every token: with small pages the kernels spend a
    measurable part of that on address translation. Without effect where it is not offered."""
    start = -(-base // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (base + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if hasattr(mmap, "MADV_HUGEPAGE") and end - start >= _HUGE:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


def _return_freed_memory() -> None:
    """Left to itself glibc keeps freed blocks of up to 32 MiB for later, each of its arenas some:
    memory that heads have given back, and that counts against nobody's limit."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _RETURNED)


class NativeDevice:
    """One entry of `-d`: a ggml device with a backend (queue, threads) of its own."""

    def __init__(self, engine: Engine, handle: int, index: int, threads: int) -> None:
        _return_freed_memory()
        ggml = engine.ggml
        self._engine = engine
        self._ggml = ggml
        self._handle = handle
        self._buft = ggml.dev_buffer_type(handle)
        self._backend: int = 0
        self._lock = threading.Lock()
        self._held = 0
        self.index = index
        self.name: str = ggml.dev_name(handle).decode()
        self.description: str = ggml.dev_description(handle).decode(errors="replace")
        self.type: int = ggml.dev_type(handle)
        self.threads = threads if self.type == CPU else 0
        self.alignment: int = ggml.buft_get_alignment(self._buft)
        self.max_size: int = min(ggml.buft_get_max_size(self._buft), MAX_BUFFER_SIZE)
        self.pads = self.type != CPU
        self.guarded = self.type == CPU
        self._host: bool = ggml.buft_is_host(self._buft)

    def info(self) -> DeviceInfo:
        free, total = self.memory()
        return DeviceInfo(
            self.name,
            self.description,
            self.type,
            self.threads,
            free,
            total,
            self.alignment,
            self.max_size,
            self.pads,
        )

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, now."""
        free, total = self._ggml.dev_memory(self._handle)
        # the engine takes all of the machine's memory for free
        return (min(free, available_memory()) if self.type == CPU else free), total

    def open(self) -> int:
        """The ggml backend, made at the first call; raises DeviceError."""
        with self._lock:
            if not self._backend:
                self._backend = self._ggml.dev_init(self._handle, None) or 0
                if not self._backend:
                    raise DeviceError(f"{self.name}: the engine cannot open this device")
                if self.threads:
                    self._ggml.cpu_set_n_threads(self._backend, self.threads)
            return self._backend

    def allocate(self, size: int) -> NativeBuffer:
        """Raises AllocationError."""
        # The kernel promises more than there is and kills later; refuse now instead.
        if self.type == CPU and size > _BIG and size > available_memory():
            raise AllocationError(f"{self.name}: no room for a buffer of {size} bytes")
        # what nobody has written to yet is not missing from what is available
        held, total = self._held, self.memory()[1]
        if total and held + size > total:
            raise AllocationError(
                f"{self.name}: no room for a buffer of {size} bytes: this session holds {held} of"
                f" the device's {total}"
            )
        pointer = self._ggml.buft_alloc_buffer(self._buft, size)
        if not pointer:
            raise AllocationError(f"{self.name}: no room for a buffer of {size} bytes")
        buffer = NativeBuffer(self._engine, pointer, self._host, self._count_out)
        with self._lock:
            self._held += buffer.size
        return buffer

    def _count_out(self, size: int) -> None:
        with self._lock:
            self._held -= size

    def supports(self, tensor: int) -> bool:
        """Whether the device can compute the node at this address."""
        return bool(self._ggml.dev_supports_op(self._handle, tensor))

    def estimate(self, table: Table) -> int:
        """It takes what it takes."""
        return 0

    def compute(self, graph: Graph) -> int:
        """Run it to its end; ggml's status, 0 when it went well."""
        return int(self._ggml.backend_graph_compute(self._backend or self.open(), graph.address))

    def alloc_size(self, tensor: int) -> int:
        """Bytes that the tensor at this address needs in a buffer."""
        return int(self._ggml.buft_get_alloc_size(self._buft, tensor))

    def init_tensor(self, buffer: DeviceBuffer, tensor: int) -> int:
        """ggml's status."""
        return int(self._ggml.buffer_init_tensor(buffer.pointer, tensor))


def available_memory() -> int:
    """Bytes that this machine can still hand out without swapping; a huge number if unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return MAX_BUFFER_SIZE
