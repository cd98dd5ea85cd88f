"""`Model`: a GGUF file loaded by the engine, on the CPU or over devices."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from caravan import engine, interrupt, models
from caravan.engine import llama as llama_structs
from caravan.errors import ModelError, UsageError
from caravan.llm.devices import EngineDevice

SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}
LAZY_MODES = {"off": 0, "auto": 1, "on": 2}
_MAGIC = b"GGUF"
_MAX_DEVICES = 16


@dataclass(frozen=True, slots=True)
class ModelParams:
    """How to load a model; the defaults are llama.cpp's.

    Attributes:
        n_gpu_layers: layers on devices, from the last one; -1: all.
        split_mode: `layer` puts whole layers on devices; `none` uses `main_gpu` alone.
        tensor_split: shares per device; empty: by free memory.
        load_mode: auto, none, mmap, mlock, mmap+mlock, dio.
        lazy_mode: off, auto, on.
        repack: let the CPU change the layout of weights for speed (remote devices never do).
        no_host: bypass host buffers.
        overrides: (pattern of tensor names, buffer type name) pairs.
        vocab_only: no weights.
        check_tensors: validate the data of every tensor.
    """

    n_gpu_layers: int = -1
    split_mode: str = "layer"
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    load_mode: str = "auto"
    lazy_mode: str = "auto"
    repack: bool = True
    no_host: bool = False
    overrides: tuple[tuple[str, str], ...] = ()
    vocab_only: bool = False
    check_tensors: bool = False


class Model:
    """A loaded model.

    Args:
        path: a GGUF file, or the name of a sample model (`smollm2`).
        params: see ModelParams.
        devices: in pipeline order; none: the CPU alone.
        progress: called with 0.0 to 1.0 while weights are loaded; False stops.

    Raises:
        ModelError: no such file, not GGUF, or the engine cannot load it.
        WorkerLost: a device was lost meanwhile.
        KeyboardInterrupt: after Ctrl-C, once the engine has let go.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        params: ModelParams | None = None,
        *,
        devices: Sequence[EngineDevice] = (),
        progress: Callable[[float], bool] | None = None,
    ) -> None:
        self._handle = 0
        self.params = params or ModelParams()
        self.devices = tuple(devices)
        self.path = models.resolve(os.fspath(path))
        _check_file(self.path)
        self._engine = engine.load()
        self._llama = self._engine.llama
        c_params = self._c_params(progress)
        engine.forget_errors()
        with interrupt.deferred():
            handle = self._llama.model_load_from_file(os.fsencode(self.path), c_params)
        self.check()
        if not handle:
            raise ModelError(f"cannot load {self.path}: {_why()}")
        self._handle = handle
        self._vocab = self._llama.model_get_vocab(handle)
        self._read_facts()

    def __repr__(self) -> str:
        where = "/".join(device.name for device in self.devices) or "CPU"
        return f"<Model {self.path.name} on {where}{'' if self._handle else ' closed'}>"

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights, on workers too. Close the model's contexts first. Idempotent."""
        handle, self._handle = getattr(self, "_handle", 0), 0
        if handle:
            self._llama.model_free(handle)

    @property
    def handle(self) -> int:
        """Address of the llama_model; raises ModelError once it is closed."""
        if not self._handle:
            raise ModelError(f"the model {self.path.name} is closed")
        return self._handle

    def check(self) -> None:
        """Raises WorkerLost when a device of the model is lost."""
        for device in self.devices:
            device.check()

    # what it is

    def _read_facts(self) -> None:
        llama, handle = self._llama, self._handle
        text = ctypes.create_string_buffer(256)
        llama.model_desc(handle, ctypes.addressof(text), len(text))
        self.description: str = text.value.decode("utf-8", "replace")
        self.size: int = llama.model_size(handle)
        self.n_params: int = llama.model_n_params(handle)
        self.n_layer: int = llama.model_n_layer(handle)
        self.n_embd: int = llama.model_n_embd(handle)
        self.n_ctx_train: int = llama.model_n_ctx_train(handle)
        self.n_vocab: int = llama.vocab_n_tokens(self._vocab)
        self.has_encoder: bool = llama.model_has_encoder(handle)
        self.has_decoder: bool = llama.model_has_decoder(handle)
        self.bos: int = llama.vocab_bos(self._vocab)
        self.eos: int = llama.vocab_eos(self._vocab)
        self.add_bos: bool = llama.vocab_get_add_bos(self._vocab)

    def chat_template(self) -> str | None:
        """The model's own chat template (Jinja), if it has one."""
        template: bytes | None = self._llama.model_chat_template(self.handle, None)
        return template.decode("utf-8", "replace") if template else None

    def layer_devices(self) -> list[str]:
        """The device of each layer, and last the output's, by llama.cpp's rule of placement."""
        names = [device.name for device in self.devices]
        n = self.n_layer + 1
        on_devices = n if self.params.n_gpu_layers < 0 else min(self.params.n_gpu_layers, n)
        if not names or on_devices == 0:
            return ["CPU"] * n
        if self.params.split_mode == "none":
            first = n - on_devices
            return ["CPU"] * first + [names[self.params.main_gpu]] * on_devices
        bounds = self._cumulative_shares()
        first = n - on_devices
        placed = ["CPU"] * first
        for layer in range(first, n):
            share = (layer - first) / on_devices
            index = next((i for i, bound in enumerate(bounds) if bound > share), len(names) - 1)
            placed.append(names[index])
        return placed

    def _cumulative_shares(self) -> list[float]:
        shares = list(self._split) or [1.0] * len(self.devices)
        total = sum(shares) or 1.0
        bounds, done = [], 0.0
        for share in shares:
            done += share / total
            bounds.append(done)
        return bounds

    # tokens

    def tokenize(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`; with special tokens in front as the model wants them."""
        data = text.encode()
        size = len(data) + 8
        while True:
            tokens = (ctypes.c_int32 * size)()
            count = self._llama.tokenize(
                self._vocab,
                data,
                len(data),
                ctypes.addressof(tokens),
                size,
                add_special,
                parse_special,
            )
            if count >= 0:
                return list(tokens[:count])
            size = -count

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; special tokens have none unless asked for."""
        size = 64
        while True:
            text = ctypes.create_string_buffer(size)
            count = self._llama.token_to_piece(
                self._vocab, token, ctypes.addressof(text), size, 0, special
            )
            if count >= 0:
                return text.raw[:count]
            size = -count

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return bool(self._llama.vocab_is_eog(self._vocab, token))

    # parameters for C; what they point to lives in self until the load has returned

    def _c_params(self, progress: Callable[[float], bool] | None) -> Any:
        params, c = self.params, self._llama.model_default_params()
        if len(self.devices) > _MAX_DEVICES:
            raise UsageError(f"{len(self.devices)} devices; the engine takes {_MAX_DEVICES}")
        handles = [device.handle for device in self.devices]
        self._device_array = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
        c.devices = ctypes.addressof(self._device_array)
        c.n_gpu_layers = params.n_gpu_layers
        c.split_mode = _number(SPLIT_MODES, params.split_mode, "split mode")
        c.load_mode = _number(LOAD_MODES, params.load_mode, "load mode")
        c.lazy_mode = _number(LAZY_MODES, params.lazy_mode, "lazy mode")
        c.main_gpu = params.main_gpu
        self._split = self._shares()
        if self._split:
            self._split_array = (ctypes.c_float * _MAX_DEVICES)(*self._split)
            c.tensor_split = ctypes.addressof(self._split_array)
        c.use_extra_bufts = params.repack
        c.no_host = params.no_host
        c.vocab_only = params.vocab_only
        c.check_tensors = params.check_tensors
        c.tensor_buft_overrides = self._c_overrides()
        self._progress = llama_structs.ProgressCallback(_progress(progress))
        c.progress_callback = self._progress
        return c

    def _shares(self) -> tuple[float, ...]:
        """The split as numbers: the caller's, or by free memory as the engine would do it."""
        given = self.params.tensor_split
        if len(given) > max(len(self.devices), 1):
            raise UsageError(f"{len(given)} shares in the split for {len(self.devices)} devices")
        if any(share < 0 for share in given) or (given and not any(given)):
            raise UsageError(f"split {'/'.join(f'{s:g}' for s in given)}: shares must be positive")
        if given or len(self.devices) < 2:
            return given
        free = [device.memory()[0] for device in self.devices]
        self.check()
        return tuple(float(size) for size in free) if any(free) else ()

    def _c_overrides(self) -> int | None:
        if not self.params.overrides:
            return None
        known = self._buffer_types()
        rows = (llama_structs.TensorBuftOverride * (len(self.params.overrides) + 1))()
        for row, (pattern, name) in zip(rows, self.params.overrides, strict=False):
            if name not in known:
                raise UsageError(
                    f"unknown buffer type {name!r} in an override; there are {', '.join(known)}"
                )
            row.pattern, row.buft = pattern.encode(), known[name]
        self._overrides = rows
        return ctypes.addressof(rows)

    def _buffer_types(self) -> dict[str, int]:
        ggml = self._engine.ggml
        handles = [ggml.dev_get(index) for index in range(ggml.dev_count())]
        handles += [device.handle for device in self.devices]
        types = [ggml.dev_buffer_type(handle) for handle in handles]
        return {ggml.buft_name(buft).decode(): buft for buft in types}


def _number(table: dict[str, int], text: str, what: str) -> int:
    if text not in table:
        raise UsageError(f"unknown {what} {text!r}; there are {', '.join(table)}")
    return table[text]


def _progress(progress: Callable[[float], bool] | None) -> Callable[[float, Any], bool]:
    """The engine's callback: raises nothing, and stops the load after Ctrl-C."""

    def call(share: float, _data: Any) -> bool:
        try:
            if interrupt.pending():
                return False
            return progress is None or progress(share) is not False
        except BaseException:
            return False

    return call


def _check_file(path: Path) -> None:
    """A file that is not GGUF is told apart before the engine fills its log with it."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as exc:
        raise ModelError(f"cannot read {path}: {exc.strerror or exc}") from exc
    if magic != _MAGIC:
        raise ModelError(f"{path} is not a GGUF file")


def _why() -> str:
    """The engine's own words for what went wrong last."""
    lines = [line for line in engine.recent_errors() if "failed to load model" not in line]
    lines = [line.split(": ", 1)[-1] for line in lines]
    return lines[0] if lines else "the engine gives no reason"
