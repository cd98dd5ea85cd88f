"""`DeviceLink`: the verbs of one remote device, in either protocol, and what they take and give.

The backend speaks these; `ExtLink` puts them into the extension's commands, `BaseLink` into
ggml-rpc's. Nothing waits, except `alloc`, `alloc_size` and `memory`, which ask something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from caravan.errors import DeviceError
from caravan.stream.dispatcher import Stream
from caravan.stream.message import Part
from caravan.stream.ticket import Ticket
from caravan.transport.base import Buffer
from caravan.wire.extension import DeviceInfo
from caravan.wire.versions import Version


class TensorRef(Protocol):
    """A tensor in a remote buffer, as the backend sees it."""

    def address(self) -> int:
        """Where its data starts, in the worker's address space."""

    def base_record(self) -> bytes:
        """It as one RPC_TENSOR."""

    def ext_record(self) -> bytes:
        """It as one EXT_TENSOR, without sources."""


class ExtGraph(NamedTuple):
    """A graph as the extension has it.

    Attributes:
        n_nodes, n_tensors: how many rows are nodes, and how many there are.
        rows: EXT_TENSOR, in one or several pieces.
        handles: the buffers that they use.
        written: the spans of addresses that the nodes write, ascending and without overlaps.
    """

    n_nodes: int
    n_tensors: int
    rows: list[Buffer]
    handles: frozenset[int]
    written: list[tuple[int, int]]


class GraphRef(Protocol):
    """A graph that can be put into either wire format."""

    uid: int

    def base_payload(self) -> tuple[int, list[Buffer]]:
        """Number of nodes; node ids, number of tensors, records."""

    def ext_payload(self) -> ExtGraph:
        """It in the extension's format."""


class RemoteAllocation:
    """handle: the worker's name of it; base: where it starts; size: bytes."""

    __slots__ = ("base", "handle", "size")

    def __init__(self, handle: int, base: int, size: int) -> None:
        self.handle = handle
        self.base = base
        self.size = size


class DeviceLink(Protocol):
    """The verbs. `index` is the device's number at its worker, `info` what that says of it."""

    stream: Stream
    info: DeviceInfo
    index: int
    version: Version
    extension: bool
    sources: frozenset[str]

    def alloc(self, size: int) -> RemoteAllocation:
        """A buffer; raises AllocationError when the device has no room."""

    def free(self, handle: int) -> None: ...

    def clear(self, handle: int, value: int) -> None: ...

    def init_tensor(self, tensor: TensorRef) -> None: ...

    def alloc_size(self, tensor: TensorRef, sources: list[TensorRef]) -> int:
        """Bytes that the device needs for the tensor; asks. Raises CaravanError when there is no
        answer, or after Ctrl-C."""

    def set_tensor(
        self,
        tensor: TensorRef,
        offset: int,
        data: Part,
        *,
        wait_sent: bool = False,
        again: bool = False,
    ) -> None:
        """Write; with `wait_sent` the data is the caller's memory and has been read on return.

        `again`: the same place will be written with much the same bytes, in every step perhaps.
        """

    def bring(self, tensor: TensorRef, offset: int, data: Part) -> Ticket:
        """Write a part of a weight; the ticket is done when it has arrived.

        The data must stay as they are until `stream.drain` has returned.
        """

    def fence(self) -> Ticket:
        """The ticket is done when everything before it has been done."""

    def load(self, wanted: Sequence[tuple[int, int, bytes, str]]) -> Ticket:
        """Ask the worker to put tensors that it has where they belong: (address, size, digest,
        name) each, MAX_LOAD at most. The reply has one Source for each. Only where there are
        `sources`."""

    def keep(self, tensor: TensorRef, size: int, digest: bytes) -> None:
        """Tell the worker that a tensor is there whole, and may be kept for another time. Only
        where `cache` is among the `sources`."""

    def get_tensor(
        self, tensor: TensorRef, offset: int, size: int, target: memoryview | None
    ) -> Ticket:
        """Read into `target`, or into the ticket's `data`."""

    def set_tensor_2d(
        self, tensor: TensorRef, offset: int, size: int, stride: int, rows: list[bytes]
    ) -> None:
        """Write rows of `size` bytes, the first one at `offset`, `stride` bytes apart."""

    def get_tensor_2d(
        self, tensor: TensorRef, offset: int, size: int, stride: int, target: memoryview
    ) -> list[Ticket]:
        """Read such rows into `target`, one after the other; it must be whole rows."""

    def memset_tensor(self, tensor: TensorRef, offset: int, size: int, value: int) -> None: ...

    def copy_tensor(self, src: TensorRef, dst: TensorRef, size: int) -> None:
        """Copy within the device."""

    def graph_compute(self, graph: GraphRef) -> None: ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes; asks."""

    def bye(self) -> None:
        """Take leave, so that the other end knows that the stream's end is no accident."""


def set_rows(
    link: DeviceLink, tensor: TensorRef, offset: int, stride: int, rows: list[bytes]
) -> None:
    """`set_tensor_2d` as one write a row."""
    for i, data in enumerate(rows):
        link.set_tensor(tensor, offset + i * stride, data)


def get_rows(
    link: DeviceLink, tensor: TensorRef, offset: int, size: int, stride: int, target: memoryview
) -> list[Ticket]:
    """`get_tensor_2d` as one read a row, none of which waits for another."""
    return [
        link.get_tensor(tensor, offset + i * stride, size, target[i * size : (i + 1) * size])
        for i in range(len(target) // size)
    ]


def checked(handle: int, base: int, got: int, size: int, alignment: int) -> RemoteAllocation:
    """A worker's answer to an allocation; the engine aborts on one that makes no sense."""
    if got < size or base == 0 or base % alignment or base + got >= 1 << 64:
        raise DeviceError(
            f"the worker answered an allocation of {size} bytes with {got} bytes at {base:#x}"
        )
    return RemoteAllocation(handle, base, got)
