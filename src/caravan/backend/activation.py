"""Which tensors are activations, and so may lose digits on the wire.

Numbers that a graph has computed: not weights, not the KV cache, not inputs such as masks.
"""

from __future__ import annotations

import ctypes

from caravan.engine import layouts
from caravan.wire.dtypes import MAX_CAST

_F32 = 0
_INPUT = 1
_TYPE_AT = layouts.TENSOR_AT["type"]
_FLAGS_AT = layouts.TENSOR_AT["flags"]
_VIEW_AT = layouts.TENSOR_AT["view_src"]
_u64 = ctypes.c_uint64.from_address
_i32 = ctypes.c_int32.from_address


def is_activation(tensor: int, buffer: int, size: int) -> bool:
    """Whether the tensor at an address, `size` bytes in the buffer struct at another, is one."""
    if not buffer or not 0 < size <= 2 * MAX_CAST or _i32(tensor + _TYPE_AT).value != _F32:
        return False
    # the engine computes in buffers of this use alone, and nothing lasts there
    if _i32(buffer + layouts.BUFFER_USAGE_AT).value != layouts.USAGE_COMPUTE:
        return False
    viewed = _u64(tensor + _VIEW_AT).value or tensor
    return not (_i32(tensor + _FLAGS_AT).value | _i32(viewed + _FLAGS_AT).value) & _INPUT
