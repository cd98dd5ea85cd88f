"""`Loader`: one load of a model by the engine, with the weights of remote devices brought apart.

What `Model` calls. The engine opens stand-ins of the files where the system has them (see
`engine.skeleton`), so that nothing is read here that is not needed here.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from caravan import engine, interrupt
from caravan.backend import RemoteDevice
from caravan.backend.weights import bringing
from caravan.engine import skeleton
from caravan.engine.llama import ProgressCallback
from caravan.engine.skeleton import Skeleton
from caravan.llm.devices import EngineDevice, check_all
from caravan.llm.loading import TICK, DeviceLoad, Loading
from caravan.llm.params import ModelParams
from caravan.llm.weights import WeightFiles

Progress = Callable[[float], bool]
OnLoad = Callable[[Sequence[DeviceLoad]], None]


class Loader:
    """See the module; used for one load, inside `interrupt.deferred`.

    Args:
        devices: all that the model is put on.
        progress: called with 0.0 to 1.0; stops the loading by answering False.
        on_load: called with how far each remote device is.

    Attributes:
        error: what was raised while the engine loaded, to be raised when that has returned.
        stopped: whether `progress` has stopped it.
    """

    def __init__(
        self,
        devices: tuple[EngineDevice, ...],
        progress: Progress | None = None,
        on_load: OnLoad | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self.stopped = False
        self._devices = devices
        self._holds = [device.hold() for device in devices]
        self._progress = progress
        self._on_load = on_load
        self._loading: Loading | None = None
        self._skeleton: Skeleton | None = None
        self._unmapped = False
        self._due = 0.0  # the next call of `on_load`
        self._names: dict[str, str] = {}
        self._callback = ProgressCallback(self._step)

    def load(self, paths: Sequence[Path], params: ModelParams, c_params: Any) -> int:
        """The llama_model of a file in one or several parts; 0 if there is none.

        Raises what went wrong with the files or the devices. If it gives a model although `error`
        is set, or `stopped`, the caller frees it.
        """
        c_params.progress_callback = self._callback
        remote = [device for device in self._devices if isinstance(device, RemoteDevice)]
        if not remote or not _apart(params):
            return _load([os.fsencode(path) for path in paths], c_params)
        names = [os.fsencode(path) for path in paths]
        files = WeightFiles(paths)
        self._skeleton = _stand_ins(files)
        if self._skeleton is None:
            return self._load_apart(files, remote, names, c_params)
        with self._skeleton as stand_ins:
            self._names = dict(zip(map(os.fsdecode, stand_ins.names), map(str, paths), strict=True))
            handle = self._load_apart(files, remote, stand_ins.names, c_params)
            self._skeleton = None
        if not self._unmapped:
            return handle
        # what the engine does not map, it gets as it is
        return self._load_apart(WeightFiles(paths), remote, names, c_params)

    def simple(self, call: Callable[[], int], c_params: Any) -> int:
        """A load in which nothing is brought."""
        c_params.progress_callback = self._callback
        return call()

    def in_words(self, text: str) -> str:
        """What the engine says, with the files' names instead of those that it was given."""
        for name, path in self._names.items():
            text = text.replace(name, path)
        return text

    def _load_apart(
        self, files: WeightFiles, remote: list[RemoteDevice], names: list[bytes], c_params: Any
    ) -> int:
        opened = self._skeleton.cut if self._skeleton is not None else lambda: None
        loading = self._loading = Loading(files, remote, opened)
        handle = 0
        try:
            with bringing(loading, remote):
                handle = _load(names, c_params)
            if handle and self.error is None:
                if self._skeleton is not None:
                    files.fetch(loading.left_here())
                self.stopped = not loading.wait(self._go_on) and not interrupt.pending()
        except BaseException as exc:
            # the model is the caller's to free
            self.error = self.error or exc
        finally:
            loading.close()
            self._loading = None
        return handle

    def _step(self, fraction: float, data: int | None) -> bool:
        """The engine's progress callback."""
        go_on = False
        try:
            if self._skeleton is not None and not self._skeleton.lay():
                self._unmapped = True
            else:
                go_on = self._go_on(fraction)
        except BaseException as exc:  # nothing may cross C; raised again after the call
            self.error = exc
        if not go_on and self._loading is not None:
            # the engine frees the weights' memory before it returns
            self._loading.cancel()
        return go_on

    def _go_on(self, fraction: float | None = None) -> bool:
        loading = self._loading
        if loading is not None:
            # the engine asks for every tensor
            due = fraction is None or time.monotonic() >= self._due
            fraction = loading.fraction
            if self._on_load is not None and due:
                self._due = time.monotonic() + TICK
                self._on_load(loading.state())
        if self._progress is not None and not self._progress(fraction or 0.0):
            self.stopped = True
        check_all(self._holds)
        return not (self.stopped or interrupt.pending())


def _stand_ins(files: WeightFiles) -> Skeleton | None:
    """What the engine is to open instead of the files, where that is possible."""
    if not skeleton.available():
        return None
    try:
        return Skeleton(files.headers())
    except OSError:
        return None
    except BaseException:
        files.close()
        raise


def _apart(params: ModelParams) -> bool:
    """Whether the engine may leave the reading to others: it is to do what was asked for."""
    return (
        params.load_mode in ("auto", "mmap") and not params.vocab_only and not params.check_tensors
    )


def _load(paths: Sequence[bytes], c_params: Any) -> int:
    array = (ctypes.c_char_p * len(paths))(*paths)
    found = engine.load().llama.model_load_from_splits(array, len(paths), c_params)
    return int(found or 0)
