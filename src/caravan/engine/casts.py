"""Between f32 and the types of half its size, with the engine's own functions.

They run without the GIL. What f16 cannot hold (above 65504) becomes infinite; bf16 has the range of
f32.
"""

from __future__ import annotations

import numpy as np

from caravan.engine.ggml import Ggml

_F32_BYTES = 4
# name: (from f32, to f32)
_ROWS = {
    "f16": ("fp32_to_fp16_row", "fp16_to_fp32_row"),
    "bf16": ("fp32_to_bf16_row", "bf16_to_fp32_row"),
}


def narrow(ggml: Ggml, source: int, size: int, word: str) -> bytearray:
    """The `size` bytes of f32 at the address `source`, which is a multiple of 4, as `word`."""
    data = bytearray(size // 2)
    if data:
        target = np.frombuffer(data, np.uint8).ctypes.data
        getattr(ggml, _ROWS[word][0])(source, target, size // _F32_BYTES)
    return data


def widen(ggml: Ggml, data: bytes | bytearray | memoryview, target: int, word: str) -> None:
    """Numbers of the type `word` as f32 to the address `target`, a multiple of 4."""
    if not data:
        return
    raw = np.frombuffer(data, np.uint8)
    if raw.ctypes.data % 2:
        raw = raw.copy()
    getattr(ggml, _ROWS[word][1])(raw.ctypes.data, target, len(raw) // 2)
