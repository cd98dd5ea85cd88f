"""`Device` and `DeviceBuffer`: what the worker needs of a device and of its memory.

`native` has the engine's devices, `sim` those that only cost time; tests bring their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from caravan.transport.base import Buffer as Bytes
from caravan.wire.dtypes import WireType
from caravan.wire.extension import DeviceInfo

if TYPE_CHECKING:
    from caravan.worker.graph import Graph
    from caravan.worker.table import Table


class DeviceBuffer(Protocol):
    """Memory of a device.

    Attributes:
        pointer: the ggml_backend_buffer; 0 where there is none.
        base: the address of its first byte, to the engine.
        size: bytes.
        view: its memory, where the host can reach it; None elsewhere.
    """

    pointer: int
    base: int
    size: int
    view: memoryview | None

    def read(self, offset: int, size: int) -> Bytes:
        """The bytes; lent from device memory where the host can reach it."""

    def write(self, offset: int, data: Bytes) -> None: ...

    def narrow(self, offset: int, size: int, dtype: WireType) -> Bytes:
        """`size` bytes of f32, as a type of half their size."""

    def widen(self, offset: int, data: Bytes, dtype: WireType) -> None:
        """Write numbers of that type as f32."""

    def fill(self, offset: int, size: int, value: int) -> None: ...

    def clear(self, value: int) -> None: ...

    def copy(self, offset: int, source: DeviceBuffer, source_offset: int, size: int) -> None:
        """Copy from another buffer of the same device, or from host memory."""

    def free(self) -> None: ...


class Device(Protocol):
    """One entry of `-d`.

    Attributes:
        index: its number in this worker.
        name: the engine's name of it, or `sim`.
        alignment: of tensors in a buffer, bytes.
        max_size: of one buffer, bytes.
        pads: whether a tensor may need more bytes than its own.
        guarded: whether it computes in this process, so that graphs need guards.
    """

    index: int
    name: str
    alignment: int
    max_size: int
    pads: bool
    guarded: bool

    def info(self) -> DeviceInfo: ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, now."""

    def allocate(self, size: int) -> DeviceBuffer:
        """Raises AllocationError."""

    def supports(self, tensor: int) -> bool:
        """Whether the device can compute the node at this address."""

    def estimate(self, table: Table) -> int:
        """Nanoseconds that a checked graph shall take; 0 for a device that really computes."""

    def compute(self, graph: Graph) -> int:
        """Run it to its end; ggml's status, 0 when it went well."""

    def alloc_size(self, tensor: int) -> int:
        """Bytes that the tensor at this address needs in a buffer."""

    def init_tensor(self, buffer: DeviceBuffer, tensor: int) -> int:
        """ggml's status."""
