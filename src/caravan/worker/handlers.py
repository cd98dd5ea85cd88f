"""The extension's commands: one small function each, found through `HANDLERS`.

A handler runs at its device's turn (those in `ASIDE`: at once, on the reading thread), gets the
fixed payload and returns the body of the reply; a refusal is an exception. SET, GRAPH_COMPUTE, BYE
and SESSION are the channel's own affair.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from caravan.errors import RemoteError
from caravan.trace.spans import Kind
from caravan.wire.commands import EXT, SET_ENTRY, Ext
from caravan.wire.dtypes import WireType, decode_wire_type
from caravan.wire.extension import SIMULATED, Status, decode_peer_target
from caravan.wire.records import EXT_TENSOR, SPAN
from caravan.worker import graph
from caravan.worker.buffers import Buffer
from caravan.worker.copies import copy_within
from caravan.worker.lane import Lane
from caravan.worker.outlet import Parts
from caravan.worker.peering import open_way
from caravan.worker.peers import WITHIN
from caravan.worker.replies import NOTHING
from caravan.worker.table import Table

Handler = Callable[[Lane, bytes], Parts]

MAX_RECORDS = 11


def _unpack(number: Ext, payload: bytes) -> tuple[int, ...]:
    return EXT[number].request.unpack(payload)


def _pack(number: Ext, *values: int) -> Parts:
    reply = EXT[number].reply
    assert reply is not None
    return (reply.pack(*values),)


def alloc(lane: Lane, payload: bytes) -> Parts:
    (size,) = _unpack(Ext.ALLOC, payload)
    buffer = lane.buffers.allocate(lane.device, size)
    return _pack(Ext.ALLOC, buffer.handle, buffer.base, buffer.size)


def free(lane: Lane, payload: bytes) -> Parts:
    (handle,) = _unpack(Ext.FREE, payload)
    lane.free(handle)
    return NOTHING


def clear(lane: Lane, payload: bytes) -> Parts:
    handle, value = _unpack(Ext.CLEAR, payload)
    buffer = lane.own(lane.buffers.get(handle))
    if buffer.native is not None:
        buffer.native.clear(value)
    return NOTHING


def get(lane: Lane, payload: bytes) -> Parts:
    address, size = _unpack(Ext.GET, payload)
    buffer, offset = lane.locate(address, size)
    if buffer.native is None or size == 0:
        return NOTHING
    lane.counters.bytes_out += size
    return (buffer.native.read(offset, size),)


def get_cast(lane: Lane, payload: bytes) -> Parts:
    address, size, number = _unpack(Ext.GET_CAST, payload)
    dtype = _half(number, address, size)
    buffer, offset = lane.locate(address, size)
    if buffer.native is None or size == 0:
        return NOTHING
    lane.counters.bytes_out += dtype.travels(size)
    return (buffer.native.narrow(offset, size, dtype),)


def set_cast(lane: Lane, payload: bytes) -> Parts:
    head = EXT[Ext.SET_CAST].request
    address, number = head.unpack_from(payload)
    data = memoryview(payload)[head.size :]
    size = 2 * len(data)
    dtype = _half(number, address, size)
    buffer, offset = lane.locate(address, size)
    if buffer.native is not None:
        buffer.native.widen(offset, data, dtype)
    lane.counters.bytes_in += len(data)
    return NOTHING


def _half(number: int, address: int, size: int) -> WireType:
    """The type that a command converts to or from, which must be one of half the size."""
    dtype = decode_wire_type(number, address, size)
    if dtype is WireType.F32:
        raise RemoteError(Status.BAD_REQUEST, "nothing to convert")
    return dtype


def set_many(lane: Lane, payload: bytes) -> Parts:
    """Several small writes, none of which is done unless all of them can be."""
    head = EXT[Ext.SET_MANY].request
    (count,) = head.unpack_from(payload)
    start = head.size + count * SET_ENTRY.size
    if start > len(payload):
        raise RemoteError(Status.BAD_REQUEST, f"SET_MANY of {count} entries is cut short")
    data = memoryview(payload)
    places: list[tuple[Buffer, int, memoryview]] = []
    for address, size in SET_ENTRY.unpack_many(data[head.size : start]):
        places.append((*lane.locate(address, size), data[start : start + size]))
        start += size
    if start != len(payload):
        raise RemoteError(Status.BAD_REQUEST, "SET_MANY's sizes do not add up to its payload")
    for buffer, offset, part in places:
        if buffer.native is not None:
            buffer.native.write(offset, part)
    lane.counters.bytes_in += len(payload)
    return NOTHING


def keep(lane: Lane, payload: bytes) -> Parts:
    """Without a cache there is nothing to it; a simulated device has nothing to keep."""
    address, size, digest = EXT[Ext.KEEP].request.unpack(payload)
    buffer, offset = lane.locate(address, size)
    if lane.keeper is not None and size and lane.device.name != SIMULATED:
        lane.keeper.keep(lane, buffer, offset, size, digest)
    return NOTHING


def memset(lane: Lane, payload: bytes) -> Parts:
    address, size, value = _unpack(Ext.MEMSET, payload)
    buffer, offset = lane.locate(address, size)
    if buffer.native is not None:
        buffer.native.fill(offset, size, value)
    return NOTHING


def copy(lane: Lane, payload: bytes) -> Parts:
    src, dst, size = _unpack(Ext.COPY, payload)
    copy_within(lane, src, dst, size)
    return NOTHING


def push(lane: Lane, payload: bytes) -> Parts:
    route, number, ticket, address, size = _unpack(Ext.PUSH, payload)
    dtype = _parcel_type(number, route, address, size)
    buffer, offset = lane.locate(address, size)
    travels = dtype.travels(size)
    lane.counters.bytes_out += travels
    with lane.spans.during(Kind.COPY_OUT, travels, ticket, route):
        if buffer.native is None:
            data: Parts = NOTHING
        elif dtype:
            data = (buffer.native.narrow(offset, size, dtype),)
        else:
            data = (buffer.native.read(offset, size),)
        lane.peers.push(route, ticket, data)
    return NOTHING


def take(lane: Lane, payload: bytes) -> Parts:
    route, number, ticket, address, size = _unpack(Ext.TAKE, payload)
    dtype = _parcel_type(number, route, address, size)
    buffer, offset = lane.locate(address, size)
    lane.peers.take(route, ticket, size, buffer, offset, lane.spans, dtype)
    lane.counters.bytes_in += dtype.travels(size)
    return NOTHING


def _parcel_type(number: int, route: int, address: int, size: int) -> WireType:
    dtype = decode_wire_type(number, address, size)
    if dtype and route == WITHIN:
        raise RemoteError(Status.BAD_REQUEST, "a copy within a worker is not converted")
    return dtype


def open_peer(lane: Lane, payload: bytes) -> Parts:
    """Connect to another worker; takes its time, so it has a thread of its own."""
    target = decode_peer_target(payload)
    transport, elapsed = open_way(target, lane.peers.token, lane.peers.client)
    try:
        lane.peers.add_out(target.route, transport, lane.spans)
    except RemoteError:
        transport.close()
        raise
    return _pack(Ext.PEER_OPEN, elapsed)


def graph_recompute(lane: Lane, payload: bytes) -> Parts:
    (uid,) = _unpack(Ext.GRAPH_RECOMPUTE, payload)
    lane.compute(lane.graphs.get(uid), uid)
    return NOTHING


def memory(lane: Lane, payload: bytes) -> Parts:
    return _pack(Ext.MEMORY, *lane.device.memory())


def fence(lane: Lane, payload: bytes) -> Parts:
    return NOTHING


def ping(lane: Lane, payload: bytes) -> Parts:
    return NOTHING


def clock(lane: Lane, payload: bytes) -> Parts:
    return _pack(Ext.CLOCK, time.perf_counter_ns())


def timeline(lane: Lane, payload: bytes) -> Parts:
    """Hand over the spans that there are, and go on recording or not."""
    (on,) = _unpack(Ext.TIMELINE, payload)
    lane.spans.switch(bool(on))
    spans, dropped = lane.spans.spans.take()
    return (*_pack(Ext.TIMELINE, dropped), np.array(spans, SPAN).tobytes())


def stats(lane: Lane, payload: bytes) -> Parts:
    counters = lane.counters
    totals = lane.spans.activity.totals()
    return _pack(Ext.STATS, *totals, counters.bytes_in, counters.bytes_out, counters.graphs)


def init_tensor(lane: Lane, payload: bytes) -> Parts:
    """Only devices that pad their tensors have anything to do here."""
    table = _records(payload)
    memory = lane.buffers.memory(lane.device.index)
    buffer = lane.own(lane.buffers.locate(int(table.rows["data"][0]), 0)[0])
    if lane.device.pads:
        graph.init_tensor(lane.device, table, buffer, memory)
    else:
        graph.tensor_alone(table, memory)
    return NOTHING


def alloc_size(lane: Lane, payload: bytes) -> Parts:
    tensors = graph.tensor_alone(_records(payload), lane.buffers.memory(lane.device.index))
    return _pack(Ext.ALLOC_SIZE, lane.device.alloc_size(tensors.ctypes.data))


def _records(payload: bytes) -> Table:
    """A tensor and then its sources, as rows."""
    count, rest = divmod(len(payload), EXT_TENSOR.itemsize)
    if rest or not 0 < count <= MAX_RECORDS:
        raise RemoteError(Status.BAD_REQUEST, f"{len(payload)} bytes are no tensor records")
    return Table(np.frombuffer(payload, EXT_TENSOR), 1)


HANDLERS: dict[int, Handler] = {
    Ext.ALLOC: alloc,
    Ext.FREE: free,
    Ext.CLEAR: clear,
    Ext.GET: get,
    Ext.GET_CAST: get_cast,
    Ext.SET_CAST: set_cast,
    Ext.MEMSET: memset,
    Ext.SET_MANY: set_many,
    Ext.PUSH: push,
    Ext.TAKE: take,
    Ext.COPY: copy,
    Ext.GRAPH_RECOMPUTE: graph_recompute,
    Ext.MEMORY: memory,
    Ext.FENCE: fence,
    Ext.KEEP: keep,
    Ext.INIT_TENSOR: init_tensor,
    Ext.ALLOC_SIZE: alloc_size,
}

ASIDE: dict[int, Handler] = {
    Ext.PING: ping,
    Ext.PEER_OPEN: open_peer,
    Ext.CLOCK: clock,
    Ext.TIMELINE: timeline,
    Ext.STATS: stats,
}
