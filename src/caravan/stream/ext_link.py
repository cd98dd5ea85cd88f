"""`ExtLink`: a device behind a stream of its own that speaks Caravan's extension."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from caravan import interrupt
from caravan.errors import AllocationError, DeviceError, RemoteError
from caravan.stream.dispatcher import Stream
from caravan.stream.graphs import GraphMemory, LruGraphs
from caravan.stream.link import (
    GraphRef,
    RemoteAllocation,
    TensorRef,
    checked,
    get_rows,
    set_rows,
)
from caravan.stream.message import Part, length
from caravan.stream.mirror import Mirror
from caravan.stream.reach import Reach
from caravan.stream.sequels import Sequels
from caravan.stream.ticket import Ticket
from caravan.wire import commands
from caravan.wire.commands import EXT, Command, Ext
from caravan.wire.dtypes import WireType
from caravan.wire.extension import ADDRESS_SHIFT, DeviceInfo, PeerTarget, Status, encode_json
from caravan.wire.versions import Version

# Writes up to the one size are gathered, until so many bytes wait.
_SMALL_SET = 16 << 10
_SETS_SIZE = 64 << 10
_CORKED_TAKE = 64 << 10


class ExtLink:
    """A device behind a stream of its own that speaks the extension.

    Small writes are kept until something that may depend on them, and leave as one command: a
    decode step is half a dozen of them.

    Attributes:
        reach: where other workers find this one.
        sources: where its worker looks for weights, in `wire.extension.SOURCES`' words.
    """

    extension = True

    def __init__(
        self,
        stream: Stream,
        info: DeviceInfo,
        index: int,
        version: Version,
        reach: Reach,
        sources: Sequence[str] = (),
    ) -> None:
        self.stream = stream
        self.info = info
        self.index = index
        self.version = version
        self.reach = reach
        self.sources = frozenset(sources)
        self._graphs: GraphMemory = LruGraphs()
        self._mirror = Mirror()
        self._sets: list[tuple[int, Part]] = []
        self._sets_size = 0
        self._sequels = Sequels()
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
        return checked(handle, base, got, size, self.info.alignment)

    def free(self, handle: int) -> None:
        row = EXT[Ext.FREE]
        with self._lock:
            self._graphs.freed(handle)
            self._mirror.freed(handle)
            self._post_sets()
            self.stream.post(row, [row.request.pack(handle)])

    def clear(self, handle: int, value: int) -> None:
        row = EXT[Ext.CLEAR]
        with self._lock:
            self._mirror.forget_buffer(handle << ADDRESS_SHIFT)
            self._post_sets()
            self.stream.post(row, [row.request.pack(handle, value)], cork=True)

    def init_tensor(self, tensor: TensorRef) -> None:
        row = EXT[Ext.INIT_TENSOR]
        with self._lock:
            # it may write what stands behind the tensor
            self._mirror.forget_buffer(tensor.address())
            self._post_sets()
            self.stream.post(row, [tensor.ext_record()], cork=True)

    def alloc_size(self, tensor: TensorRef, sources: list[TensorRef]) -> int:
        parts: list[Part] = [tensor.ext_record(), *(source.ext_record() for source in sources)]
        # the answer comes after all graphs that have been posted
        (size,) = self._ask(EXT[Ext.ALLOC_SIZE], parts, fatal=False, stop=interrupt.pending)
        return size

    def set_tensor(
        self,
        tensor: TensorRef,
        offset: int,
        data: Part,
        *,
        wait_sent: bool = False,
        again: bool = False,
    ) -> None:
        address, size = tensor.address() + offset, length(data)
        with self._lock:
            self._sequels.other()
            if again and isinstance(data, bytes):
                for start, end in self._mirror.write(address, size, data):
                    part = data if end - start == size else data[start:end]
                    self._set(address + start, part, end - start, wait_sent)
            else:
                self._mirror.forget(address, size)
                self._set(address, data, size, wait_sent)
        if wait_sent:
            # others may post meanwhile
            self.stream.drain()

    def _set(self, address: int, data: Part, size: int, wait_sent: bool) -> None:
        if size <= _SMALL_SET and not wait_sent:
            self._sets.append((address, data))
            self._sets_size += size + commands.SET_ENTRY.size
            if self._sets_size >= _SETS_SIZE:
                self._post_sets()
            return
        self._post_sets()
        row = EXT[Ext.SET]
        head = row.request.pack(address)
        self.stream.post(row, [head, data], cork=not wait_sent)

    def bring(self, tensor: TensorRef, offset: int, data: Part) -> Ticket:
        row, address = EXT[Ext.SET], tensor.address() + offset
        with self._lock:
            self._mirror.forget(address, length(data))
            self._post_sets()
            self.stream.post(row, [row.request.pack(address), data])
            return self._fence()

    def fence(self) -> Ticket:
        with self._lock:
            self._sequels.other()
            self._post_sets()
            return self._fence()

    def _fence(self) -> Ticket:
        ticket = Ticket(EXT[Ext.FENCE].name, 0)
        self.stream.post(EXT[Ext.FENCE], [], ticket)
        return ticket

    def load(self, wanted: Sequence[tuple[int, int, bytes, str]]) -> Ticket:
        row = EXT[Ext.LOAD]
        entries = [
            commands.LOAD_ENTRY.pack(address, size, digest, _cut(name))
            for address, size, digest, name in wanted
        ]
        ticket = Ticket(row.name, len(wanted), fatal=False)
        self._post(row, [row.request.pack(len(wanted)), b"".join(entries)], ticket)
        return ticket

    def keep(self, tensor: TensorRef, size: int, digest: bytes) -> None:
        row = EXT[Ext.KEEP]
        self._post(row, [row.request.pack(tensor.address(), size, digest)], cork=True)

    def get_tensor(
        self, tensor: TensorRef, offset: int, size: int, target: memoryview | None
    ) -> Ticket:
        row = EXT[Ext.GET]
        ticket = Ticket(row.name, size, target)
        self._sequels.came()
        self._post(row, [row.request.pack(tensor.address() + offset, size)], ticket)
        return ticket

    def set_tensor_2d(
        self, tensor: TensorRef, offset: int, size: int, stride: int, rows: list[bytes]
    ) -> None:
        # short rows are gathered
        set_rows(self, tensor, offset, stride, rows)

    def get_tensor_2d(
        self, tensor: TensorRef, offset: int, size: int, stride: int, target: memoryview
    ) -> list[Ticket]:
        return get_rows(self, tensor, offset, size, stride, target)

    def memset_tensor(self, tensor: TensorRef, offset: int, size: int, value: int) -> None:
        address = tensor.address() + offset
        self._write(EXT[Ext.MEMSET], (address, size, value), address, size)

    def copy_tensor(self, src: TensorRef, dst: TensorRef, size: int) -> None:
        address = dst.address()
        self._write(EXT[Ext.COPY], (src.address(), address, size), address, size)

    def open_peer(self, target: PeerTarget) -> Ticket:
        """Ask the worker to connect this device to one of another worker."""
        row = EXT[Ext.PEER_OPEN]
        assert row.reply is not None
        ticket = Ticket(row.name, row.reply.size, fatal=False)
        self.stream.post(row, [encode_json(target)], ticket)
        return ticket

    def get_cast(self, tensor: TensorRef, size: int, dtype: WireType) -> Ticket:
        """Read `size` bytes of f32 in another type, half as many bytes."""
        row = EXT[Ext.GET_CAST]
        ticket = Ticket(row.name, dtype.travels(size))
        self._sequels.came()
        self._post(row, [row.request.pack(tensor.address(), size, dtype)], ticket)
        return ticket

    def set_cast(self, tensor: TensorRef, size: int, data: Part, dtype: WireType) -> None:
        """Write `size` bytes of f32 from `data`, which has them in another type."""
        row, address = EXT[Ext.SET_CAST], tensor.address()
        with self._lock:
            self._sequels.other()
            if not isinstance(data, bytes):
                self._mirror.forget(address, size)
            elif not self._mirror.write(address, size, data, dtype):
                return
            self._post_sets()
            self.stream.post(row, [row.request.pack(address, dtype), data], cork=True)

    def push(
        self,
        src: TensorRef,
        size: int,
        route: int,
        ticket: int,
        dtype: WireType = WireType.F32,
    ) -> None:
        """Send `size` bytes on a route that leads away from this device, as `dtype`."""
        row = EXT[Ext.PUSH]
        self._sequels.came()
        self._post(row, [row.request.pack(route, dtype, ticket, src.address(), size)])

    def take(
        self,
        dst: TensorRef,
        size: int,
        route: int,
        ticket: int,
        dtype: WireType = WireType.F32,
    ) -> int:
        """Put what was pushed on a route to this device at `dst`; the number of the command."""
        address, row = dst.address(), EXT[Ext.TAKE]
        # many big ones that stay here would keep what they take in the way of later pushes
        cork = size <= _CORKED_TAKE
        values = (route, dtype, ticket, address, size)
        return self._write(row, values, address, size, cork)

    def graph_compute(self, graph: GraphRef) -> None:
        with self._lock:
            self._post_sets()
            if graph.uid and self._graphs.known(graph.uid):
                self._mirror.computes(graph.uid)
                row = EXT[Ext.GRAPH_RECOMPUTE]
                held = self._sequels.expected(graph.uid)
                self.stream.post(row, [row.request.pack(graph.uid)], cork=held)
                return
            row = EXT[Ext.GRAPH_COMPUTE]
            found = graph.ext_payload()
            self._mirror.computes(graph.uid, found.written)
            head = row.request.pack(graph.uid, found.n_nodes, found.n_tensors)
            self.stream.post(row, [head, *found.rows])
            if graph.uid:
                self._graphs.add(graph.uid, found.handles)

    def memory(self) -> tuple[int, int]:
        free, total = self._ask(EXT[Ext.MEMORY], [], stop=interrupt.pending)
        return free, total

    def bye(self) -> None:
        self._post(EXT[Ext.BYE], [])

    def _post(
        self, row: Command, parts: Sequence[Part], ticket: Ticket | None = None, cork: bool = False
    ) -> None:
        with self._lock:
            self._post_sets()
            self.stream.post(row, parts, ticket, cork=cork)

    def _write(
        self,
        row: Command,
        values: tuple[int, ...],
        address: int,
        size: int,
        cork: bool = True,
    ) -> int:
        """Post a command that writes `size` bytes at `address`; its number."""
        with self._lock:
            self._mirror.forget(address, size)
            self._post_sets()
            return self.stream.post(row, [row.request.pack(*values)], cork=cork)

    def _ask(
        self,
        row: Command,
        parts: Sequence[Part],
        fatal: bool = True,
        stop: Callable[[], bool] | None = None,
    ) -> tuple[int, ...]:
        assert row.reply is not None
        ticket = Ticket(row.name, row.reply.size, fatal=fatal)
        self._post(row, parts, ticket)
        return row.reply.unpack(ticket.wait(stop=stop))

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


def _cut(name: str) -> bytes:
    """A name that has room in an entry, in whole characters."""
    return name.encode()[:64].decode("utf-8", "ignore").encode()
