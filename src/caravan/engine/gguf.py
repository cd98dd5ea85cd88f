"""A GGUF file's own facts before the model is loaded, read by the engine's gguf functions."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from caravan.engine.library import load

_U32, _STRING = 4, 8  # GGUF_TYPE_UINT32, GGUF_TYPE_STRING


class _InitParams(ctypes.Structure):
    """gguf_init_params: metadata only, no tensor data."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


def block_count(path: Path) -> int | None:
    """Layers without the output's; None where the file does not say or cannot be read."""
    return _of_architecture(path, b".block_count")


def context_length(path: Path) -> int | None:
    """Tokens that the model was made for; None where the file does not say or cannot be read."""
    return _of_architecture(path, b".context_length")


def _of_architecture(path: Path, key: bytes) -> int | None:
    find = load().find
    init, free = find("gguf_init_from_file"), find("gguf_free")
    init.restype, init.argtypes = ctypes.c_void_p, (ctypes.c_char_p, _InitParams)
    free.restype, free.argtypes = None, (ctypes.c_void_p,)
    context = init(os.fsencode(path), _InitParams(no_alloc=True, ctx=None))
    if not context:
        return None
    try:
        return _number(context, key)
    finally:
        free(context)


def _number(context: int, name: bytes) -> int | None:
    find = load().find
    key, kind = find("gguf_find_key"), find("gguf_get_kv_type")
    key.restype, key.argtypes = ctypes.c_int64, (ctypes.c_void_p, ctypes.c_char_p)
    kind.restype, kind.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_int64)
    text, number = find("gguf_get_val_str"), find("gguf_get_val_u32")
    text.restype, text.argtypes = ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_int64)
    number.restype, number.argtypes = ctypes.c_uint32, (ctypes.c_void_p, ctypes.c_int64)
    at = key(context, b"general.architecture")
    if at < 0 or kind(context, at) != _STRING:
        return None
    at = key(context, text(context, at) + name)
    if at < 0 or kind(context, at) != _U32:
        return None
    return int(number(context, at))
