"""Remote buffers: the buffer-type and buffer slots of ggml's plug-in interface.

A buffer struct belongs to the engine, which calls free_buffer before it deletes it; its context
holds the buffer's base in the worker's address space, so that the CPU buffer's own native get_base
serves the most frequent question without Python.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

from caravan import interrupt
from caravan.backend import callbacks, weights
from caravan.backend.tensor import BUFFER_AT, NAME_AT, RemoteTensor
from caravan.engine import layouts
from caravan.errors import CaravanError, DeviceError
from caravan.stream.link import DeviceLink, RemoteAllocation, TensorRef
from caravan.stream.ticket import Ticket
from caravan.wire.extension import MAX_BUFFER_SIZE

if TYPE_CHECKING:
    from caravan.backend.device import RemoteDevice

# Up to here a write is copied into the queue; above, a write of weights goes out from the caller's
# memory before set_tensor returns. Other writes are copied whatever their size: waiting for the
# socket in the middle of a prompt would stop the pipeline.
SNAPSHOT_MAX = 128 << 10
# Taken for a bigger size that a worker names: more than any buffer has room for, which the engine
# finds out, and little enough that it can add up such sizes.
_NO_BUFFER = MAX_BUFFER_SIZE + 1
_string_at = ctypes.string_at
_u64 = ctypes.c_uint64.from_address
_i32 = ctypes.c_int32.from_address


class RemoteBuffer:
    """A live buffer.

    Attributes:
        pointer: the engine's ggml_backend_buffer.
        device: where it lies.
        link: over which it was allocated; its device may have got another one since, to which it
            means nothing.
        handle, base, size: as the worker has it.
    """

    __slots__ = ("base", "device", "handle", "link", "pointer", "size")

    def __init__(
        self, pointer: int, device: RemoteDevice, link: DeviceLink, allocation: RemoteAllocation
    ) -> None:
        self.pointer = pointer
        self.device = device
        self.link = link
        self.handle = allocation.handle
        self.base = allocation.base
        self.size = allocation.size

    @property
    def usage(self) -> int:
        """ggml's buffer usage: 0 any, 1 weights, 2 compute."""
        return _i32(self.pointer + layouts.BUFFER_USAGE_AT).value


# every live remote buffer by the address of its struct
buffers: dict[int, RemoteBuffer] = {}


def handle_of(pointer: int, link: DeviceLink) -> int:
    """The handle of the buffer with this struct; 0 if it is not one of this link's."""
    buffer = buffers.get(pointer)
    return buffer.handle if buffer is not None and buffer.link is link else 0


def memory(address: int, size: int) -> memoryview:
    """The engine's memory as writable bytes; valid only as long as the engine says."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


# buffer type


def alloc_buffer(buft: int, size: int) -> int | None:
    device = callbacks.owners[buft]
    device.allocation_error = None
    device.memory_changed()
    link = device.link
    try:
        allocation = link.alloc(size)
    except DeviceError as exc:
        # the worker's words, which name its device as the worker does
        told = f"{device.name} at {device.endpoint}: {exc}"
        device.allocation_error = type(exc)(told)
        device.allocation_error.__cause__ = exc
        return None
    pointer = device.plugin.new_buffer(buft, allocation)
    buffers[pointer] = RemoteBuffer(pointer, device, link, allocation)
    callbacks.owners[pointer] = device
    callbacks.links[pointer] = link
    return pointer


def get_alignment(buft: int) -> int:
    return callbacks.owners[buft].link.info.alignment


def get_max_size(buft: int) -> int:
    return callbacks.owners[buft].link.info.max_size


def get_alloc_size(buft: int, tensor: int) -> int:
    return callbacks.owners[buft].sizes.alloc_size(tensor)


def get_watched_size(buft: int, tensor: int) -> int:
    """Asked only while somebody watches: see `RemoteDevice.watched_sizes`."""
    device = callbacks.owners[buft]
    pads = device.link.info.pads
    size = device.sizes.alloc_size(tensor) if pads else int(device.plugin.ggml.nbytes(tensor))
    watcher = device.watchers.get(threading.get_ident())
    if watcher is not None:
        alignment = device.link.info.alignment
        watcher(_string_at(tensor + NAME_AT), -(-size // alignment) * alignment)
    return size


def is_host(buft: int) -> bool:
    """Asked only while a model without weights is loaded: see `RemoteDevice.without_weights`."""
    return threading.get_ident() in callbacks.owners[buft].loaders


# buffer


def free_buffer(pointer: int) -> None:
    buffer = buffers.pop(pointer)
    callbacks.owners.pop(pointer, None)
    callbacks.links.pop(pointer, None)
    buffer.link.free(buffer.handle)
    buffer.device.memory_changed()


def get_base(pointer: int) -> int:
    return buffers[pointer].base


def init_tensor(pointer: int, tensor: int) -> int:
    buffer = buffers[pointer]
    if buffer.device.sizes.needs_init(tensor):
        buffer.link.init_tensor(RemoteTensor(tensor, buffer.handle))
    return layouts.STATUS_SUCCESS


def memset_tensor(pointer: int, tensor: int, value: int, offset: int, size: int) -> None:
    buffer = buffers[pointer]
    buffer.link.memset_tensor(RemoteTensor(tensor, buffer.handle), offset, size, value)


def set_tensor(pointer: int, tensor: int, data: int, offset: int, size: int) -> None:
    buffer = buffers[pointer]
    target = RemoteTensor(tensor, buffer.handle)
    link, usage = buffer.link, buffer.usage
    if usage == layouts.USAGE_WEIGHTS:
        sink = weights.current(buffer.device)
        if sink is not None and sink.take(buffer.device, target, offset, size):
            return
    if size > SNAPSHOT_MAX and usage == layouts.USAGE_WEIGHTS:
        link.set_tensor(target, offset, memory(data, size), wait_sent=True)
    elif size:
        # of all that is written, the inputs of graphs alone come again
        again = usage == layouts.USAGE_COMPUTE
        link.set_tensor(target, offset, _string_at(data, size), again=again)


def get_tensor(pointer: int, tensor: int, data: int, offset: int, size: int) -> None:
    if not size:
        return
    ticket = start_read(pointer, tensor, data, offset, size)
    ticket.settle(interrupt.pending)
    device = buffers[pointer].device
    if device.published and ticket.error is not None:
        device.tell()


def set_tensor_2d(
    pointer: int,
    tensor: int,
    data: int,
    offset: int,
    size: int,
    count: int,
    stride: int,
    data_stride: int,
) -> None:
    buffer = buffers[pointer]
    target = RemoteTensor(tensor, buffer.handle)
    # so that no more than that is copied at a time
    some = max(1, SNAPSHOT_MAX // max(size, 1))
    for start in range(0, count, some):
        rows = [
            _string_at(data + i * data_stride, size) for i in range(start, min(count, start + some))
        ]
        buffer.link.set_tensor_2d(target, offset + start * stride, size, stride, rows)


def get_tensor_2d(
    pointer: int,
    tensor: int,
    data: int,
    offset: int,
    size: int,
    count: int,
    stride: int,
    data_stride: int,
) -> None:
    # the engine's memory gets zeros where a read fails or is given up
    rows = bytearray(size * count)
    try:
        buffer = buffers[pointer]
        tickets = buffer.link.get_tensor_2d(
            RemoteTensor(tensor, buffer.handle), offset, size, stride, memoryview(rows)
        )
        tickets[-1].settle(interrupt.pending)
    finally:
        for i in range(count):
            row = (ctypes.c_char * size).from_buffer(rows, i * size)
            ctypes.memmove(data + i * data_stride, row, size)


def start_read(pointer: int, tensor: int, data: int, offset: int, size: int) -> Ticket:
    """A read from a buffer into the engine's memory, which gets zeros if it cannot be asked for."""
    try:
        buffer = buffers[pointer]
        return buffer.link.get_tensor(
            RemoteTensor(tensor, buffer.handle), offset, size, memory(data, size)
        )
    except BaseException:
        ctypes.memset(data, 0, size)
        raise


