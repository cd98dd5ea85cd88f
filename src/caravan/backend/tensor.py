"""`RemoteTensor`: one ggml_tensor whose data lies in a remote buffer, by its address."""

from __future__ import annotations

import ctypes

import numpy as np

from caravan.backend.graph import _narrow, gather
from caravan.engine import layouts
from caravan.wire.records import EXT_TENSOR, RPC_TENSOR

DATA_AT = layouts.TENSOR_AT["data"]
BUFFER_AT = layouts.TENSOR_AT["buffer"]
NAME_AT = layouts.TENSOR_AT["name"]
_NAME_SIZE = 64
_u64 = ctypes.c_uint64.from_address
_string_at = ctypes.string_at


class KeptTensor:
    """See `stream.link.TensorRef`: a tensor of which the bytes were taken down.

    Args:
        place: its address.
        record: its RPC_TENSOR; empty for a link that speaks the extension.
    """

    __slots__ = ("_place", "_record")

    def __init__(self, place: int, record: bytes) -> None:
        self._place = place
        self._record = record

    def address(self) -> int:
        return self._place

    def base_record(self) -> bytes:
        return self._record

    def ext_record(self) -> bytes:
        raise NotImplementedError


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

    def name(self) -> str:
        """As the engine calls it."""
        raw = _string_at(self.pointer + NAME_AT, _NAME_SIZE)
        return raw.partition(b"\0")[0].decode("utf-8", "replace")

    def address(self) -> int:
        return _u64(self.pointer + DATA_AT).value

    def kept(self, extension: bool) -> KeptTensor:
        """It as it is now, for when the struct may be gone: for links of the one kind or the
        other."""
        return KeptTensor(self.address(), b"" if extension else self.base_record())

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
