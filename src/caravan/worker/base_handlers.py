"""The base protocol's commands (ggml-rpc): one small function each, found through two tables.

`NOW` answers on the spot, `LANES` finds the device that a command goes to and `HANDLERS` does the
work at that device's turn. A refusal is an exception, which ends the connection: the base protocol
has no error reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from caravan.engine.layouts import TYPE_BLOCK, TYPE_BYTES
from caravan.errors import AllocationError
from caravan.wire.commands import BASE_8, DEVICE, POINTER, U8, U64, Base
from caravan.wire.extension import ADDRESS_SHIFT
from caravan.wire.records import RPC_TENSOR
from caravan.worker import graph
from caravan.worker.buffers import Buffer, BufferTable
from caravan.worker.copies import copy_within
from caravan.worker.device import DeviceBuffer
from caravan.worker.lane import Lane
from caravan.worker.log import log
from caravan.worker.outlet import Parts
from caravan.worker.replies import NOTHING
from caravan.worker.table import bad, from_records
from caravan.worker.weights import Entry, Weights

Handler = Callable[[Lane, bytes], Parts]

# Its answer is gathered in the worker's own memory.
MAX_READ_2D = 1 << 30

# type, buffer, ne[4], nb[4] of an rpc_tensor, and its data; a NumPy record costs far more to read.
_HEAD = Struct("<8xIQ4I4I")
_DATA = Struct("<Q")
_DATA_AT = RPC_TENSOR.fields["data"][1] if RPC_TENSOR.fields else 0


@dataclass(frozen=True, slots=True)
class TensorRef:
    """What a command needs of an rpc_tensor: where it lies and how far it goes."""

    handle: int
    data: int
    nbytes: int

    @staticmethod
    def parse(record: bytes | memoryview) -> TensorRef:
        """Raises RemoteError for a type that does not exist."""
        kind, handle, *dims = _HEAD.unpack_from(record)
        (data,) = _DATA.unpack_from(record, _DATA_AT)
        if kind >= len(TYPE_BLOCK) or not TYPE_BLOCK[kind]:
            raise bad(f"type {kind} does not exist")
        return TensorRef(handle, data, _nbytes(dims, int(TYPE_BLOCK[kind]), int(TYPE_BYTES[kind])))

    def part(self, offset: int, size: int) -> int:
        """The wire address of a part of the tensor; raises RemoteError when it passes the end."""
        if offset > self.nbytes or size > self.nbytes - offset:
            raise bad(f"{size} bytes at {offset} pass the end of a tensor of {self.nbytes} bytes")
        if self.data >> ADDRESS_SHIFT != self.handle:
            raise bad(f"data {self.data:#x} is not in buffer {self.handle}")
        return self.data + offset


def _nbytes(dims: Sequence[int], block: int, size: int) -> int:
    ne, nb = dims[:4], dims[4:]
    if 0 in ne:
        return 0
    rest = sum((n - 1) * b for n, b in zip(ne[1:], nb[1:], strict=True))
    first = size + (ne[0] - 1) * nb[0] if block == 1 else ne[0] * nb[0] // block
    return first + rest


# Answers on the spot


def device_count(lanes: list[Lane], buffers: BufferTable, payload: bytes) -> Parts:
    return _pack(Base.DEVICE_COUNT, len(lanes))


def get_alignment(lanes: list[Lane], buffers: BufferTable, payload: bytes) -> Parts:
    return _pack(Base.GET_ALIGNMENT, _device(lanes, payload).device.alignment)


def get_max_size(lanes: list[Lane], buffers: BufferTable, payload: bytes) -> Parts:
    return _pack(Base.GET_MAX_SIZE, _device(lanes, payload).device.max_size)


def get_device_memory(lanes: list[Lane], buffers: BufferTable, payload: bytes) -> Parts:
    return _pack(Base.GET_DEVICE_MEMORY, *_device(lanes, payload).device.memory())


def buffer_get_base(lanes: list[Lane], buffers: BufferTable, payload: bytes) -> Parts:
    (handle,) = POINTER.unpack(payload)
    return _pack(Base.BUFFER_GET_BASE, buffers.get(handle).base)


def set_tensor_hash(lanes: list[Lane], buffers: BufferTable, payload: bytes) -> Parts:
    """Of a worker without a weight cache: never a hit."""
    return (U8.pack(0),)


NOW: dict[int, Callable[[list[Lane], BufferTable, bytes], Parts]] = {
    Base.DEVICE_COUNT: device_count,
    Base.GET_ALIGNMENT: get_alignment,
    Base.GET_MAX_SIZE: get_max_size,
    Base.GET_DEVICE_MEMORY: get_device_memory,
    Base.BUFFER_GET_BASE: buffer_get_base,
    Base.SET_TENSOR_HASH: set_tensor_hash,
}


# Which device a command goes to


def _device(lanes: list[Lane], payload: bytes) -> Lane:
    """By the device number at the start of the payload."""
    device: int = DEVICE.unpack_from(payload)[0]
    if device >= len(lanes):
        raise bad(f"there is no device {device}")
    return lanes[device]


def _of_device(lanes: list[Lane], buffers: BufferTable, payload: bytes) -> Lane:
    return _device(lanes, payload)


def _of_buffer(lanes: list[Lane], buffers: BufferTable, payload: bytes) -> Lane:
    (handle,) = POINTER.unpack_from(payload)
    return lanes[buffers.get(handle).device]


def of_tensor(lanes: list[Lane], buffers: BufferTable, payload: bytes) -> Lane:
    """The lane of the buffer that an rpc_tensor at the start of the payload lies in."""
    return lanes[buffers.get(TensorRef.parse(payload).handle).device]


def _of_init(lanes: list[Lane], buffers: BufferTable, payload: bytes) -> Lane:
    """A tensor without a buffer is accepted, and nothing is done."""
    handle = TensorRef.parse(payload).handle
    return lanes[buffers.get(handle).device] if handle else lanes[0]


LANES: dict[int, Callable[[list[Lane], BufferTable, bytes], Lane]] = {
    Base.ALLOC_BUFFER: _of_device,
    Base.FREE_BUFFER: _of_buffer,
    Base.BUFFER_CLEAR: _of_buffer,
    Base.GET_TENSOR: of_tensor,
    Base.GET_TENSOR_2D: of_tensor,
    Base.MEMSET_TENSOR: of_tensor,
    Base.INIT_TENSOR: _of_init,
    Base.GET_ALLOC_SIZE: _of_device,
    Base.GRAPH_RECOMPUTE: _of_device,
}


# Work at the device's turn


def alloc_buffer(lane: Lane, payload: bytes) -> Parts:
    """A refusal is answered with the pointer 0, so the reason can only be told here."""
    _, size = BASE_8[Base.ALLOC_BUFFER].request.unpack(payload)
    try:
        buffer = lane.buffers.allocate(lane.device, size)
    except AllocationError as exc:
        log(f"refused a buffer: {exc}")
        return _pack(Base.ALLOC_BUFFER, 0, 0)
    return _pack(Base.ALLOC_BUFFER, buffer.handle, buffer.size)


def free_buffer(lane: Lane, payload: bytes) -> Parts:
    (handle,) = POINTER.unpack(payload)
    lane.free(handle)
    return NOTHING


def buffer_clear(lane: Lane, payload: bytes) -> Parts:
    handle, value = BASE_8[Base.BUFFER_CLEAR].request.unpack(payload)
    buffer = lane.own(lane.buffers.get(handle))
    if buffer.native is not None:
        buffer.native.clear(value)
    return NOTHING


def get_tensor(lane: Lane, payload: bytes) -> Parts:
    record, offset, size = BASE_8[Base.GET_TENSOR].request.unpack(payload)
    buffer, at = lane.locate(TensorRef.parse(record).part(offset, size), size)
    return _read(lane, buffer, at, size)


def get_tensor_2d(lane: Lane, payload: bytes) -> Parts:
    record, offset, size, n, stride = BASE_8[Base.GET_TENSOR_2D].request.unpack(payload)
    span = span_2d(size, n, stride)
    buffer, at = lane.locate(TensorRef.parse(record).part(offset, span), span)
    if n * size > MAX_READ_2D:
        raise bad(f"{n} rows of {size} bytes at once: there may be {MAX_READ_2D} bytes")
    native = buffer.native
    if native is None:
        return NOTHING
    lane.counters.bytes_out += n * size
    return (_rows(np.frombuffer(native.read(at, span), np.uint8), n, size, stride).tobytes(),)


def write_rows(native: DeviceBuffer, at: int, size: int, stride: int, data: bytearray) -> None:
    """Rows of `size` bytes, one after the other in `data`, each `stride` from the last."""
    n = len(data) // size
    if native.view is None:
        for i in range(n):
            native.write(at + i * stride, memoryview(data)[i * size : (i + 1) * size])
        return
    span = (n - 1) * stride + size
    target = np.frombuffer(native.view[at : at + span], np.uint8)
    _rows(target, n, size, stride)[:] = np.frombuffer(data, np.uint8).reshape(n, size)


def _rows(memory: npt.NDArray[np.uint8], n: int, size: int, stride: int) -> npt.NDArray[np.uint8]:
    """`n` rows within memory that holds them; of one row the stride is of no concern."""
    return as_strided(memory, (n, size), (stride if n > 1 else size, 1))


def span_2d(size: int, n: int, stride: int) -> int:
    """Bytes from the first to the last of a 2-d transfer; raises RemoteError."""
    if n == 0 or size == 0:
        raise bad("an empty 2-d transfer")
    # Overlapping rows would let a short range become an answer of any length.
    if n > 1 and stride < size:
        raise bad("rows of a 2-d transfer overlap")
    return (n - 1) * stride + size


def memset_tensor(lane: Lane, payload: bytes) -> Parts:
    record, offset, size, value = BASE_8[Base.MEMSET_TENSOR].request.unpack(payload)
    buffer, at = lane.locate(TensorRef.parse(record).part(offset, size), size)
    if buffer.native is not None:
        buffer.native.fill(at, size, value)
    return NOTHING


def init_tensor(lane: Lane, payload: bytes) -> Parts:
    """Only devices that pad their tensors have anything to do here."""
    ref = TensorRef.parse(payload)
    if not ref.handle or not lane.device.pads:
        return NOTHING
    table = from_records(np.frombuffer(payload, RPC_TENSOR))
    buffer = lane.own(lane.buffers.get(ref.handle))
    lane.locate(ref.part(0, ref.nbytes), ref.nbytes)
    graph.init_tensor(lane.device, table, buffer, lane.buffers.memory(lane.device.index))
    return NOTHING


def get_alloc_size(lane: Lane, payload: bytes) -> Parts:
    records = np.frombuffer(payload, RPC_TENSOR, offset=DEVICE.size)
    records = records[np.r_[True, records["id"][1:] != 0]]
    if not records["id"][0]:
        records = records.copy()
        records["id"][0] = 1
    tensors = graph.tensor_alone(from_records(records), lane.buffers.memory(lane.device.index))
    return _pack(Base.GET_ALLOC_SIZE, lane.device.alloc_size(tensors.ctypes.data))


def graph_recompute(lane: Lane, payload: bytes) -> Parts:
    """Protocol 7 knows one graph a device, protocol 8 names it."""
    uid = U64.unpack(payload[DEVICE.size :])[0] if len(payload) > DEVICE.size else 0
    lane.compute(lane.graphs.get(uid))
    return NOTHING


def copy_tensor(lane: Lane, src: int, dst: int, size: int) -> Parts:
    """Within one device."""
    copy_within(lane, src, dst, size)
    return (U8.pack(1),)


def set_tensor_cached(lane: Lane, payload: bytes, weights: Weights) -> Parts:
    """SET_TENSOR_HASH of a worker with a weight cache.

    After a miss the tensor's bytes are anything, if the host can reach them: the file was read to
    where they are before its hash was known.
    """
    record, offset, digest = BASE_8[Base.SET_TENSOR_HASH].request.unpack(payload)
    ref = TensorRef.parse(record)
    address = ref.part(offset, 0)
    rest = ref.nbytes - offset
    buffer, at = lane.locate(address, rest)
    entry = weights.find(digest, rest)
    if entry is None:
        return (U8.pack(0),)
    with entry:
        return (U8.pack(_fill(buffer, at, entry)),)


def _fill(buffer: Buffer, at: int, entry: Entry) -> bool:
    native = buffer.native
    if native is not None and native.view is not None:
        return entry.read_into(native.view[at : at + entry.size])
    data = bytearray(entry.size)
    hit = entry.read_into(memoryview(data))
    if hit and native is not None:
        native.write(at, data)
    return hit


HANDLERS: dict[int, Handler] = {
    Base.ALLOC_BUFFER: alloc_buffer,
    Base.FREE_BUFFER: free_buffer,
    Base.BUFFER_CLEAR: buffer_clear,
    Base.GET_TENSOR: get_tensor,
    Base.GET_TENSOR_2D: get_tensor_2d,
    Base.MEMSET_TENSOR: memset_tensor,
    Base.INIT_TENSOR: init_tensor,
    Base.GET_ALLOC_SIZE: get_alloc_size,
    Base.GRAPH_RECOMPUTE: graph_recompute,
}


def _read(lane: Lane, buffer: Buffer, at: int, size: int) -> Parts:
    if buffer.native is None or size == 0:
        return NOTHING
    lane.counters.bytes_out += size
    return (buffer.native.read(at, size),)


def _pack(number: Base, *values: int) -> Parts:
    reply = BASE_8[number].reply
    assert reply is not None
    return (reply.pack(*values),)
