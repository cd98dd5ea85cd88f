"""`ModelParams` and `ContextParams`: the engine's options in words, and the structs made of them.

Checked when made, so that a wrong word is the caller's error and never the engine's. Called by
`model` and `context`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from caravan import engine
from caravan.engine.layouts import TYPE_NUMBERS
from caravan.engine.llama import TensorBuftOverride
from caravan.errors import UsageError
from caravan.llm.cores import physical_cores
from caravan.llm.devices import EngineDevice

# Tokens of a context that nobody has sized.
USUAL_CTX = 4096
# The engine looks at whole blocks of the KV cache, and rounds contexts up to them: tokens.
KV_BLOCK = 256
_SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
_LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}
_LAZY_MODES = {"off": 0, "auto": 1, "on": 2}
POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
_POOLINGS = {"auto": -1, **POOLINGS}
_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


def whole_blocks(n_tokens: int) -> int:
    """Entries of the KV cache that so many tokens take, as the engine counts them."""
    return -(-n_tokens // KV_BLOCK) * KV_BLOCK


@dataclass(frozen=True, slots=True)
class ModelParams:
    """How to load a model. Raises UsageError for a word that means nothing.

    Attributes:
        n_gpu_layers: layers that are not the CPU's, the output layer included; negative for all.
        split_mode: `layer`, `none` (all on `main_gpu`), `row` or `tensor`.
        tensor_split: the devices' shares in any unit; empty: by free memory.
        load_mode: `auto`, `none`, `mmap`, `mlock`, `mmap+mlock` or `dio`.
        lazy_mode: `auto`, `on` or `off`: read marked tensors row by row.
        repack: let the CPU repack weights for speed.
        no_host: keep weights out of host buffers of the devices.
        overrides: (pattern of tensor names, name of a buffer type) pairs; the first match counts.
        vocab_only: no weights; enough to tokenize.
        check_tensors: look for invalid numbers in the weights.
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

    def __post_init__(self) -> None:
        for name, known in (
            ("split_mode", _SPLIT_MODES),
            ("load_mode", _LOAD_MODES),
            ("lazy_mode", _LAZY_MODES),
        ):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} {getattr(self, name)!r} is none of {', '.join(known)}")
        if any(not share >= 0 for share in self.tensor_split):
            raise UsageError(f"tensor_split {self.tensor_split} has a share that is not positive")


@dataclass(frozen=True, slots=True)
class ContextParams:
    """How to make a context. Raises UsageError for a word or a number that means nothing.

    Attributes:
        n_ctx: tokens it can hold, which the engine rounds up; 0: as many as the model was made for.
        n_batch: most tokens the engine takes in one call.
        n_ubatch: most tokens it computes at once; the unit of the pipeline over several devices.
        n_seq_max: conversations that share the memory; this class uses the first.
        n_threads, n_threads_batch: of the CPU, for one token and for many; 0: one a core, and
            as `n_threads`.
        type_k, type_v: number formats of the attention's memory.
        flash_attn: `on`, `off` or `auto`.
        offload_kqv: keep the attention's memory with the layers.
        embeddings: compute embeddings of all tokens.
        pooling: how they become one of the text: `none`, `mean`, `cls` (the first), `last`, `rank`,
            or `auto`, as the model says.
        op_offload: let devices compute big operations on weights that the host holds.
        swa_full: full memory for layers that look at a window only; needed to go back.
        kv_unified: one memory for all conversations.
        no_perf: no timing inside the engine.
    """

    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = 0
    n_threads_batch: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    offload_kqv: bool = True
    embeddings: bool = False
    pooling: str = "auto"
    op_offload: bool = True
    swa_full: bool = True
    kv_unified: bool = False
    no_perf: bool = True

    def __post_init__(self) -> None:
        for name, least in (
            ("n_ctx", 0),
            ("n_batch", 1),
            ("n_ubatch", 1),
            ("n_seq_max", 1),
            ("n_threads", 0),
            ("n_threads_batch", 0),
        ):
            value = getattr(self, name)
            if not least <= value < 1 << 31:
                raise UsageError(f"{name} {value} is not a number from {least} to 2147483647")
        for name, known in (
            ("type_k", TYPE_NUMBERS),
            ("type_v", TYPE_NUMBERS),
            ("flash_attn", _FLASH_ATTENTION),
            ("pooling", _POOLINGS),
        ):
            if getattr(self, name) not in known:
                raise UsageError(f"{name} {getattr(self, name)!r} is none of {', '.join(known)}")


