"""`RemoteTensor`: one ggml_tensor whose data lies in a remote buffer, by its address."""

from __future__ import annotations

import ctypes

import numpy as np

from caravan.backend.graph import _narrow, gather
from caravan.engine import layouts
from caravan.wire.records import EXT_TENSOR, RPC_TENSOR

DATA_AT = layouts.TENSOR_AT["data"]
BUFFER_AT = layouts.TENSOR_AT["buffer"]
_u64 = ctypes.c_uint64.from_address


class RemoteTensor:
    """See `stream.link.TensorRef`. Made and dropped inside one callback.

    Args:
        pointer: address of the struct.
        handle: of the buffer that it lies in; 0 for a tensor that has none here.
    """

    __slots__ = ("handle", "pointer")

    def __init__(self, pointer: int, handle: int) -> None:
        self.pointer = pointer
        self.handle = handle

    def address(self) -> int:
        return _u64(self.pointer + DATA_AT).value

    def base_record(self) -> bytes:
        tensors = gather([self.pointer])
        _narrow(tensors)
        row = np.zeros(1, RPC_TENSOR)
        for field in ("type", "ne", "nb", "op", "op_params", "flags", "src", "view_src"):
            row[field] = tensors[field]
        row["view_offs"] = tensors["view_offs"]
        row["name"] = tensors["name"]
        row["id"] = self.pointer
        if self.handle:
            row["buffer"] = self.handle
            row["data"] = tensors["data"]
        return row.tobytes()

    def ext_record(self) -> bytes:
        tensors = gather([self.pointer])
        row = np.zeros(1, EXT_TENSOR)
        for field in ("type", "ne", "nb", "op", "op_params", "flags", "view_offs", "name"):
            row[field] = tensors[field]
        row["src"] = -1
        row["view_src"] = -1
        if self.handle:
            row["data"] = tensors["data"]
        return row.tobytes()
