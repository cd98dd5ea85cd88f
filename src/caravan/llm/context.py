"""`Context`: a conversation with a model: its KV cache, batches in, logits out."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from caravan import engine, interrupt
from caravan.engine import layouts
from caravan.engine.llama import Batch
from caravan.errors import AllocationError, ContextError, DecodeError, UsageError
from caravan.llm.model import Model

FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")


@dataclass(frozen=True, slots=True)
class ContextParams:
    """The shape of a context; the defaults are llama.cpp's.

    Attributes:
        n_ctx: tokens that fit; 0: as many as the model was trained with.
        n_batch: tokens a call of the engine; n_ubatch: tokens a step of the pipeline.
        n_seq_max: sequences side by side.
        n_threads, n_threads_batch: of the head's CPU; 0: one a physical core.
        type_k, type_v: of the KV cache, see CACHE_TYPES.
        flash_attn: auto, on, off.
        offload_kqv: KV cache on the devices.
        embeddings: give embeddings instead of logits.
        op_offload: let devices compute for weights that stay on the host.
        outputs_all: room for logits of every token of a micro-batch, not just one.
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
    op_offload: bool = True
    outputs_all: bool = False


class Context:
    """A context on a model, which must outlive it.

    Raises ContextError when the engine cannot make it (often: a device has no room), WorkerLost
    when a device is lost.

    Attributes:
        n_past: tokens in the cache.
    """

    def __init__(self, model: Model, params: ContextParams | None = None) -> None:
        self._handle = 0
        self.model = model
        self.params = params or ContextParams()
        self.n_past = 0
        self._llama = engine.load().llama
        c_params = self._c_params()
        engine.forget_errors()
        with interrupt.deferred():
            handle = self._llama.init_from_model(model.handle, c_params)
        if not handle:
            model.check()
            raise ContextError(f"cannot make a context: {self._why()}")
        self._handle = handle
        self.check()
        self._memory = self._llama.get_memory(handle)
        self.n_ctx: int = self._llama.n_ctx(handle)
        self.n_batch: int = self._llama.n_batch(handle)
        self.n_ubatch: int = self._llama.n_ubatch(handle)

    def __repr__(self) -> str:
        state = f"{self.n_past} of {self.n_ctx} tokens" if self._handle else "closed"
        return f"<Context of {self.model.path.name}: {state}>"

    def __enter__(self) -> Context:
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
        """Free the cache and the compute buffers, on workers too. Idempotent."""
        handle, self._handle = getattr(self, "_handle", 0), 0
        if handle:
            self._llama.free(handle)

    @property
    def handle(self) -> int:
        """Address of the llama_context; raises ContextError once it is closed."""
        if not self._handle:
            raise ContextError("the context is closed")
        return self._handle

    def check(self) -> None:
        """Raises WorkerLost when a device of the model is lost."""
        self.model.check()

    def decode(self, tokens: Sequence[int], *, logits: str = "last") -> None:
        """Process `tokens` after what is in the cache, `n_batch` at a time.

        Args:
            logits: `last` keeps the last token's, `all` those of every token of the last batch.

        Returns as soon as the work is queued where devices allow it. Raises DecodeError when the
        engine refuses (no room in the cache, a token that does not exist), WorkerLost when a
        device fails; the cache is then not to be used any more.
        """
        if not tokens:
            raise DecodeError("no token to process")
        if logits not in ("last", "all"):
            raise UsageError(f"logits={logits!r}: expected 'last' or 'all'")
        if self.n_past + len(tokens) > self.n_ctx:
            raise DecodeError(
                f"{len(tokens)} tokens after {self.n_past} do not fit a context of {self.n_ctx}"
            )
        self._check_tokens(tokens)
        for start in range(0, len(tokens), self.n_batch):
            self._decode_batch(tokens[start : start + self.n_batch], logits == "all")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.model.n_vocab:
            bad = low if low < 0 else high
            raise DecodeError(f"token {bad} is not in the vocabulary of {self.model.n_vocab}")

    def _decode_batch(self, tokens: Sequence[int], every: bool) -> None:
        count = len(tokens)
        ids = (ctypes.c_int32 * count)(*tokens)
        wanted = (ctypes.c_int8 * count)(*([1] * count)) if every else None
        batch = Batch(
            n_tokens=count,
            token=ctypes.addressof(ids),
            logits=ctypes.addressof(wanted) if wanted is not None else None,
        )
        engine.forget_errors()
        with interrupt.deferred():
            status = self._llama.decode(self.handle, batch)
        self.check()
        if status != 0:
            raise DecodeError(f"the engine could not process {count} tokens: {self._why(status)}")
        self.n_past += count

    def encode(self, tokens: Sequence[int]) -> None:
        """Run the encoder of a model that has one over `tokens` (one batch)."""
        self._check_tokens(tokens)
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = Batch(n_tokens=len(tokens), token=ctypes.addressof(ids))
        with interrupt.deferred():
            status = self._llama.encode(self.handle, batch)
        self.check()
        if status != 0:
            raise DecodeError(f"the engine could not encode: {self._why(status)}")

    def synchronize(self) -> None:
        """Wait until every result that was asked for has arrived."""
        with interrupt.deferred():
            self._llama.synchronize(self.handle)
        self.check()

    def logits(self, index: int = -1) -> npt.NDArray[np.float32]:
        """A copy of the logits, (n_vocab,), of an output by number, or counted from the end."""
        self.synchronize()
        pointer = self._llama.get_logits_ith(self.handle, index)
        if not pointer:
            raise DecodeError(f"there are no logits {index}")
        return np.frombuffer(ctypes.string_at(pointer, 4 * self.model.n_vocab), np.float32)

    def clear(self) -> None:
        """Forget everything; what devices still compute is waited for where it must be."""
        with interrupt.deferred():
            self._llama.memory_clear(self._memory, False)
        self.check()
        self.n_past = 0

    def truncate(self, n_past: int) -> None:
        """Keep the first `n_past` tokens; raises ContextError where the cache cannot."""
        if not self._llama.memory_seq_rm(self._memory, 0, n_past, -1):
            raise ContextError(f"this model's cache cannot go back to {n_past} tokens")
        self.n_past = n_past

    def save_state(self) -> bytes:
        """Sequence 0's part of the cache, for `load_state` of an equal context."""
        size = self._llama.state_seq_get_size(self.handle, 0)
        data = ctypes.create_string_buffer(size)
        got = self._llama.state_seq_get_data(self.handle, ctypes.addressof(data), size, 0)
        self.check()
        if got == 0:
            raise ContextError("the engine cannot save this context's state")
        return data.raw[:got]

    def load_state(self, state: bytes, n_past: int) -> None:
        """Put back what `save_state` gave when the cache held `n_past` tokens."""
        got = self._llama.state_seq_set_data(
            self.handle, ctypes.cast(ctypes.c_char_p(state), ctypes.c_void_p), len(state), 0
        )
        self.check()
        if got != len(state):
            raise ContextError("the engine cannot load this state")
        self.n_past = n_past

    def _c_params(self) -> Any:
        params, c = self.params, self._llama.context_default_params()
        threads = params.n_threads or math_cores()
        c.n_ctx = params.n_ctx
        c.n_batch = params.n_batch
        c.n_ubatch = params.n_ubatch
        c.n_seq_max = params.n_seq_max
        c.n_outputs_max_per_seq = 0 if params.outputs_all else 1
        c.n_threads = threads
        c.n_threads_batch = params.n_threads_batch or threads
        c.type_k = cache_type(params.type_k)
        c.type_v = cache_type(params.type_v)
        if params.flash_attn not in FLASH_ATTN:
            raise UsageError(f"flash_attn={params.flash_attn!r}: expected auto, on or off")
        c.flash_attn_type = FLASH_ATTN[params.flash_attn]
        c.offload_kqv = params.offload_kqv
        c.embeddings = params.embeddings
        c.op_offload = params.op_offload
        return c

    def _why(self, status: int = 0) -> str:
        for device in self.model.devices:
            error = getattr(device, "allocation_error", None)
            if isinstance(error, AllocationError):
                return f"{device.name}: {error}"
        lines = engine.recent_errors()
        return lines[-1] if lines else f"the engine gives no reason (status {status})"


def cache_type(name: str) -> int:
    """ggml's number of a KV cache type."""
    if name not in CACHE_TYPES:
        raise UsageError(f"unknown cache type {name!r}; there are {', '.join(CACHE_TYPES)}")
    return layouts.TYPE_NUMBERS[name]


def math_cores() -> int:
    """Physical cores that this process may use: more threads than that slow the kernels down."""
    try:
        usable = os.sched_getaffinity(0)
    except AttributeError:
        return max(1, (os.cpu_count() or 2) // 2)
    siblings = set()
    for cpu in usable:
        file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings.add(file.read_text().strip())
        except OSError:
            siblings.add(str(cpu))
    return max(1, len(siblings))
