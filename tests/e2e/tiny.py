"""A model of random weights that computes in no time, for tests of what surrounds computing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from caravan.models.fake import FakeModel

_SHAPE = FakeModel(layers=6, embd=128, heads=4, kv_heads=4, ff=256, vocab=512, type="F32")


def write(path: Path) -> Path:
    """A llama of 6 layers and some 4 MB; the same one every time."""
    random = np.random.default_rng(20261130)
    writer = GGUFWriter(path, "llama")
    _SHAPE._add_metadata(writer, "")
    _SHAPE._add_vocabulary(writer)
    for name, shape in _SHAPE.tensors().items():
        data = random.standard_normal(tuple(reversed(shape)), np.float32)
        writer.add_tensor(name, data * np.float32(0.05 if len(shape) > 1 else 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
