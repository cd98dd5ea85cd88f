"""A load of a model without its weights, onto devices that record.

The engine maps stand-ins of the files, as in a load with workers (`loader`), but nobody brings
anything: of the files no more is read than is looked at later. Called by `rehearsal`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from caravan import engine, interrupt
from caravan.backend.recording import RecordingDevice
from caravan.backend.tensor import RemoteTensor
from caravan.backend.weights import bringing
from caravan.engine import skeleton
from caravan.engine.llama import ProgressCallback
from caravan.engine.skeleton import Skeleton
from caravan.llm.fake import load_fake
from caravan.llm.weights import WeightFiles
from caravan.models.fake import described_size
from caravan.models.splits import parts


def load_weightless(path: Path, devices: tuple[RecordingDevice, ...], c_params: Any) -> int:
    """The llama_model, or 0; inside `interrupt.deferred`. Raises ModelError for what is no model's
    file."""
    size = described_size(path)
    if size:
        return load_fake(path, size, devices, c_params)
    paths = parts(path)
    with _stand_ins(paths) as stand_ins:
        if stand_ins is not None:
            handle = _load_files(stand_ins.names, stand_ins, devices, c_params)
            if handle or stand_ins.laid or interrupt.pending():
                return handle
    # what the engine does not map, it gets as it is
    return _load_files([os.fsencode(path) for path in paths], None, devices, c_params)


class _Nobody:
    """See `backend.weights.Sink`: brings no weight anywhere."""

    def __init__(self, skeleton: Skeleton | None) -> None:
        self._skeleton = skeleton

    def opened(self) -> None:
        if self._skeleton is not None:
            self._skeleton.cut()

    def take(self, device: object, tensor: RemoteTensor, offset: int, size: int) -> bool:
        return True


def _load_files(
    names: Sequence[bytes],
    stand_ins: Skeleton | None,
    devices: tuple[RecordingDevice, ...],
    c_params: Any,
) -> int:
    def step(fraction: float, data: int | None) -> bool:
        try:
            laid = stand_ins is None or stand_ins.lay()
        except Exception:  # nothing may cross C; then there is no model
            return False
        return laid and not interrupt.pending()

    callback = ProgressCallback(step)
    c_params.progress_callback = callback
    array = (ctypes.c_char_p * len(names))(*names)
    with bringing(_Nobody(stand_ins), devices):
        found = engine.load().llama.model_load_from_splits(array, len(names), c_params)
    return int(found or 0)


@contextmanager
def _stand_ins(paths: Sequence[Path]) -> Iterator[Skeleton | None]:
    """What the engine is to open instead of the files, where that is possible."""
    if not skeleton.available():
        yield None
        return
    files = WeightFiles(paths)
    try:
        found = Skeleton(files.headers())
    except OSError:
        found = None
    finally:
        files.close()
    if found is None:
        yield None
        return
    with found:
        yield found
