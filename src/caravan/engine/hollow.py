"""A GGUF file without its data, as a C stream that the engine's own loader reads.

The stream has the size of the whole file, but only its header can be read: whoever seeks beyond
that stands at the end, where the loader (llama_file::read_raw_unsafe) finds nothing left to read
and leaves its memory as it was. A model of any size then loads at once, if the loader takes all
buffers for the host's: for others it makes staging buffers, at half a second for each GB. Needs a
libc with fopencookie.

llama_model_init_from_user, made for models without files, will not do: it makes up every tensor
that a model may have, such as biases and scales of all matrices, so the graphs are not the model's.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from caravan.engine.library import Engine
from caravan.errors import ModelError

_P = ctypes.c_void_p
_I64 = ctypes.c_int64
_SIZE = ctypes.c_size_t

_READ = ctypes.CFUNCTYPE(ctypes.c_ssize_t, _P, _P, _SIZE)
_SEEK = ctypes.CFUNCTYPE(ctypes.c_int, _P, ctypes.POINTER(_I64), ctypes.c_int)


class _Functions(ctypes.Structure):
    """cookie_io_functions_t."""

    _fields_ = [("read", _READ), ("write", _P), ("seek", _SEEK), ("close", _P)]


class _Hollow:
    """The stream's functions, which C calls: they touch nothing that could fail."""

    def __init__(self, header: bytes, size: int) -> None:
        self._header = header
        self._size = size
        self._at = 0

    def read(self, cookie: int | None, target: int, size: int) -> int:
        part = self._header[self._at : self._at + size]
        ctypes.memmove(target, part, len(part))
        self._at += len(part)
        return len(part)

    def seek(self, cookie: int | None, offset: Any, whence: int) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = base + offset[0]
        if self._at > len(self._header):
            self._at = self._size
        offset[0] = self._at
        return 0


@contextmanager
def hollow_file(header: bytes, size: int) -> Iterator[int]:
    """A FILE of `size` bytes that begins with `header`, open inside the context.

    `header` must end before the data begins, by one byte of padding or more.

    Raises ModelError where the C library cannot make one.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "fopencookie"):
        raise ModelError("models without weights need a C library with fopencookie, as on Linux")
    opener, closer = libc.fopencookie, libc.fclose
    opener.restype, opener.argtypes = _P, (_P, ctypes.c_char_p, _Functions)
    closer.argtypes = (_P,)
    hollow = _Hollow(header, size)
    functions = _Functions(read=_READ(hollow.read), seek=_SEEK(hollow.seek))
    stream = opener(None, b"rb", functions)
    if not stream:
        raise ModelError("no memory for a stream")
    try:
        yield stream
    finally:
        closer(stream)
        del functions


def load_hollow(engine: Engine, header: bytes, size: int, params: Any) -> int:
    """A llama_model of a file that is `header` and no data; 0 when the engine refuses it.

    Of `params` (llama_model_params) the way of reading is changed: nothing is mapped or checked.
    """
    load = engine.find("llama_model_load_from_file_ptr")
    load.restype, load.argtypes = _P, (_P, type(params))
    params.load_mode = params.lazy_mode = 0
    params.check_tensors = False
    with hollow_file(header, size) as stream:
        return int(load(stream, params) or 0)
