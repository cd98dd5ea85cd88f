"""Thin calls of ggml's C functions: one attribute a function, typed once in the table below.

Pointers are ints (None for NULL on return). ctypes drops the GIL around each call. Nothing is
checked here; the callers know what each result means.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from caravan.engine import layouts

_P = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int
_BOOL = ctypes.c_bool
_TEXT = ctypes.c_char_p

Find = Callable[[str], Any]

# attribute: (result, argument types); the C name is "ggml_" + attribute unless given third
_TABLE: dict[str, tuple[Any, ...]] = {
    "version": (_TEXT, ()),
    "commit": (_TEXT, ()),
    "op_name": (_TEXT, (_INT,)),
    "type_name": (_TEXT, (_INT,)),
    "type_size": (_SIZE, (_INT,)),
    "blck_size": (ctypes.c_int64, (_INT,)),
    "is_quantized": (_BOOL, (_INT,)),
    "nbytes": (_SIZE, (_P,)),
    "is_contiguous": (_BOOL, (_P,)),
    "fp32_to_fp16_row": (None, (_P, _P, ctypes.c_int64)),
    "fp16_to_fp32_row": (None, (_P, _P, ctypes.c_int64)),
    "fp32_to_bf16_row": (None, (_P, _P, ctypes.c_int64)),
    "bf16_to_fp32_row": (None, (_P, _P, ctypes.c_int64)),
    "tensor_overhead": (_SIZE, ()),
    "init": (_P, (layouts.InitParams,)),
    "free": (None, (_P,)),
    "new_tensor_4d": (_P, (_P, _INT, *[ctypes.c_int64] * 4)),
    "new_graph": (_P, (_P,)),
    "build_forward_expand": (None, (_P, _P)),
    "mul_mat": (_P, (_P, _P, _P)),
    "add": (_P, (_P, _P, _P)),
    "set_abort_callback": (_P, (_P,)),
    "log_set": (None, (_P, _P)),
    "backend_register": (None, (_P,)),
    "device_register": (None, (_P,), "ggml_backend_device_register"),
    "backend_load_all": (None, ()),
    "backend_load_all_from_path": (None, (_TEXT,)),
    "reg_by_name": (_P, (_TEXT,), "ggml_backend_reg_by_name"),
    "reg_get_proc_address": (_P, (_P, _TEXT), "ggml_backend_reg_get_proc_address"),
    "reg_name": (_TEXT, (_P,), "ggml_backend_reg_name"),
    "reg_dev_count": (_SIZE, (_P,), "ggml_backend_reg_dev_count"),
    "reg_dev_get": (_P, (_P, _SIZE), "ggml_backend_reg_dev_get"),
    "dev_count": (_SIZE, (), "ggml_backend_dev_count"),
    "dev_get": (_P, (_SIZE,), "ggml_backend_dev_get"),
    "dev_by_name": (_P, (_TEXT,), "ggml_backend_dev_by_name"),
    "dev_name": (_TEXT, (_P,), "ggml_backend_dev_name"),
    "dev_description": (_TEXT, (_P,), "ggml_backend_dev_description"),
    "dev_memory_raw": (None, (_P, _P, _P), "ggml_backend_dev_memory"),
    "dev_type": (_INT, (_P,), "ggml_backend_dev_type"),
    "dev_get_props": (None, (_P, _P), "ggml_backend_dev_get_props"),
    "dev_init": (_P, (_P, _P), "ggml_backend_dev_init"),
    "dev_buffer_type": (_P, (_P,), "ggml_backend_dev_buffer_type"),
    "dev_host_buffer_type": (_P, (_P,), "ggml_backend_dev_host_buffer_type"),
    "dev_supports_op": (_BOOL, (_P, _P), "ggml_backend_dev_supports_op"),
    "dev_supports_buft": (_BOOL, (_P, _P), "ggml_backend_dev_supports_buft"),
    "dev_backend_reg": (_P, (_P,), "ggml_backend_dev_backend_reg"),
    "event_new": (_P, (_P,), "ggml_backend_event_new"),
    "event_free": (None, (_P,), "ggml_backend_event_free"),
    "event_record": (None, (_P, _P), "ggml_backend_event_record"),
    "event_wait": (None, (_P, _P), "ggml_backend_event_wait"),
    "event_synchronize": (None, (_P,), "ggml_backend_event_synchronize"),
    "buft_name": (_TEXT, (_P,), "ggml_backend_buft_name"),
    "buft_alloc_buffer": (_P, (_P, _SIZE), "ggml_backend_buft_alloc_buffer"),
    "buft_get_alignment": (_SIZE, (_P,), "ggml_backend_buft_get_alignment"),
    "buft_get_max_size": (_SIZE, (_P,), "ggml_backend_buft_get_max_size"),
    "buft_get_alloc_size": (_SIZE, (_P, _P), "ggml_backend_buft_get_alloc_size"),
    "buft_is_host": (_BOOL, (_P,), "ggml_backend_buft_is_host"),
    "buft_get_device": (_P, (_P,), "ggml_backend_buft_get_device"),
    "buffer_get_base": (_P, (_P,), "ggml_backend_buffer_get_base"),
    "buffer_get_size": (_SIZE, (_P,), "ggml_backend_buffer_get_size"),
    "buffer_clear": (None, (_P, ctypes.c_uint8), "ggml_backend_buffer_clear"),
    "buffer_free": (None, (_P,), "ggml_backend_buffer_free"),
    "buffer_init_tensor": (_INT, (_P, _P), "ggml_backend_buffer_init_tensor"),
    "buffer_is_host": (_BOOL, (_P,), "ggml_backend_buffer_is_host"),
    "buffer_get_usage": (_INT, (_P,), "ggml_backend_buffer_get_usage"),
    "buffer_reset": (None, (_P,), "ggml_backend_buffer_reset"),
    "cpu_buffer_type": (_P, (), "ggml_backend_cpu_buffer_type"),
    "backend_name": (_TEXT, (_P,), "ggml_backend_name"),
    "backend_free": (None, (_P,), "ggml_backend_free"),
    "backend_synchronize": (None, (_P,), "ggml_backend_synchronize"),
    "backend_graph_compute": (_INT, (_P, _P), "ggml_backend_graph_compute"),
    "backend_graph_compute_async": (_INT, (_P, _P), "ggml_backend_graph_compute_async"),
    "backend_tensor_set": (None, (_P, _P, _SIZE, _SIZE), "ggml_backend_tensor_set"),
    "backend_tensor_get": (None, (_P, _P, _SIZE, _SIZE), "ggml_backend_tensor_get"),
    "backend_tensor_memset": (
        None,
        (_P, ctypes.c_uint8, _SIZE, _SIZE),
        "ggml_backend_tensor_memset",
    ),
    "backend_tensor_set_async": (None, (_P, _P, _P, _SIZE, _SIZE), "ggml_backend_tensor_set_async"),
    "backend_tensor_get_async": (None, (_P, _P, _P, _SIZE, _SIZE), "ggml_backend_tensor_get_async"),
    "backend_tensor_copy": (None, (_P, _P), "ggml_backend_tensor_copy"),
}


class Ggml:
    """ggml's functions; see `_TABLE`. Raises EngineNotFound (from `find`) when one is missing."""

    def __init__(self, find: Find) -> None:
        for attribute, row in _TABLE.items():
            symbol = row[2] if len(row) > 2 else f"ggml_{attribute}"
            function = find(symbol)
            function.restype, function.argtypes = row[0], row[1]
            setattr(self, attribute, function)
        self._buffer_init = find("ggml_backend_buffer_init")

    def __getattr__(self, name: str) -> Any:  # only for names that the table does not have
        raise AttributeError(f"ggml has no thin call {name!r}")

    def use(self, tables: layouts.Layouts) -> None:
        """Type what depends on the backend API version."""
        self._buffer_init.restype = _P
        self._buffer_init.argtypes = (_P, tables.BufferInterface, _P, _SIZE)

    def buffer_init(self, buft: int, iface: ctypes.Structure, context: int, size: int) -> int:
        """A ggml_backend_buffer, which ggml will delete after its free_buffer."""
        return int(self._buffer_init(buft, iface, context, size))

    def cpu_set_n_threads(self, backend: int, threads: int) -> None:
        """Threads of a CPU backend, through the registry: also where CPU is a plug-in itself."""
        address = self.reg_get_proc_address(self.reg_by_name(b"CPU"), b"ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, _P, _INT)(address)(backend, threads)

    def devices(self) -> list[int]:
        """All that the library lists, in its order."""
        return [self.dev_get(i) for i in range(self.dev_count())]

    def dev_memory(self, device: int) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = _SIZE(), _SIZE()
        self.dev_memory_raw(device, ctypes.addressof(free), ctypes.addressof(total))
        return free.value, total.value
