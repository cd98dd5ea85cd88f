"""`Context`: the memory of one conversation with a model, and the decoding of tokens into it.

Owns a llama_context and looks after every device whenever the engine has returned, since the loss
of a worker may be silent in C. One thread at a time; several contexts may run on several threads.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from caravan import engine, interrupt
from caravan.engine.llama import Batch
from caravan.errors import ContextError, DecodeError, UsageError
from caravan.llm import orphans
from caravan.llm.advice import require_room
from caravan.llm.devices import check_all
from caravan.llm.dryrun import refuse_endless
from caravan.llm.model import Model
from caravan.llm.params import ContextParams, c_context_params
from caravan.llm.refusal import Refusals, reason
from caravan.trace import head

_SEQUENCE = 0

Outputs = Literal["last", "all", "none"]


class Context:
    """A conversation. Use it as a context manager, or `close` it; closing its model does so too.

    Attributes:
        model, params: as given.
        n_ctx: tokens it can hold.
        n_batch: most tokens the engine takes in one call; `decode` splits longer ones itself.
        n_past: tokens it holds.
        handle: address of the llama_context; 0 once closed.
    """

    def __init__(self, model: Model, params: ContextParams | None = None) -> None:
        """Allocate it on all devices of the model; blocks.

        Raises DoesNotFit and other ContextErrors (most often a device has no room for it), and
        WorkerLost.
        """
        self.handle = 0
        self.model = model
        self.params = params or ContextParams()
        self._llama = engine.load().llama
        model.require_open()
        if model.params.vocab_only:
            raise ContextError(f"{model.path}: only the vocabulary was loaded")
        try:
            with interrupt.deferred():
                self.handle = self._make()
            check_all(model.devices)
        except BaseException:
            self.close()
            raise
        model.contexts.add(self)
        self.n_ctx: int = self._llama.n_ctx_seq(self.handle)
        self._memory: int | None = self._llama.get_memory(self.handle)
        self.n_batch: int = self._largest_call()
        # The CPU computes inside the call and has no pipeline to fill, so it can be stopped sooner.
        n_ubatch: int = self._llama.n_ubatch(self.handle)
        self._step = self.n_batch if model.devices else min(n_ubatch, self.n_batch)
        self.n_past = 0
        self._tokens = np.zeros(self.n_batch, np.int32)
        self._positions = np.zeros(self.n_batch, np.int32)
        self._outputs = np.zeros(self.n_batch, np.int8)
        self._batch = Batch(
            token=self._tokens.ctypes.data,
            pos=self._positions.ctypes.data,
            logits=self._outputs.ctypes.data,
        )

    def _make(self) -> int:
        orphans.free_all()
        check_all(self.model.devices)
        self._require_room()
        refusals = Refusals(self.model.devices)
        handle: int = (
            self._llama.init_from_model(self.model.handle, c_context_params(self.params)) or 0
        )
        if not handle:
            cause = refusals.cause()
            raise ContextError(
                f"no context of {self.params.n_ctx or self.model.n_ctx_train} tokens:"
                f" {cause or reason('the engine refuses it')}"
            ) from cause
        return handle

    def _require_room(self) -> None:
        """Where the model was planned for another context, or others were made meanwhile."""
        model = self.model
        if model.is_recurrent:
            return
        refuse_endless(self.params.n_ctx)
        if model.needs is not None:
            sized = replace(self.params, n_ctx=self.params.n_ctx or model.n_ctx_train)
            require_room(model.needs, model.devices, sized)

    def _largest_call(self) -> int:
        # without causal attention the engine computes all of a call at once, or ends the process
        whole = self._memory is None or not self._llama.get_causal_attn(self.handle)
        size: int = (self._llama.n_ubatch if whole else self._llama.n_batch)(self.handle)
        return size

    def __repr__(self) -> str:
        state = f"{self.n_past} of {self.n_ctx} tokens" if self.handle else "closed"
        return f"<Context of {self.model.path.name}: {state}>"

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "handle", 0) and not sys.is_finalizing():
            orphans.leave(self._llama.free, self.handle)

    def close(self) -> None:
        """Free it. Does nothing the second time."""
        handle, self.handle = self.handle, 0
        if handle:
            self.model.contexts.discard(self)
            with interrupt.deferred():
                self._llama.free(handle)

    def require_open(self) -> int:
        """The handle; raises ContextError once the context is closed."""
        if not self.handle:
            raise ContextError("the context is closed")
        return self.handle

    @property
    def room(self) -> int:
        """How many more tokens it can hold."""
        # a recurrent model keeps a state of one size, whatever it has read
        return (1 << 31) - 1 if self.model.is_recurrent else self.n_ctx - self.n_past

    def decode(
        self, tokens: Sequence[int], *, pos0: int | None = None, logits: Outputs = "last"
    ) -> None:
        """Read tokens, after those it holds already.

        With workers it may return before they have computed all; `synchronize`, or the call that
        reads the logits, waits.

        Args:
            tokens: of any number.
            pos0: how many of the tokens it holds are to be kept; None for all.
            logits: for which of these tokens to compute logits; `all` only up to `n_batch` tokens.

        Raises DecodeError and, after Ctrl-C, KeyboardInterrupt; `n_past` then tells what was kept.
        Raises WorkerLost when a device fails: the context is then of no further use.
        """
        self.require_open()
        if pos0 is not None:
            self.rewind(pos0)
        values = self._checked(tokens, logits)
        # "all" is one call, because each call of the engine forgets the logits of the one before
        step = self.n_batch if logits == "all" else self._step
        with interrupt.deferred():
            for start in range(0, len(values), step):
                if interrupt.pending():
                    return  # `deferred` raises
                part = values[start : start + step]
                last = start + len(part) == len(values)
                self._decode(part, logits if last else "none")

    def decode_one(self, token: int) -> None:
        """Read one token, and compute its logits."""
        self.decode((token,))

    def _checked(self, tokens: Sequence[int], logits: Outputs) -> NDArray[np.int64]:
        values = np.asarray(tokens, np.int64)
        count = len(values)
        if logits == "all" and count > self.n_batch:
            raise UsageError(f"logits of {count} tokens at once; n_batch is {self.n_batch}")
        if count and not (values.min() >= 0 and values.max() < self.model.n_vocab):
            raise DecodeError(f"a token is not in the vocabulary of {self.model.n_vocab}")
        if count > self.room:
            raise DecodeError(
                f"{count} more tokens do not fit: the context holds {self.n_past} of {self.n_ctx}"
            )
        if self._memory is None and count > self.n_batch:
            raise DecodeError(f"this model reads at most {self.n_batch} tokens (n_ubatch)")
        return values

    def _decode(self, part: NDArray[np.int64], logits: Outputs) -> None:
        count = len(part)
        self._tokens[:count] = part
        self._positions[:count] = np.arange(self.n_past, self.n_past + count)
        self._outputs[:count] = logits == "all"
        self._outputs[count - 1] = logits != "none"
        self._batch.n_tokens = count
        with head.call("decode", count):
            status = self._llama.decode(self.handle, self._batch)
        if status:
            self._failed(status)
        if self._memory is not None:
            self.n_past += count
        for device in self.model.devices:
            device.check()

    def _failed(self, status: int) -> NoReturn:
        self._see_past()
        check_all(self.model.devices)
        words = {
            1: "no room in the context's memory",
            2: "stopped",
            -1: "the engine refuses the batch",
        }
        raise DecodeError(f"decoding failed: {words.get(status) or reason(f'status {status}')}")

    def _see_past(self) -> None:
        if self._memory is not None:
            self.n_past = self._llama.memory_seq_pos_max(self._memory, _SEQUENCE) + 1

    def rewind(self, n_past: int) -> None:
        """Forget all but the first `n_past` tokens.

        Raises DecodeError when it holds fewer, or when the model cannot go back that far.
        """
        self.require_open()
        if not 0 <= n_past <= self.n_past:
            raise DecodeError(f"cannot go to token {n_past}: the context holds {self.n_past}")
        if n_past == self.n_past:
            return
        if not self._llama.memory_seq_rm(self._memory, _SEQUENCE, n_past, -1):
            raise DecodeError(f"this model cannot go back to token {n_past}")
        self.n_past = n_past

    def clear(self) -> None:
        """Forget everything."""
        self.require_open()
        if self._memory is not None:
            self._llama.memory_clear(self._memory, False)
        self.n_past = 0

    def synchronize(self) -> None:
        """Wait until everything is computed; raises WorkerLost if a device was lost meanwhile."""
        with interrupt.deferred(), head.call("synchronize"):
            self._llama.synchronize(self.require_open())
        check_all(self.model.devices)

    def require_logits(self, i: int = -1) -> int:
        """Address of the logits that `logits` would copy; valid until the next call."""
        self.synchronize()
        engine.forget_errors()
        address: int | None = self._llama.get_logits_ith(self.handle, i)
        if not address:
            raise DecodeError(f"no logits of token {i}: they were not asked for")
        return address

    def logits(self, i: int = -1) -> NDArray[np.float32]:
        """A copy of the logits of token `i` of the last engine call, or counted from the end of
        those that have logits. Waits; raises DecodeError when there are none, and WorkerLost."""
        address = self.require_logits(i)
        values = (ctypes.c_float * self.model.n_vocab).from_address(address)
        return np.array(values, np.float32)

    def save_state(self) -> bytes:
        """All that it holds, for `restore_state` of a context of the same model and formats."""
        handle = self.require_open()
        self.synchronize()
        buffer = bytearray(self._llama.state_seq_get_size(handle, _SEQUENCE))
        place = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        with interrupt.deferred():
            size = self._llama.state_seq_get_data(handle, place, len(buffer), _SEQUENCE)
        check_all(self.model.devices)
        if not size:
            raise DecodeError(f"cannot save the state: {reason('the engine refuses')}")
        return bytes(memoryview(buffer)[:size])

    def restore_state(self, state: bytes) -> bool:
        """Hold what was saved; False, and empty, where the engine does not accept it."""
        handle = self.require_open()
        engine.forget_errors()
        with interrupt.deferred():
            size = self._llama.state_seq_set_data(handle, state, len(state), _SEQUENCE)
        check_all(self.model.devices)
        if not size:
            self.clear()
        self._see_past()
        return bool(size)
