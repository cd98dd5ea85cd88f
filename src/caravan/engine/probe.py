"""Dummy plug-in objects whose slots only note that they were called.

`verify` hands them to the library's public functions: each must reach exactly the slot that the
layouts put there. Knows the tables of slots and public functions, not what a mismatch means.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from caravan.engine import layouts

# Everything is passed and returned as one machine word; a callee that takes fewer or narrower
# arguments ignores the rest.
_WORD = ctypes.c_size_t
_TRACE = ctypes.CFUNCTYPE(_WORD, ctypes.c_void_p)

# slot, the public function that must reach it, and that function's arguments: names of things of
# the probe, or numbers. The harmless ones come first, in case the layouts are wrong.
STEPS: tuple[tuple[str, str, tuple[str | int, ...]], ...] = (
    ("reg.get_name", "ggml_backend_reg_name", ("reg",)),
    ("reg.get_device_count", "ggml_backend_reg_dev_count", ("reg",)),
    ("reg.get_device", "ggml_backend_reg_dev_get", ("reg", 0)),
    ("reg.get_proc_address", "ggml_backend_reg_get_proc_address", ("reg", "text")),
    ("device.get_name", "ggml_backend_dev_name", ("device",)),
    ("device.get_description", "ggml_backend_dev_description", ("device",)),
    ("device.get_memory", "ggml_backend_dev_memory", ("device", "text", "text")),
    ("device.get_type", "ggml_backend_dev_type", ("device",)),
    ("device.get_props", "ggml_backend_dev_get_props", ("device", "scratch")),
    ("device.init_backend", "ggml_backend_dev_init", ("device", 0)),
    ("device.get_buffer_type", "ggml_backend_dev_buffer_type", ("device",)),
    ("device.get_host_buffer_type", "ggml_backend_dev_host_buffer_type", ("device",)),
    (
        "device.buffer_from_host_ptr",
        "ggml_backend_dev_buffer_from_host_ptr",
        ("device", "text", 8, 8),
    ),
    ("device.supports_op", "ggml_backend_dev_supports_op", ("device", "tensor")),
    ("device.supports_buft", "ggml_backend_dev_supports_buft", ("device", "buffer_type")),
    ("device.offload_op", "ggml_backend_dev_offload_op", ("device", "tensor")),
    ("device.event_new", "ggml_backend_event_new", ("device",)),
    ("device.event_synchronize", "ggml_backend_event_synchronize", ("event",)),
    ("device.event_free", "ggml_backend_event_free", ("event",)),
    ("buffer_type.get_name", "ggml_backend_buft_name", ("buffer_type",)),
    ("buffer_type.alloc_buffer", "ggml_backend_buft_alloc_buffer", ("buffer_type", 8)),
    ("buffer_type.alloc_buffer_n", "ggml_backend_buft_alloc_buffer_n", ("buffer_type", "text", 0)),
    ("buffer_type.get_alignment", "ggml_backend_buft_get_alignment", ("buffer_type",)),
    ("buffer_type.get_max_size", "ggml_backend_buft_get_max_size", ("buffer_type",)),
    ("buffer_type.get_alloc_size", "ggml_backend_buft_get_alloc_size", ("buffer_type", "tensor")),
    (
        "buffer_type.get_alloc_size_n",
        "ggml_backend_buft_get_alloc_size_n",
        ("buffer_type", "text", 0),
    ),
    ("buffer_type.is_host", "ggml_backend_buft_is_host", ("buffer_type",)),
    ("buffer.get_base", "ggml_backend_buffer_get_base", ("buffer",)),
    ("buffer.init_tensor", "ggml_backend_buffer_init_tensor", ("buffer", "tensor")),
    ("buffer.clear", "ggml_backend_buffer_clear", ("buffer", 0)),
    ("buffer.reset", "ggml_backend_buffer_reset", ("buffer",)),
    ("backend.get_name", "ggml_backend_name", ("backend",)),
    ("backend.synchronize", "ggml_backend_synchronize", ("backend",)),
    ("backend.graph_plan_create", "ggml_backend_graph_plan_create", ("backend", "text")),
    ("backend.graph_plan_free", "ggml_backend_graph_plan_free", ("backend", "text")),
    ("backend.graph_plan_compute", "ggml_backend_graph_plan_compute", ("backend", "text")),
    ("backend.graph_compute", "ggml_backend_graph_compute_async", ("backend", "text")),
    ("backend.event_record", "ggml_backend_event_record", ("event", "backend")),
    ("backend.event_wait", "ggml_backend_event_wait", ("backend", "event")),
)

# the same, for tensors that are in the probe's buffer
TENSOR_STEPS: tuple[tuple[str, str, tuple[str | int, ...]], ...] = (
    ("buffer.memset_tensor", "ggml_backend_tensor_memset", ("tensor", 0, 0, 8)),
    ("buffer.set_tensor", "ggml_backend_tensor_set", ("tensor", "text", 0, 8)),
    ("buffer.get_tensor", "ggml_backend_tensor_get", ("tensor", "text", 0, 8)),
    ("buffer.set_tensor_2d", "ggml_backend_tensor_set_2d", ("tensor", "text", 0, 4, 2, 8, 8)),
    ("buffer.get_tensor_2d", "ggml_backend_tensor_get_2d", ("tensor", "text", 0, 4, 2, 8, 8)),
    ("buffer.cpy_tensor", "ggml_backend_buffer_copy_tensor", ("other", "tensor")),
    (
        "backend.set_tensor_async",
        "ggml_backend_tensor_set_async",
        ("backend", "tensor", "text", 0, 8),
    ),
    (
        "backend.get_tensor_async",
        "ggml_backend_tensor_get_async",
        ("backend", "tensor", "text", 0, 8),
    ),
    (
        "backend.set_tensor_2d_async",
        "ggml_backend_tensor_set_2d_async",
        ("backend", "tensor", "text", 0, 4, 2, 8, 8),
    ),
    (
        "backend.get_tensor_2d_async",
        "ggml_backend_tensor_get_2d_async",
        ("backend", "tensor", "text", 0, 4, 2, 8, 8),
    ),
    (
        "backend.cpy_tensor_async",
        "ggml_backend_tensor_copy_async",
        ("backend", "backend", "other", "tensor"),
    ),
    ("backend.free", "ggml_backend_free", ("backend",)),
    ("buffer.free_buffer", "ggml_backend_buffer_free", ("buffer",)),
)


class Probe:
    """One object of each kind, every slot traced.

    Attributes:
        things: addresses by name, for the arguments of the steps; `tensor` and `other` are set by
            the user of the probe.
        seen: the slots that were called.
    """

    def __init__(self, find: Callable[[str], Any], tables: layouts.Layouts) -> None:
        self._find = find
        self._tables = tables
        self._traces: list[Any] = []
        self.seen: list[str] = []
        self._text = ctypes.create_string_buffer(b"\0probe", 64)
        self._scratch = ctypes.create_string_buffer(256)
        # good as text, as an address that is not NULL and, being odd, as True
        self._answer = ctypes.addressof(self._text) + 1
        self._objects = self._make()
        self.things = {name: ctypes.addressof(thing) for name, thing in self._objects.items()}
        self.things["text"] = self._answer
        self.things["scratch"] = ctypes.addressof(self._scratch)
        self.things["buffer"] = self._new_buffer()

    def _make(self) -> dict[str, ctypes.Structure]:
        tables = self._tables
        reg, device, buffer_type = tables.Reg(), tables.Device(), tables.BufferType()
        backend, event = tables.Backend(), layouts.Event()
        reg.api_version = tables.api
        device.reg = ctypes.addressof(reg)
        for thing in (buffer_type, backend, event):
            thing.device = ctypes.addressof(device)
        backend.guid = ctypes.addressof(self._text)
        made = {
            "reg": reg,
            "device": device,
            "buffer_type": buffer_type,
            "backend": backend,
        }
        for name, thing in made.items():
            self._fill(name, thing.iface)
        return {**made, "event": event}

    def _new_buffer(self) -> int:
        """By the library, which will delete it; its size has room for any answer."""
        iface = self._tables.BufferInterface()
        self._fill("buffer", iface)
        make = self._find("ggml_backend_buffer_init")
        make.restype = ctypes.c_void_p
        make.argtypes = (ctypes.c_void_p, self._tables.BufferInterface, ctypes.c_void_p, _WORD)
        return int(make(self.things["buffer_type"], iface, self._answer, 1 << 62))

    def _fill(self, name: str, iface: ctypes.Structure) -> None:
        for slot in self._tables.interface(name):
            layouts.set_slot(iface, slot, self._trace(f"{name}.{slot}"))

    def _trace(self, slot: str) -> Any:
        def note(first: int | None) -> int:
            self.seen.append(slot)
            return self._answer

        trace = _TRACE(note)
        self._traces.append(trace)
        return trace

    def slots(self) -> set[str]:
        """All slots of the layouts."""
        tables = self._tables
        return {f"{name}.{slot}" for name in tables.slots for slot in tables.interface(name)}

    def call(self, symbol: str, *arguments: str | int) -> int:
        """Call a public function; what it answers, as a number. `seen` begins anew."""
        self.seen.clear()
        function = self._find(symbol)
        function.restype = _WORD
        words = [self.things[a] if isinstance(a, str) else a for a in arguments]
        return int(function(*map(_WORD, words)))

    def written(self, symbol: str, *arguments: str | int) -> int:
        """Call a function that fills a struct, the last argument; how many bytes it touched."""
        ctypes.memset(self._scratch, 0xAA, len(self._scratch))
        self.call(symbol, *arguments, "scratch")
        return len(self._scratch.raw.rstrip(b"\xaa"))
