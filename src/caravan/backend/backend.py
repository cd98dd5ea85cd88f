"""The backend (stream) slots: asynchronous access, copies between devices, events, graphs.

`synchronize` is about host-visible effects only: every pending read has landed, and no memory of
the caller is still to be read. It never waits for remote compute that nothing on the host needs;
that wait would make the engine, which synchronizes before it reuses a graph, run the stages of a
pipeline one after the other.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from caravan import interrupt
from caravan.backend import callbacks
from caravan.backend.activation import is_activation
from caravan.backend.buffer import buffers, copy_within, handle_of, set_tensor, start_read
from caravan.backend.graph import Graph
from caravan.backend.tensor import BUFFER_AT, DATA_AT, RemoteTensor
from caravan.engine import casts, layouts
from caravan.stream.ext_link import ExtLink
from caravan.stream.ticket import Ticket
from caravan.wire.dtypes import WireType

if TYPE_CHECKING:
    from caravan.backend.device import RemoteDevice

_string_at = ctypes.string_at
_u64 = ctypes.c_uint64.from_address


class RemoteBackend:
    """One ggml_backend on a remote device.

    Attributes:
        device: what it computes on.
        link: over which, from its making on.
        reads: reads into the host's memory that may not have landed; they land in order.
    """

    __slots__ = (
        "_iface",
        "_synchronize",
        "_told",
        "_zeros",
        "device",
        "link",
        "pointer",
        "reads",
        "struct",
    )

    def __init__(self, device: RemoteDevice, struct: Any) -> None:
        self.device = device
        self.link = device.link
        self.struct = struct
        self.pointer = ctypes.addressof(struct)
        self.reads: list[Ticket] = []
        self._zeros = False
        self._told: interrupt.Throw | None = None
        # The engine synchronizes about ten times a token, and has mostly nothing to wait for: then
        # the slot is empty, which means just that and costs nothing.
        self._iface = struct.iface
        self._synchronize = struct.iface.synchronize
        struct.iface.synchronize = None

    def handle_of(self, buffer: int) -> int:
        """The handle of the buffer with this struct; 0 for what is not on the device."""
        return handle_of(buffer, self.link)

    def expect(self, ticket: Ticket) -> None:
        """A read is on its way."""
        self.reads.append(ticket)
        self._iface.synchronize = self._synchronize

    def take_reads(self) -> list[Ticket]:
        """The reads that may be on their way; it is the caller now who waits for them."""
        self._iface.synchronize = None
        reads, self.reads = self.reads, []
        return reads

    def settle(self, reads: list[Ticket]) -> None:
        """Wait until `reads` have landed. After Ctrl-C they are given up: zeros, once for all."""
        if reads:
            reads[-1].settle(interrupt.pending)
            if not reads[-1].done:
                for ticket in reads:
                    ticket.abandon()
            self._zeros |= reads[-1].error is not None
        if self._zeros and self.device.published:
            # they stay with the engine, which comes here each time before it looks at them
            self._iface.synchronize = self._synchronize
            self._told = self.device.tell()

    def free(self) -> None:
        """The engine was only looking for the end of what it frees: no error in that."""
        if self._told is not None:
            self._told.take_back()


class RemoteEvent:
    """A mark in a stream: the reads that were due, and the newest reply of any kind."""

    __slots__ = ("backend", "reads", "reply", "struct")

    def __init__(self, struct: ctypes.Structure) -> None:
        self.struct = struct
        self.backend: RemoteBackend | None = None
        self.reads: list[Ticket] = []
        self.reply: Ticket | None = None


backends: dict[int, RemoteBackend] = {}
events: dict[int, RemoteEvent] = {}


def free(pointer: int) -> None:
    callbacks.owners.pop(pointer, None)
    callbacks.links.pop(pointer, None)
    backend = backends.pop(pointer, None)
    if backend is not None:
        backend.free()


def set_tensor_async(pointer: int, tensor: int, data: int, offset: int, size: int) -> None:
    set_tensor(_u64(_storage(tensor) + BUFFER_AT).value, tensor, data, offset, size)


def get_tensor_async(pointer: int, tensor: int, data: int, offset: int, size: int) -> None:
    if not size:
        return
    buffer = _u64(_storage(tensor) + BUFFER_AT).value
    backends[pointer].expect(start_read(buffer, tensor, data, offset, size))


def cpy_tensor_async(backend_src: int, backend_dst: int, src: int, dst: int) -> bool:
    """True once the copy is queued; False where it is not one run of bytes on both sides."""
    device, link = backends[backend_dst].device, backends[backend_dst].link
    target = buffers.get(_u64(dst + BUFFER_AT).value)
    if target is None or target.link is not link:
        return False
    src_buffer = _u64(_storage(src) + BUFFER_AT).value
    source = buffers.get(src_buffer)
    if source is not None and source.link is link:
        return copy_within(source, src, target, dst)
    ggml = device.plugin.ggml
    if not (ggml.is_contiguous(src) and ggml.is_contiguous(dst)):
        return False
    size = ggml.nbytes(src)
    dtype = device.wire_type if is_activation(src, src_buffer, size) else WireType.F32
    if source is not None:
        source.device.route(source.link, link).copy(
            RemoteTensor(src, source.handle), RemoteTensor(dst, target.handle), size, dtype
        )
        return True
    if not src_buffer or not ggml.buffer_is_host(src_buffer):
        return False
    # nothing keeps the host from overwriting its memory after this call: take the bytes now
    start, there = _u64(src + DATA_AT).value, RemoteTensor(dst, target.handle)
    if dtype and isinstance(link, ExtLink):
        link.set_cast(there, size, bytes(casts.narrow(ggml, start, size, dtype.word)), dtype)
    else:
        link.set_tensor(there, 0, _string_at(start, size), again=True)
    return True


def synchronize(pointer: int) -> None:
    # what is corked has been copied out of the caller's memory: it may go on waiting for company
    backend = backends[pointer]
    backend.settle(backend.take_reads())


def graph_compute(pointer: int, cgraph: int) -> int:
    backend = backends[pointer]
    link = backend.link
    if interrupt.pending():
        return layouts.STATUS_ABORTED
    graph = Graph(cgraph, backend.handle_of, link.info.pads)
    if graph.n_nodes:
        link.graph_compute(graph)
    if not link.stream.ended:
        return layouts.STATUS_SUCCESS
    if backend.device.published:
        backend.device.tell()
    return layouts.STATUS_FAILED


def event_record(pointer: int, event_pointer: int) -> None:
    backend = backends[pointer]
    event = events[event_pointer]
    event.backend = backend
    event.reads = list(backend.reads)
    event.reply = backend.link.stream.last_ticket()


def event_wait(pointer: int, event_pointer: int) -> None:
    stream = backends[pointer].link.stream
    event = events[event_pointer]
    source = event.backend.link.stream if event.backend is not None else stream
    # one stream is in order by itself
    if source is not stream and event.reply is not None:
        source.flush()
        stream.hold_until(event.reply)


# device slots for events


def event_new(device_pointer: int) -> int:
    device = callbacks.owners[device_pointer]
    struct = device.plugin.new_event(device_pointer)
    pointer = ctypes.addressof(struct)
    events[pointer] = RemoteEvent(struct)
    return pointer


def event_free(device_pointer: int, event_pointer: int) -> None:
    events.pop(event_pointer, None)


def event_synchronize(device_pointer: int, event_pointer: int) -> None:
    event = events[event_pointer]
    if event.backend is not None:
        event.backend.settle(event.reads)
        event.reads = []


def _storage(tensor: int) -> int:
    """The tensor that has the buffer: a view's own may not be set."""
    return _u64(tensor + layouts.TENSOR_AT["view_src"]).value or tensor
