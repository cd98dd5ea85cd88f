"""`BaseLink`: a device of a ggml-rpc server; all devices of one server share its one stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from caravan import interrupt
from caravan.errors import AllocationError, DeviceError
from caravan.stream.dispatcher import Stream
from caravan.stream.graphs import GraphMemory, LastGraph, ManyGraphs
from caravan.stream.link import (
    GraphRef,
    RemoteAllocation,
    TensorRef,
    checked,
    get_rows,
    set_rows,
)
from caravan.stream.message import Part
from caravan.stream.ticket import Ticket
from caravan.wire import commands
from caravan.wire.commands import Base, Command
from caravan.wire.extension import DeviceInfo
from caravan.wire.versions import Version

# Rows of one SET_TENSOR_2D together, if a row is not bigger by itself.
_ROWS_SIZE = 1 << 20


class BaseLink:
    """A device of a ggml-rpc server; all devices of one server share its one stream.

    Args:
        peers: the links of the same connection, this one included, filled by the session.
    """

    extension = False
    sources: frozenset[str] = frozenset()

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
        return checked(handle, base, got, size, self.info.alignment)

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
        row, values = self._table[Base.GET_ALLOC_SIZE], (self.index, tensor.base_record(), srcs)
        # the answer comes after all graphs that have been posted
        (size,) = ask(self.stream, row, *values, stop=interrupt.pending)
        return int(size)

    def set_tensor(
        self,
        tensor: TensorRef,
        offset: int,
        data: Part,
        *,
        wait_sent: bool = False,
        again: bool = False,
    ) -> None:
        row = self._table[Base.SET_TENSOR]
        head = row.request.pack(tensor.base_record(), 0, offset)
        self.stream.post(row, [head, data], cork=not wait_sent, wait_sent=wait_sent)

    def bring(self, tensor: TensorRef, offset: int, data: Part) -> Ticket:
        row = self._table[Base.SET_TENSOR]
        with self._lock:
            self.stream.post(row, [row.request.pack(tensor.base_record(), 0, offset), data])
            return self._fence(row.name)

    def load(self, wanted: Sequence[tuple[int, int, bytes, str]]) -> Ticket:
        raise NotImplementedError("a llama.cpp server has no sources")

    def keep(self, tensor: TensorRef, size: int, digest: bytes) -> None:
        raise NotImplementedError("a llama.cpp server has no sources")

    def get_tensor(
        self, tensor: TensorRef, offset: int, size: int, target: memoryview | None
    ) -> Ticket:
        row = self._table[Base.GET_TENSOR]
        ticket = Ticket(row.name, size, target)
        self.stream.post(row, [row.request.pack(tensor.base_record(), offset, size)], ticket)
        return ticket

    def set_tensor_2d(
        self, tensor: TensorRef, offset: int, size: int, stride: int, rows: list[bytes]
    ) -> None:
        if self.version.major < 8:
            set_rows(self, tensor, offset, stride, rows)
            return
        row = self._table[Base.SET_TENSOR_2D]
        record = tensor.base_record()
        most = max(1, _ROWS_SIZE // size)
        for i in range(0, len(rows), most):
            some = rows[i : i + most]
            head = row.request.pack(record, offset + i * stride, size, len(some), stride)
            self.stream.post(row, [head, b"".join(some)], cork=True)

    def get_tensor_2d(
        self, tensor: TensorRef, offset: int, size: int, stride: int, target: memoryview
    ) -> list[Ticket]:
        if self.version.major < 8:
            return get_rows(self, tensor, offset, size, stride, target)
        row = self._table[Base.GET_TENSOR_2D]
        ticket = Ticket(row.name, len(target), target)
        values = (offset, size, len(target) // size, stride)
        self.stream.post(row, [row.request.pack(tensor.base_record(), *values)], ticket)
        return [ticket]

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
        self._fence("GRAPH_COMPUTE")

    def fence(self) -> Ticket:
        return self._fence("FENCE")

    def _fence(self, name: str) -> Ticket:
        """Ask something small after a graph or a weight: its answer is this peer's only sign of
        progress. `name`: what is really waited for."""
        row = self._table[Base.GET_ALIGNMENT]
        assert row.reply is not None
        ticket = Ticket(name, row.reply.size)
        self.stream.post(row, [row.request.pack(self.index)], ticket)
        return ticket

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


def ask(
    stream: Stream, row: Command, *values: object, stop: Callable[[], bool] | None = None
) -> tuple[int, ...]:
    """Send a command with fixed request and reply, and wait for the reply's values; for `stop` see
    `Ticket.wait`."""
    assert row.reply is not None
    parts = [row.request.pack(*values)]
    return row.reply.unpack(stream.call(row, parts, row.reply.size, stop=stop))
