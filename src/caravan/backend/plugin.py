"""`Plugin`: the ggml registry entry, and the structs of every device under it.

One for the process. Each slot of each interface is filled from one table: a Python function, a
native function of the library where one does exactly the job, or nothing where ggml's default is
right. A struct made here belongs to the object that it stands for, except buffers, which the engine
allocates and deletes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from caravan import engine
from caravan.backend import backend as backend_slots
from caravan.backend import buffer as buffer_slots
from caravan.backend import callbacks
from caravan.backend import device as device_slots
from caravan.engine import layouts
from caravan.stream.link import RemoteAllocation
from caravan.trace import head

if TYPE_CHECKING:
    from caravan.backend.device import RemoteDevice

REGISTRY_NAME = "RPC"  # the engine puts devices of a registry of this name before local ones
_GUID = bytes.fromhex("c4a7 1c0f 5e0b 4f58 9d8e 6b2f 43d1 ca7a".replace(" ", ""))
_CPU_DEVICE = 0

# slot -> (function, answer when it fails)
_BUFFER_TYPE: dict[str, tuple[Any, Any]] = {
    "get_name": (device_slots.buffer_type_name, None),
    "alloc_buffer": (buffer_slots.alloc_buffer, None),
    "get_alignment": (buffer_slots.get_alignment, 32),
    "get_max_size": (buffer_slots.get_max_size, 0),
}
_BUFFER: dict[str, tuple[Any, Any]] = {
    "free_buffer": (buffer_slots.free_buffer, None),
    "memset_tensor": (buffer_slots.memset_tensor, None),
    "set_tensor": (buffer_slots.set_tensor, None),
    "get_tensor": (buffer_slots.get_tensor, None),
    "set_tensor_2d": (buffer_slots.set_tensor_2d, None),
    "get_tensor_2d": (buffer_slots.get_tensor_2d, None),
    "cpy_tensor": (buffer_slots.cpy_tensor, False),
    "clear": (buffer_slots.clear, None),
}
_BACKEND: dict[str, tuple[Any, Any]] = {
    "get_name": (device_slots.backend_name, None),
    "free": (backend_slots.free, None),
    "set_tensor_async": (backend_slots.set_tensor_async, None),
    "get_tensor_async": (backend_slots.get_tensor_async, None),
    "cpy_tensor_async": (backend_slots.cpy_tensor_async, False),
    "synchronize": (backend_slots.synchronize, None),
    "graph_compute": (backend_slots.graph_compute, layouts.STATUS_FAILED),
    "event_record": (backend_slots.event_record, None),
    "event_wait": (backend_slots.event_wait, None),
}
_DEVICE: dict[str, tuple[Any, Any]] = {
    "get_name": (device_slots.get_name, None),
    "get_description": (device_slots.get_description, None),
    "get_memory": (device_slots.get_memory, None),
    "get_type": (device_slots.get_type, layouts.DEVICE_TYPE_GPU),
    "get_props": (device_slots.get_props, None),
    "init_backend": (device_slots.init_backend, None),
    "get_buffer_type": (device_slots.get_buffer_type, None),
    "supports_op": (device_slots.supports_op, False),
    "supports_buft": (device_slots.supports_buft, False),
    "event_new": (backend_slots.event_new, None),
    "event_free": (backend_slots.event_free, None),
    "event_synchronize": (backend_slots.event_synchronize, None),
}


@dataclass(slots=True)
class DeviceStructs:
    """What the engine knows of one device; lives as long as the process."""

    device: ctypes.Structure
    buffer_type: ctypes.Structure


class Plugin:
    """The registry entry `RPC` in the loaded engine."""

    def __init__(self) -> None:
        self.engine = engine.load()
        self.ggml = self.engine.ggml
        self._layouts = self.engine.layouts
        self._guid = callbacks.keep(ctypes.create_string_buffer(_GUID, 16))
        self._devices: list[RemoteDevice] = []
        self._entered = False
        self._hidden = False
        self._recorded = False
        self._wrap_all()
        self._native_base, self._native_supports_op = self._natives()
        self._registry = self._new_registry()

    @property
    def registry(self) -> int:
        """Address of the ggml_backend_reg."""
        return ctypes.addressof(self._registry)

    def follow_recording(self) -> None:
        """Let structs made from now on have callbacks that are recorded, or not, as is wanted."""
        if self._recorded != (head.recording is not None):
            self._wrap_all()

    def _wrap_all(self) -> None:
        self._recorded = head.recording is not None
        self._slots = {
            "buffer_type": self._wrap("buffer_type", _BUFFER_TYPE),
            "buffer": self._wrap("buffer", _BUFFER),
            "backend": self._wrap("backend", _BACKEND),
            "device": self._wrap("device", _DEVICE),
        }
        self._pads = self._wrap("buffer_type", {"get_alloc_size": (buffer_slots.get_alloc_size, 0)})
        self._init = self._wrap(
            "buffer", {"init_tensor": (buffer_slots.init_tensor, layouts.STATUS_FAILED)}
        )
        self._watched = self._wrap(
            "buffer_type", {"get_alloc_size": (buffer_slots.get_watched_size, 0)}
        )
        self._is_host = self._wrap("buffer_type", {"is_host": (buffer_slots.is_host, False)})
        self._slow_base = self._wrap("buffer", {"get_base": (buffer_slots.get_base, None)})

    def _wrap(self, interface: str, table: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
        slots = self._layouts.interface(interface)
        return {
            slot: callbacks.wrap(slots[slot], function, failure, f"{interface}.{slot}")
            for slot, (function, failure) in table.items()
        }

    def _natives(self) -> tuple[int, int]:
        """The CPU buffer's get_base and the CPU device's supports_op, as addresses."""
        probe = self.ggml.buft_alloc_buffer(self.ggml.cpu_buffer_type(), 64)
        base = self._layouts.Buffer.from_address(probe)
        get_base = layouts.slot_address(base.iface, "get_base")
        self.ggml.buffer_free(probe)
        cpu = self._layouts.Device.from_address(self.ggml.dev_by_name(b"CPU"))
        return get_base, layouts.slot_address(cpu.iface, "supports_op")

    def _new_registry(self) -> ctypes.Structure:
        name = callbacks.keep(ctypes.create_string_buffer(REGISTRY_NAME.encode()))
        slots = self._layouts.interface("reg")
        functions: dict[str, Callable[..., Any]] = {
            "get_name": lambda reg: ctypes.addressof(name),
            "get_device_count": lambda reg: 0 if self._hidden else len(self._devices),
            "get_device": lambda reg, index: self._devices[index].handle,
        }
        registry = self._layouts.Reg()
        registry.api_version = self.engine.api_version
        for slot, function in functions.items():
            callback = callbacks.wrap(slots[slot], function, 0, f"reg.{slot}")
            layouts.set_slot(registry.iface, slot, callback)
        registry.context = None
        callbacks.keep(registry)
        result: ctypes.Structure = registry
        return result

    def new_device(self, device: RemoteDevice) -> DeviceStructs:
        """The structs of a new device, which is entered in the registry."""
        struct = self._layouts.Device()
        buffer_type = self._layouts.BufferType()
        for slot, callback in self._slots["device"].items():
            layouts.set_slot(struct.iface, slot, callback)
        if device.link.info.type == _CPU_DEVICE:
            # the same kernels decide for themselves, without Python
            layouts.set_slot(struct.iface, "supports_op", self._native_supports_op)
        struct.reg = self.registry
        struct.context = None
        for slot, callback in self._slots["buffer_type"].items():
            layouts.set_slot(buffer_type.iface, slot, callback)
        if device.link.info.pads:
            layouts.set_slot(buffer_type.iface, "get_alloc_size", self._pads["get_alloc_size"])
        buffer_type.device = ctypes.addressof(struct)
        buffer_type.context = None
        callbacks.owners[ctypes.addressof(struct)] = device
        callbacks.owners[ctypes.addressof(buffer_type)] = device
        self._devices.append(device)
        structs = DeviceStructs(struct, buffer_type)
        callbacks.keep(structs)
        return structs

    def publish(self, devices: Sequence[RemoteDevice]) -> None:
        """Enter devices in the engine's own list, from which it takes those that nobody names.

        They stay there for as long as the process lives; `forget` makes them be passed over.
        """
        if not self._entered:
            self._entered = True
            # the registry alone: the devices of clusters are nobody else's
            self._hidden = True
            self.ggml.backend_register(self.registry)
            self._hidden = False
        for device in devices:
            device.published = True
            self.ggml.device_register(device.handle)

    def release(self) -> None:
        """Before the interpreter ends: what others may free afterwards needs no Python for it.

        Only for published devices, which must be closed: nothing is computed on them any more.
        """
        text = layouts.slot_address(
            self._layouts.BufferType.from_address(self.ggml.cpu_buffer_type()).iface, "get_name"
        )
        nothing = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value or 0
        published = {device for device in callbacks.owners.values() if device.published}
        for device in published:
            struct = self._layouts.Device.from_address(device.handle)
            layouts.set_slot(struct.iface, "event_free", nothing)
            layouts.set_slot(struct.iface, "event_synchronize", nothing)
            buffer_type = self._layouts.BufferType.from_address(device.buffer_type)
            layouts.set_slot(buffer_type.iface, "get_name", text)
        for pointer, buffer in buffer_slots.buffers.items():
            if buffer.device in published:
                iface = self._layouts.Buffer.from_address(pointer).iface
                layouts.set_slot(iface, "free_buffer", 0)
        for backend in backend_slots.backends.values():
            if backend.device in published:
                layouts.set_slot(backend.struct.iface, "free", nothing)
                layouts.set_slot(backend.struct.iface, "synchronize", 0)
        callbacks.keep_for_ever(backend_slots.backends, backend_slots.events)

    def ask_is_host(self, buft: int, asked: bool) -> None:
        """Whether the engine asks a buffer type if it is the host's memory, or knows it is not."""
        struct = self._layouts.BufferType.from_address(buft)
        layouts.set_slot(struct.iface, "is_host", self._is_host["is_host"] if asked else 0)

    def watch_sizes(self, buft: int, watched: bool, pads: bool) -> None:
        """Whether the engine's questions for tensors' sizes are watched."""
        usual = self._pads["get_alloc_size"] if pads else 0
        struct = self._layouts.BufferType.from_address(buft)
        wanted = self._watched["get_alloc_size"] if watched else usual
        layouts.set_slot(struct.iface, "get_alloc_size", wanted)

    def new_buffer(self, buft: int, allocation: RemoteAllocation) -> int:
        """A buffer struct, which the engine will delete after free_buffer."""
        iface = self._layouts.BufferInterface()
        for slot, callback in self._slots["buffer"].items():
            layouts.set_slot(iface, slot, callback)
        native = allocation.base % layouts.CPU_ALIGNMENT == 0
        base = self._native_base if native else self._slow_base["get_base"]
        layouts.set_slot(iface, "get_base", base)
        if callbacks.owners[buft].link.info.pads:
            layouts.set_slot(iface, "init_tensor", self._init["init_tensor"])
        return self.ggml.buffer_init(buft, iface, allocation.base, allocation.size)

    def new_backend(self, device: int) -> Any:
        """A backend struct; the caller keeps it until the engine frees it."""
        struct = self._layouts.Backend()
        struct.guid = ctypes.addressof(self._guid)
        for slot, callback in self._slots["backend"].items():
            layouts.set_slot(struct.iface, slot, callback)
        struct.device = device
        struct.context = None
        return struct

    def new_event(self, device: int) -> ctypes.Structure:
        """An event struct; the caller keeps it until the engine frees it."""
        struct = layouts.Event()
        struct.device = device
        struct.context = None
        return struct

    def adopt(self, device: RemoteDevice) -> None:
        """Let callbacks find a device that was forgotten. It is not in the registry's list."""
        for pointer in (device.handle, device.buffer_type):
            callbacks.owners[pointer] = device

    def forget(self, device: RemoteDevice) -> None:
        """Take a closed device out of the registry; its structs stay, the rest can go."""
        if device in self._devices:
            self._devices.remove(device)
        device.withdrawn = device.published
        held = any(buffer.device is device for buffer in list(buffer_slots.buffers.values()))
        if not (held or device.published):
            # nothing that the engine still holds can lead here any more
            for pointer in (device.handle, device.buffer_type):
                callbacks.owners.pop(pointer, None)


_lock = threading.Lock()
_plugin: Plugin | None = None


def load() -> Plugin:
    """The process's plug-in; raises EngineNotFound or AbiMismatch."""
    global _plugin
    with _lock:
        if _plugin is None:
            _plugin = Plugin()
        _plugin.follow_recording()
        return _plugin


def publish(devices: Sequence[RemoteDevice]) -> None:
    """See `Plugin.publish`."""
    load().publish(devices)


def release() -> None:
    """See `Plugin.release`."""
    load().release()
