"""`DeviceLink`: the verbs of one remote device, in either protocol.

The backend speaks these; `ExtLink` puts them into the extension's commands, `BaseLink` into
ggml-rpc's. Nothing here waits, except `alloc`, `alloc_size` and `memory`, which ask something.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from caravan.errors import AllocationError, DeviceError, RemoteError
from caravan.stream.dispatcher import Stream
from caravan.stream.graphs import GraphMemory, LastGraph, LruGraphs, ManyGraphs
from caravan.stream.message import Part, length
from caravan.stream.ticket import Ticket
from caravan.transport.base import Buffer
from caravan.wire import commands
from caravan.wire.commands import EXT, Base, Command, Ext
from caravan.wire.extension import DeviceInfo, Status
from caravan.wire.versions import Version

# Writes up to the one size are gathered, until so many bytes wait.
_SMALL_SET = 16 << 10
_SETS_SIZE = 64 << 10


class TensorRef(Protocol):
    """A tensor in a remote buffer, as the backend sees it."""

    def address(self) -> int:
        """Where its data starts, in the worker's address space."""

    def base_record(self) -> bytes:
        """It as one RPC_TENSOR."""

    def ext_record(self) -> bytes:
        """It as one EXT_TENSOR, without sources."""


class GraphRef(Protocol):
    """A graph that can be put into either wire format."""

    uid: int

    def base_payload(self) -> tuple[int, list[Buffer]]:
        """Number of nodes; node ids, number of tensors, records."""

    def ext_payload(self) -> tuple[int, int, list[Buffer], frozenset[int]]:
        """Numbers of nodes and tensors, rows, and the handles of the buffers that they use."""


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

    def alloc(self, size: int) -> RemoteAllocation:
        """A buffer; raises AllocationError when the device has no room."""

    def free(self, handle: int) -> None: ...

    def clear(self, handle: int, value: int) -> None: ...

    def init_tensor(self, tensor: TensorRef) -> None: ...

    def alloc_size(self, tensor: TensorRef, sources: list[TensorRef]) -> int:
        """Bytes that the device needs for the tensor; asks."""

    def set_tensor(
        self, tensor: TensorRef, offset: int, data: Part, *, wait_sent: bool = False
    ) -> None:
        """Write; with `wait_sent` the data is the caller's memory and has been read on return."""

    def get_tensor(
        self, tensor: TensorRef, offset: int, size: int, target: memoryview | None
    ) -> Ticket:
        """Read into `target`, or into the ticket's `data`."""

    def memset_tensor(self, tensor: TensorRef, offset: int, size: int, value: int) -> None: ...

    def copy_tensor(self, src: TensorRef, dst: TensorRef, size: int) -> None:
        """Copy within the device."""

    def graph_compute(self, graph: GraphRef) -> None: ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes; asks."""

    def bye(self) -> None:
        """Take leave, so that the other end knows that the stream's end is no accident."""


