"""`DryRun`: a model that the engine has loaded without taking memory, to learn what it would take.

The engine reads the file's header, places every tensor and reserves its graphs, all in numbers.
Nothing reaches a device, with one exception: the small state of a recurrent model is allocated, and
freed at once. Called by `planning`; knows nothing of what fits.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from caravan import engine
from caravan.engine.breakdown import Share, breakdown
from caravan.engine.hollow import load_hollow
from caravan.engine.llama import KvOverride
from caravan.engine.log import muted
from caravan.errors import DoesNotFit
from caravan.llm.devices import EngineDevice
from caravan.llm.params import ContextParams, ModelParams, c_context_params, c_model_params
from caravan.models.fake import described_size

_COPIES = 4  # GGML_SCHED_MAX_COPIES
_F32 = 4
# What the engine keeps of each token here, before it asks any device for the token's own memory.
_CELL_BYTES = 52
_BLOCK = re.compile(rb"blk\.(\d+)\.|cache_.*_l(\d+)$")


@dataclass(frozen=True, slots=True)
class Part:
    """What one device would hold, in bytes.

    Attributes:
        weights, kv, compute: in all.
        blocks: of weights and KV cache, by the layer that they belong to; empty for a device that
            cannot be watched.
        rest: of weights and KV cache that belong to no layer.
    """

    weights: int
    kv: int
    compute: int
    blocks: dict[int, int]
    rest: int


class DryRun:
    """See the module. Use it as a context manager, or `close` it.

    Attributes:
        handle: address of the llama_model; 0 where the engine refuses it.
        n_layer: layers without the output's, but with those for speculative decoding.
        n_ctx_train: tokens that the model was made for.
    """

    def __init__(
        self, path: Path, params: ModelParams, devices: tuple[EngineDevice, ...], split: list[float]
    ) -> None:
        self._llama = engine.load().llama
        self._params = params
        self._devices = devices
        placed = replace(params, tensor_split=tuple(split))
        c_params, keep = c_model_params(placed, devices)
        c_params.no_alloc = True
        c_params.check_tensors = False
        c_params.load_mode = c_params.lazy_mode = 0
        no_words = no_vocabulary()
        with muted():
            # most of the time would go into the vocabulary; not all files say enough without it
            c_params.kv_overrides = ctypes.addressof(no_words)
            self.handle = self._load(path, c_params)
            if not self.handle:
                c_params.kv_overrides = None
                self.handle = self._load(path, c_params)
        del keep
        if self.handle:
            llama, handle = self._llama, self.handle
            self.n_layer: int = llama.model_n_layer(handle) + llama.model_n_layer_nextn(handle)
            self.n_ctx_train: int = llama.model_n_ctx_train(handle)
            self._recurrent: bool = llama.model_is_recurrent(handle)
            self._n_embd: int = llama.model_n_embd(handle)

    def _load(self, path: Path, c_params: Any) -> int:
        size = described_size(path)
        if size:
            # without the last byte of the padding, it ends before the data
            return load_hollow(engine.load(), path.read_bytes()[:-1], size, c_params)
        return self._llama.model_load_from_file(os.fsencode(path), c_params) or 0

    def __enter__(self) -> DryRun:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free it. Does nothing the second time."""
        handle, self.handle = self.handle, 0
        if handle:
            with muted():
                self._llama.model_free(handle)

    def measure(self, context: ContextParams) -> list[Part] | None:
        """What each device would hold with such a context, and at last what this process would.

        None where the engine refuses the context, or gives no account of its memory. Raises
        DoesNotFit for one that would end this process.
        """
        if not self._recurrent:
            refuse_endless(context.n_ctx)
        with muted():
            handle = self._llama.init_from_model(self.handle, c_context_params(context))
            if not handle:
                return None
            try:
                return self._account(handle, context)
            finally:
                self._llama.free(handle)

    def _account(self, handle: int, context: ContextParams) -> list[Part] | None:
        watchers = [_Watcher() for _ in self._devices]
        with ExitStack() as stack:
            for device, watcher in zip(self._devices, watchers, strict=True):
                stack.enter_context(device.watched_sizes(watcher))
            shares = breakdown(engine.load(), handle)
        if shares is None:
            return None
        ggml = engine.load().ggml
        by_type = {share.buft: share for share in shares}
        parts = []
        for device, watcher in zip(self._devices, watchers, strict=True):
            share = by_type.pop(ggml.dev_buffer_type(device.handle), Share(0, 0, 0, 0))
            parts.append(watcher.part(share))
        own = by_type.values()
        host = Share(
            0, *(sum(getattr(s, what) for s in own) for what in ("model", "context", "compute"))
        )
        return [*self._corrected(parts, context), _Watcher().part(host)]

    def _corrected(self, parts: list[Part], context: ContextParams) -> list[Part]:
        """Without what the engine's numbers have too much where devices form a pipeline.

        It forgets, in this mode alone, that the first norm of a layer belongs to the layer's
        device. So it counts one more activation at every border, once for each batch in flight.
        """
        params = self._params
        full = params.n_gpu_layers < 0 or params.n_gpu_layers > self.n_layer
        pipeline = full and context.offload_kqv and not params.overrides
        if not (pipeline and params.split_mode == "layer" and len(parts) > 1):
            return parts
        tokens = min(context.n_ubatch, context.n_batch, context.n_ctx or self.n_ctx_train)
        tokens = -(-tokens // context.n_seq_max) * context.n_seq_max
        more = _COPIES * _F32 * self._n_embd * tokens
        behind = False
        corrected = []
        for part in parts:
            less = more if behind and part.blocks else 0
            behind = behind or part.weights > 0
            corrected.append(
                Part(part.weights, part.kv, max(0, part.compute - less), part.blocks, part.rest)
            )
        return corrected


def no_vocabulary() -> ctypes.Array[KvOverride]:
    """Overrides, ended by an empty one, with which the engine takes tokens for mere numbers."""
    overrides = (KvOverride * 2)()
    overrides[0].tag = KvOverride.STR
    overrides[0].key = b"tokenizer.ggml.model"
    overrides[0].text = b"no_vocab"
    return overrides


def refuse_endless(n_ctx: int) -> None:
    """Raises DoesNotFit for a context whose book-keeping alone is more than this machine has: the
    system would rather end this process than refuse it the memory."""
    ggml = engine.load().ggml
    free, _ = ggml.dev_memory(ggml.dev_by_name(b"CPU"))
    if n_ctx * _CELL_BYTES > free > 0:
        raise DoesNotFit(f"no context of {n_ctx} tokens: not enough memory here")


class _Watcher:
    """Adds up the tensors of one device by the layer that they belong to."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = defaultdict(int)

    def __call__(self, name: bytes, size: int) -> None:
        match = _BLOCK.match(name)
        if match is not None:
            self._blocks[int(match[1] or match[2])] += size

    def part(self, share: Share) -> Part:
        rest = share.model + share.context - sum(self._blocks.values())
        return Part(share.model, share.context, share.compute, dict(self._blocks), max(0, rest))
