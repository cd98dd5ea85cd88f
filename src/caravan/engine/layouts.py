"""ggml's structs and plug-in interfaces as data, per backend API version.

The plug-in structs are internal to ggml and change between releases: the tables below are the only
place that knows them, and `verify` checks them against the loaded library. Sources: ggml.h,
ggml-impl.h and ggml-backend-impl.h of ggml 0.25.3 (API 2) and 0.26.0 (API 3), 64-bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from caravan.errors import AbiMismatch
from caravan.models.formats import TYPE_SIZES

SUPPORTED_APIS = (2, 3)

MAX_DIMS = 4
MAX_SRC = 10
CPU_ALIGNMENT = 32

STATUS_ALLOC_FAILED = -2
STATUS_FAILED = -1
STATUS_SUCCESS = 0
STATUS_ABORTED = 1

DEVICE_TYPE_CPU = 0
DEVICE_TYPE_GPU = 1
DEVICE_TYPE_IGPU = 2
DEVICE_TYPE_ACCEL = 3

USAGE_ANY = 0
USAGE_WEIGHTS = 1
USAGE_COMPUTE = 2

FLAG_INPUT = 1
FLAG_OUTPUT = 2
FLAG_COMPUTE = 16

# structs that are read and written as arrays

GGML_TENSOR = np.dtype(
    {
        "names": [
            "type",
            "buffer",
            "ne",
            "nb",
            "op",
            "op_params",
            "flags",
            "src",
            "view_src",
            "view_offs",
            "data",
            "name",
            "extra",
        ],
        "formats": [
            "<i4",
            "<u8",
            ("<i8", 4),
            ("<u8", 4),
            "<i4",
            ("<i4", 16),
            "<i4",
            ("<u8", 10),
            "<u8",
            "<u8",
            "<u8",
            "S64",
            "<u8",
        ],
        "offsets": [0, 8, 16, 48, 80, 84, 148, 152, 232, 240, 248, 256, 320],
        "itemsize": 336,
    }
)

CGRAPH = np.dtype(
    {
        "names": [
            "size",
            "n_nodes",
            "n_leafs",
            "nodes",
            "grads",
            "grad_accs",
            "leafs",
            "use_counts",
            "hash_size",
            "hash_used",
            "hash_keys",
            "order",
            "uid",
        ],
        "formats": ["<i4", "<i4", "<i4", *["<u8"] * 8, "<i4", "<u8"],
        "offsets": [0, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88],
        "itemsize": 96,
    }
)


def _offsets(dtype: np.dtype[Any]) -> dict[str, int]:
    assert dtype.fields is not None
    return {name: field[1] for name, field in dtype.fields.items()}


TENSOR_AT = _offsets(GGML_TENSOR)
CGRAPH_AT = _offsets(CGRAPH)

# block size and bytes by type number; block size 0: no such type

TYPE_COUNT = 43
TYPE_BLOCK = np.zeros(TYPE_COUNT, np.int64)
TYPE_BYTES = np.zeros(TYPE_COUNT, np.int64)
for _number, (_block, _bytes) in TYPE_SIZES.items():
    TYPE_BLOCK[_number], TYPE_BYTES[_number] = _block, _bytes

TYPE_NUMBERS = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20,
    "i32": 26, "bf16": 30,
}  # fmt: skip

OP_NAMES = (
    "NONE", "DUP", "ADD", "ADD_ID", "ADD1", "ACC", "SUB", "MUL", "DIV", "SQR", "SQRT", "LOG",
    "SIN", "COS", "SUM", "SUM_ROWS", "CUMSUM", "MEAN", "ARGMAX", "COUNT_EQUAL", "REPEAT",
    "REPEAT_BACK", "CONCAT", "SILU_BACK", "NORM", "RMS_NORM", "RMS_NORM_BACK", "GROUP_NORM",
    "L2_NORM", "MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "SCALE", "SET", "CPY", "CONT", "RESHAPE",
    "VIEW", "PERMUTE", "TRANSPOSE", "GET_ROWS", "GET_ROWS_BACK", "SET_ROWS", "DIAG",
    "DIAG_MASK_INF", "DIAG_MASK_ZERO", "SOFT_MAX", "SOFT_MAX_BACK", "ROPE", "ROPE_BACK", "CLAMP",
    "CONV_TRANSPOSE_1D", "IM2COL", "IM2COL_BACK", "IM2COL_3D", "COL2IM_1D", "CONV_2D", "CONV_3D",
    "CONV_2D_DW", "CONV_TRANSPOSE_2D", "POOL_1D", "POOL_2D", "POOL_2D_BACK", "UPSCALE", "PAD",
    "PAD_REFLECT_1D", "ROLL", "ARANGE", "TIMESTEP_EMBEDDING", "ARGSORT", "TOP_K", "LEAKY_RELU",
    "TRI", "FILL", "FLASH_ATTN_EXT", "FLASH_ATTN_BACK", "SSM_CONV", "SSM_SCAN", "WIN_PART",
    "WIN_UNPART", "GET_REL_POS", "ADD_REL_POS", "RWKV_WKV6", "GATED_LINEAR_ATTN", "RWKV_WKV7",
    "SOLVE_TRI", "GATED_DELTA_NET", "LIGHTNING_INDEXER", "DSV4_HC_COMB", "DSV4_HC_PRE",
    "DSV4_HC_POST", "UNARY", "MAP_CUSTOM1", "MAP_CUSTOM2", "MAP_CUSTOM3", "CUSTOM",
    "CROSS_ENTROPY_LOSS", "CROSS_ENTROPY_LOSS_BACK", "OPT_STEP_ADAMW", "OPT_STEP_SGD", "GLU",
)  # fmt: skip

# plug-in interfaces: slot -> prototype, in the order of the struct

_P = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int
_BOOL = ctypes.c_bool
_TEXT = ctypes.c_char_p
_U8 = ctypes.c_uint8


def _fn(result: Any, *args: Any) -> Any:
    return ctypes.CFUNCTYPE(result, *args)


_OPAQUE = _fn(None, _P)

_2D = (_P, _P, _SIZE, _SIZE, _SIZE, _SIZE, _SIZE)

BUFFER_TYPE_I: dict[int, dict[str, Any]] = {
    2: {
        "get_name": _fn(_P, _P),
        "alloc_buffer": _fn(_P, _P, _SIZE),
        "get_alignment": _fn(_SIZE, _P),
        "get_max_size": _fn(_SIZE, _P),
        "get_alloc_size": _fn(_SIZE, _P, _P),
        "is_host": _fn(_BOOL, _P),
    },
    3: {
        "get_name": _fn(_P, _P),
        "alloc_buffer": _fn(_P, _P, _SIZE),
        "alloc_buffer_n": _fn(_P, _P, _P, _INT),
        "get_alignment": _fn(_SIZE, _P),
        "get_max_size": _fn(_SIZE, _P),
        "get_alloc_size": _fn(_SIZE, _P, _P),
        "get_alloc_size_n": _fn(_SIZE, _P, _P, _INT),
        "is_host": _fn(_BOOL, _P),
    },
}

BUFFER_I: dict[str, Any] = {
    "free_buffer": _fn(None, _P),
    "get_base": _fn(_P, _P),
    "init_tensor": _fn(_INT, _P, _P),
    "memset_tensor": _fn(None, _P, _P, _U8, _SIZE, _SIZE),
    "set_tensor": _fn(None, _P, _P, _P, _SIZE, _SIZE),
    "get_tensor": _fn(None, _P, _P, _P, _SIZE, _SIZE),
    "set_tensor_2d": _fn(None, _P, *_2D),
    "get_tensor_2d": _fn(None, _P, *_2D),
    "cpy_tensor": _fn(_BOOL, _P, _P, _P),
    "clear": _fn(None, _P, _U8),
    "reset": _fn(None, _P),
}

BACKEND_I: dict[str, Any] = {
    "get_name": _fn(_P, _P),
    "free": _fn(None, _P),
    "set_tensor_async": _fn(None, _P, _P, _P, _SIZE, _SIZE),
    "get_tensor_async": _fn(None, _P, _P, _P, _SIZE, _SIZE),
    "set_tensor_2d_async": _fn(None, _P, *_2D),
    "get_tensor_2d_async": _fn(None, _P, *_2D),
    "cpy_tensor_async": _fn(_BOOL, _P, _P, _P, _P),
    "synchronize": _fn(None, _P),
    "graph_plan_create": _OPAQUE,
    "graph_plan_free": _OPAQUE,
    "graph_plan_update": _OPAQUE,
    "graph_plan_compute": _OPAQUE,
    "graph_compute": _fn(_INT, _P, _P),
    "event_record": _fn(None, _P, _P),
    "event_wait": _fn(None, _P, _P),
    "graph_optimize": _OPAQUE,
}

DEVICE_I: dict[str, Any] = {
    "get_name": _fn(_P, _P),
    "get_description": _fn(_P, _P),
    "get_memory": _fn(None, _P, _P, _P),
    "get_type": _fn(_INT, _P),
    "get_props": _fn(None, _P, _P),
    "init_backend": _fn(_P, _P, _P),
    "get_buffer_type": _fn(_P, _P),
    "get_host_buffer_type": _fn(_P, _P),
    "buffer_from_host_ptr": _fn(_P, _P, _P, _SIZE, _SIZE),
    "supports_op": _fn(_BOOL, _P, _P),
    "supports_buft": _fn(_BOOL, _P, _P),
    "offload_op": _fn(_BOOL, _P, _P),
    "event_new": _fn(_P, _P),
    "event_free": _fn(None, _P, _P),
    "event_synchronize": _fn(None, _P, _P),
}

REG_I: dict[str, Any] = {
    "get_name": _fn(_P, _P),
    "get_device_count": _fn(_SIZE, _P),
    "get_device": _fn(_P, _P, _SIZE),
    "get_proc_address": _fn(_P, _P, _TEXT),
}


class DeviceProps(ctypes.Structure):
    """ggml_backend_dev_props."""

    _fields_ = [
        ("name", _P),
        ("description", _P),
        ("memory_free", _SIZE),
        ("memory_total", _SIZE),
        ("type", _INT),
        ("device_id", _P),
        ("caps_async", _BOOL),
        ("caps_host_buffer", _BOOL),
        ("caps_buffer_from_host_ptr", _BOOL),
        ("caps_events", _BOOL),
        ("caps_mmap_support", _BOOL),
    ]


class InitParams(ctypes.Structure):
    """ggml_init_params, passed by value."""

    _fields_ = [("mem_size", _SIZE), ("mem_buffer", _P), ("no_alloc", _BOOL)]


class Event(ctypes.Structure):
    """ggml_backend_event."""

    _fields_ = [("device", _P), ("context", _P)]


def _interface(name: str, slots: dict[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": [(slot, _P) for slot in slots]})


def _struct(name: str, *fields: tuple[str, Any]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields)})


@dataclass(frozen=True, slots=True)
class Layouts:
    """The plug-in structs of one backend API version.

    Attributes:
        api: the version.
        slots: per interface (buffer_type, buffer, backend, device, reg) its slots' prototypes.
        BufferType, Buffer, …: ctypes structures; `iface` holds the slots as addresses.
    """

    api: int
    slots: dict[str, dict[str, Any]]
    BufferType: Any
    BufferInterface: Any
    Buffer: Any
    Backend: Any
    Device: Any
    Reg: Any

    def interface(self, name: str) -> dict[str, Any]:
        """Prototypes by slot."""
        return self.slots[name]


_SIZES = {"Buffer": 120, "Backend": 152, "Device": 136, "Reg": 48}
BUFFER_USAGE_AT = 112


def for_api(api: int) -> Layouts:
    """The layouts of a backend API version; raises AbiMismatch for one that is not known."""
    if api not in SUPPORTED_APIS:
        known = " and ".join(str(number) for number in SUPPORTED_APIS)
        raise AbiMismatch(
            f"the engine has ggml backend API version {api}; this version of Caravan knows {known}"
        )
    slots = {
        "buffer_type": BUFFER_TYPE_I[api],
        "buffer": BUFFER_I,
        "backend": BACKEND_I,
        "device": DEVICE_I,
        "reg": REG_I,
    }
    iface = {name: _interface(f"{name}_i", table) for name, table in slots.items()}
    layouts = Layouts(
        api=api,
        slots=slots,
        BufferType=_struct(
            "BufferType", ("iface", iface["buffer_type"]), ("device", _P), ("context", _P)
        ),
        BufferInterface=iface["buffer"],
        Buffer=_struct(
            "Buffer",
            ("iface", iface["buffer"]),
            ("buft", _P),
            ("context", _P),
            ("size", _SIZE),
            ("usage", _INT),
        ),
        Backend=_struct(
            "Backend", ("guid", _P), ("iface", iface["backend"]), ("device", _P), ("context", _P)
        ),
        Device=_struct("Device", ("iface", iface["device"]), ("reg", _P), ("context", _P)),
        Reg=_struct("Reg", ("api_version", _INT), ("iface", iface["reg"]), ("context", _P)),
    )
    sizes = {name: ctypes.sizeof(getattr(layouts, name)) for name in _SIZES}
    if sizes != _SIZES or layouts.Buffer.usage.offset != BUFFER_USAGE_AT:
        raise AbiMismatch(f"plug-in structs have sizes {sizes} on this platform, not {_SIZES}")
    return layouts


def set_slot(iface: ctypes.Structure, slot: str, function: Any) -> None:
    """Put a CFUNCTYPE object or an address into a slot; the caller keeps the object alive."""
    address = function if isinstance(function, int) else ctypes.cast(function, _P).value
    setattr(iface, slot, address)


def slot_address(iface: ctypes.Structure, slot: str) -> int:
    """The address in a slot, 0 when it is NULL."""
    return getattr(iface, slot) or 0