class ExtLink:
    """A device behind a stream of its own that speaks the extension.

    Small writes are kept until something that may depend on them, and leave as one command: a
    decode step is half a dozen of them.
    """

    extension = True

    def __init__(self, stream: Stream, info: DeviceInfo, index: int, version: Version) -> None:
        self.stream = stream
        self.info = info
        self.index = index
        self.version = version
        self._graphs: GraphMemory = LruGraphs()
        self._sets: list[tuple[int, Part]] = []
        self._sets_size = 0
        # what is posted must be in the order of the calls, and the peer counts graphs in that order
        self._lock = threading.Lock()

    def alloc(self, size: int) -> RemoteAllocation:
        row = EXT[Ext.ALLOC]
        assert row.reply is not None
        try:
            handle, base, got = self._ask(row, [row.request.pack(size)], fatal=False)
        except RemoteError as exc:
            if exc.code == Status.OUT_OF_MEMORY:
                raise AllocationError(exc.text) from exc
            raise DeviceError(exc.text) from exc
        return _checked(handle, base, got, size, self.info.alignment)

    def free(self, handle: int) -> None:
        row = EXT[Ext.FREE]
        with self._lock:
            self._graphs.freed(handle)
            self._post_sets()
            self.stream.post(row, [row.request.pack(handle)])

    def clear(self, handle: int, value: int) -> None:
        row = EXT[Ext.CLEAR]
        self._post(row, [row.request.pack(handle, value)], cork=True)

    def init_tensor(self, tensor: TensorRef) -> None:
        self._post(EXT[Ext.INIT_TENSOR], [tensor.ext_record()], cork=True)

    def alloc_size(self, tensor: TensorRef, sources: list[TensorRef]) -> int:
        parts: list[Part] = [tensor.ext_record(), *(source.ext_record() for source in sources)]
        (size,) = self._ask(EXT[Ext.ALLOC_SIZE], parts, fatal=False)
        return size

    def set_tensor(
        self, tensor: TensorRef, offset: int, data: Part, *, wait_sent: bool = False
    ) -> None:
        address, size = tensor.address() + offset, length(data)
        with self._lock:
            if size <= _SMALL_SET and not wait_sent:
                self._sets.append((address, data))
                self._sets_size += size + commands.SET_ENTRY.size
                if self._sets_size >= _SETS_SIZE:
                    self._post_sets()
                return
            self._post_sets()
            row = EXT[Ext.SET]
            head = row.request.pack(address)
            self.stream.post(row, [head, data], cork=not wait_sent, wait_sent=wait_sent)

    def get_tensor(
        self, tensor: TensorRef, offset: int, size: int, target: memoryview | None
    ) -> Ticket:
        row = EXT[Ext.GET]
        ticket = Ticket(row.name, size, target)
        self._post(row, [row.request.pack(tensor.address() + offset, size)], ticket)
        return ticket

    def memset_tensor(self, tensor: TensorRef, offset: int, size: int, value: int) -> None:
        row = EXT[Ext.MEMSET]
        self._post(row, [row.request.pack(tensor.address() + offset, size, value)], cork=True)

    def copy_tensor(self, src: TensorRef, dst: TensorRef, size: int) -> None:
        row = EXT[Ext.COPY]
        self._post(row, [row.request.pack(src.address(), dst.address(), size)], cork=True)

    def graph_compute(self, graph: GraphRef) -> None:
        with self._lock:
            self._post_sets()
            if graph.uid and self._graphs.known(graph.uid):
                row = EXT[Ext.GRAPH_RECOMPUTE]
                self.stream.post(row, [row.request.pack(graph.uid)])
                return
            row = EXT[Ext.GRAPH_COMPUTE]
            n_nodes, n_tensors, rows, handles = graph.ext_payload()
            self.stream.post(row, [row.request.pack(graph.uid, n_nodes, n_tensors), *rows])
            if graph.uid:
                self._graphs.add(graph.uid, handles)

    def memory(self) -> tuple[int, int]:
        free, total = self._ask(EXT[Ext.MEMORY], [])
        return free, total

    def bye(self) -> None:
        self._post(EXT[Ext.BYE], [])

    def _post(
        self, row: Command, parts: Sequence[Part], ticket: Ticket | None = None, cork: bool = False
    ) -> None:
        with self._lock:
            self._post_sets()
            self.stream.post(row, parts, ticket, cork=cork)

    def _ask(self, row: Command, parts: Sequence[Part], fatal: bool = True) -> tuple[int, ...]:
        assert row.reply is not None
        ticket = Ticket(row.name, row.reply.size, fatal=fatal)
        self._post(row, parts, ticket)
        return row.reply.unpack(ticket.wait())

    def _post_sets(self) -> None:
        """Post the small writes that wait, as one command."""
        if not self._sets:
            return
        sets, self._sets, self._sets_size = self._sets, [], 0
        if len(sets) == 1:
            row, (address, data) = EXT[Ext.SET], sets[0]
            self.stream.post(row, [row.request.pack(address), data], cork=True)
            return
        row = EXT[Ext.SET_MANY]
        entries = [commands.SET_ENTRY.pack(address, length(data)) for address, data in sets]
        head = row.request.pack(len(sets)) + b"".join(entries)
        self.stream.post(row, [head, *(data for _, data in sets)], cork=True)