def usual_n_ctx(n_ctx_train: int | None) -> int:
    """Tokens of a context that nobody has sized: USUAL_CTX, or as many as the model was made for,
    where that is known and less."""
    return min(n_ctx_train or USUAL_CTX, USUAL_CTX)


def c_model_params(params: ModelParams, devices: tuple[EngineDevice, ...]) -> tuple[Any, list[Any]]:
    """llama_model_params, and what must live as long as they are used."""
    llama = engine.load().llama
    c_devices = (ctypes.c_void_p * (len(devices) + 1))(*[device.handle for device in devices])
    most = max(llama.max_devices(), len(devices))
    c_split = (ctypes.c_float * most)(*params.tensor_split[: len(devices)])
    c_overrides = _overrides(params.overrides, devices)
    result = llama.model_default_params()
    result.devices = ctypes.addressof(c_devices)
    result.n_gpu_layers = params.n_gpu_layers
    result.split_mode = _SPLIT_MODES[params.split_mode]
    result.load_mode = _LOAD_MODES[params.load_mode]
    result.lazy_mode = _LAZY_MODES[params.lazy_mode]
    result.main_gpu = 0 if devices else -1
    result.tensor_split = ctypes.addressof(c_split)
    if params.overrides:
        result.tensor_buft_overrides = ctypes.addressof(c_overrides)
    result.vocab_only = params.vocab_only
    result.check_tensors = params.check_tensors
    result.use_extra_bufts = params.repack
    result.no_host = params.no_host
    return result, [c_devices, c_split, c_overrides]


def _overrides(
    overrides: Sequence[tuple[str, str]], devices: tuple[EngineDevice, ...]
) -> ctypes.Array[TensorBuftOverride]:
    """The list for the engine, ended by an empty entry. Raises UsageError for an unknown name."""
    entries = (TensorBuftOverride * (len(overrides) + 1))()
    types = _buffer_types(devices) if overrides else {}
    for entry, (pattern, name) in zip(entries, overrides, strict=False):
        if name not in types:
            raise UsageError(f"no buffer type {name!r}; there are: {', '.join(types)}")
        entry.pattern, entry.buft = pattern.encode(), types[name]
    return entries


def _buffer_types(devices: tuple[EngineDevice, ...]) -> dict[str, int]:
    """Those of all registered devices and of the given ones, by name."""
    ggml = engine.load().ggml
    handles = [*ggml.devices(), *(d.handle for d in devices)]
    types = filter(None, map(ggml.dev_buffer_type, handles))
    return {ggml.buft_name(buft).decode(): buft for buft in types}


def c_context_params(params: ContextParams) -> Any:
    """llama_context_params."""
    result = engine.load().llama.context_default_params()
    threads = params.n_threads or physical_cores()
    for name in (
        "n_ctx",
        "n_batch",
        "n_ubatch",
        "n_seq_max",
        "offload_kqv",
        "embeddings",
        "op_offload",
        "swa_full",
        "kv_unified",
        "no_perf",
    ):
        setattr(result, name, getattr(params, name))
    result.n_threads = threads
    result.n_threads_batch = params.n_threads_batch or threads
    result.type_k = TYPE_NUMBERS[params.type_k]
    result.type_v = TYPE_NUMBERS[params.type_v]
    result.pooling_type = _POOLINGS[params.pooling]
    result.flash_attn_type = _FLASH_ATTENTION[params.flash_attn]
    return result