def cpy_tensor(pointer: int, src: int, dst: int) -> bool:
    buffer = buffers[pointer]
    source = buffers.get(_u64(src + BUFFER_AT).value)
    if source is None or source.link is not buffer.link:
        return False
    return copy_within(source, src, buffer, dst)


def clear(pointer: int, value: int) -> None:
    buffer = buffers[pointer]
    buffer.link.clear(buffer.handle, value)


def copy_within(source: RemoteBuffer, src: int, target: RemoteBuffer, dst: int) -> bool:
    """A copy on one device; False where the bytes are not one run on both sides."""
    ggml = target.device.plugin.ggml
    if not (ggml.is_contiguous(src) and ggml.is_contiguous(dst)):
        return False
    size = ggml.nbytes(src)
    if size:
        target.link.copy_tensor(
            RemoteTensor(src, source.handle), RemoteTensor(dst, target.handle), size
        )
    return True


class TensorSizes:
    """When the worker must be asked about a tensor, and what it said: asked once, then cached.

    The rules are the ones of llama.cpp's client: only a quantised row that is no multiple of 512,
    or an op that may expand its output, can need more bytes than the tensor's own.
    """

    _ROW = 512
    _SOURCES = 10

    def __init__(self, device: RemoteDevice) -> None:
        self._device = device
        self._ggml: Any = device.plugin.ggml
        self._cache: dict[bytes, int] = {}
        self._expanding = {
            number
            for number, name in enumerate(layouts.OP_NAMES)
            if name in {"FLASH_ATTN_EXT", "MUL_MAT", "MUL_MAT_ID", "CUMSUM", "ARGSORT", "TOP_K"}
        }

    def needs_init(self, tensor: int) -> bool:
        """Whether INIT_TENSOR must be sent."""
        if _u64(tensor + layouts.TENSOR_AT["view_src"]).value:
            return False
        row = ctypes.c_int64.from_address(tensor + layouts.TENSOR_AT["ne"]).value
        type_ = _i32(tensor + layouts.TENSOR_AT["type"]).value
        return row % self._ROW != 0 and bool(self._ggml.is_quantized(type_))

    def alloc_size(self, tensor: int) -> int:
        """Bytes to set aside; at least the tensor's own."""
        size = int(self._ggml.nbytes(tensor))
        op = _i32(tensor + layouts.TENSOR_AT["op"]).value
        if op not in self._expanding and not self.needs_init(tensor):
            return size
        # type, shape, strides, op and its parameters; not the sources' shapes: the worst case,
        # which is reserved first, must decide
        start = layouts.TENSOR_AT["ne"]
        end = layouts.TENSOR_AT["flags"]
        key = _string_at(tensor, 4) + _string_at(tensor + start, end - start)
        known = self._cache.get(key)
        if known is None:
            try:
                known = min(self._ask(tensor), _NO_BUFFER)
            except CaravanError:
                return size
            self._cache[key] = known
        return max(known, size)

    def _ask(self, tensor: int) -> int:
        link = self._device.link
        sources: list[TensorRef] = []
        for i in range(self._SOURCES):
            src = _u64(tensor + layouts.TENSOR_AT["src"] + 8 * i).value
            if not src:
                break
            sources.append(RemoteTensor(src, handle_of(_u64(src + BUFFER_AT).value, link)))
        return link.alloc_size(RemoteTensor(tensor, 0), sources)