class BaseLink:
    """A device of a ggml-rpc server; all devices of one server share its one stream.

    Args:
        peers: the links of the same connection, this one included, filled by the session.
    """

    extension = False

    def __init__(
        self,
        stream: Stream,
        info: DeviceInfo,
        index: int,
        version: Version,
        peers: list[BaseLink],
        lock: threading.Lock,
    ) -> None:
        self.stream = stream
        self.info = info
        self.index = index
        self.version = version
        self.graphs: GraphMemory = ManyGraphs() if version.major >= 8 else LastGraph()
        self._table = commands.base_table(version.major)
        self._peers = peers
        self._lock = lock

    def alloc(self, size: int) -> RemoteAllocation:
        handle, got = self._ask(Base.ALLOC_BUFFER, self.index, size)
        if handle == 0:
            raise AllocationError(f"the worker has no room for a buffer of {size} bytes")
        (base,) = self._ask(Base.BUFFER_GET_BASE, handle)
        return _checked(handle, base, got, size, self.info.alignment)

    def free(self, handle: int) -> None:
        # a server forgets the graphs of all devices with any buffer: never RECOMPUTE one after it
        with self._lock:
            for peer in self._peers:
                peer.graphs.freed(handle)
            self._tell(Base.FREE_BUFFER, handle, cork=False)

    def clear(self, handle: int, value: int) -> None:
        self._tell(Base.BUFFER_CLEAR, handle, value)

    def init_tensor(self, tensor: TensorRef) -> None:
        self._tell(Base.INIT_TENSOR, tensor.base_record())

    def alloc_size(self, tensor: TensorRef, sources: list[TensorRef]) -> int:
        srcs = b"".join(source.base_record() for source in sources)
        srcs = srcs.ljust(10 * commands.TENSOR_SIZE, b"\0")
        (size,) = self._ask(Base.GET_ALLOC_SIZE, self.index, tensor.base_record(), srcs)
        return int(size)

    def set_tensor(
        self, tensor: TensorRef, offset: int, data: Part, *, wait_sent: bool = False
    ) -> None:
        row = self._table[Base.SET_TENSOR]
        head = row.request.pack(tensor.base_record(), 0, offset)
        self.stream.post(row, [head, data], cork=not wait_sent, wait_sent=wait_sent)

    def get_tensor(
        self, tensor: TensorRef, offset: int, size: int, target: memoryview | None
    ) -> Ticket:
        row = self._table[Base.GET_TENSOR]
        ticket = Ticket(row.name, size, target)
        self.stream.post(row, [row.request.pack(tensor.base_record(), offset, size)], ticket)
        return ticket

    def memset_tensor(self, tensor: TensorRef, offset: int, size: int, value: int) -> None:
        self._tell(Base.MEMSET_TENSOR, tensor.base_record(), offset, size, value)

    def copy_tensor(self, src: TensorRef, dst: TensorRef, size: int) -> None:
        row = self._table[Base.COPY_TENSOR]
        assert row.reply is not None
        ticket = Ticket(row.name, row.reply.size)
        ticket.on_done(lambda: self._copied(ticket))
        self.stream.post(row, [row.request.pack(src.base_record(), dst.base_record())], ticket)

    def _copied(self, ticket: Ticket) -> None:
        # nobody waits for the answer, and what follows builds on the copy
        if ticket.error is None and ticket.data == b"\0":
            self.stream.fail(DeviceError("the worker cannot copy this tensor"), ticket.name)

    def graph_compute(self, graph: GraphRef) -> None:
        eight = self.version.major >= 8
        with self._lock:
            if graph.uid and self.graphs.known(graph.uid):
                uid = (graph.uid,) if eight else ()
                self._tell(Base.GRAPH_RECOMPUTE, self.index, *uid, cork=True)
            else:
                row = self._table[Base.GRAPH_COMPUTE]
                n_nodes, parts = graph.base_payload()
                middle = (graph.uid,) if eight else ()
                self.stream.post(row, [row.request.pack(self.index, *middle, n_nodes), *parts])
                # also for uid 0: a version 7 server has replaced the graph that it kept
                if graph.uid or not eight:
                    self.graphs.add(graph.uid, frozenset())
        self._fence()

    def _fence(self) -> None:
        """Ask something small after a graph: its answer is this peer's only sign of progress."""
        row = self._table[Base.GET_ALIGNMENT]
        assert row.reply is not None
        ticket = Ticket("GRAPH_COMPUTE", row.reply.size)
        self.stream.post(row, [row.request.pack(self.index)], ticket)

    def memory(self) -> tuple[int, int]:
        free, total = self._ask(Base.GET_DEVICE_MEMORY, self.index)
        return int(free), int(total)

    def bye(self) -> None:
        self.stream.flush()

    def _tell(self, number: Base, *values: object, cork: bool = True) -> None:
        row = self._table[number]
        self.stream.post(row, [row.request.pack(*values)], cork=cork)

    def _ask(self, number: Base, *values: object) -> tuple[int, ...]:
        return ask(self.stream, self._table[number], *values)


def ask(stream: Stream, row: Command, *values: object) -> tuple[int, ...]:
    """Send a command with fixed request and reply, and wait for the reply's values."""
    assert row.reply is not None
    return row.reply.unpack(stream.call(row, [row.request.pack(*values)], row.reply.size))


def _checked(handle: int, base: int, got: int, size: int, alignment: int) -> RemoteAllocation:
    """A worker's answer to an allocation; the engine aborts on one that makes no sense."""
    if got < size or base == 0 or base % alignment or base + got >= 1 << 64:
        raise DeviceError(
            f"the worker answered an allocation of {size} bytes with {got} bytes at {base:#x}"
        )
    return RemoteAllocation(handle, base, got)
