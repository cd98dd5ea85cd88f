"""`RawContext`: one llama_context, and the engine's calls on it.

Looks after every device whenever the engine has returned, since the loss of a worker may be silent
in C. It ends with the first loss; `Context` makes another one. One thread at a time, but for
`close`, which waits for the call that is running.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from caravan import engine, interrupt
from caravan.engine.llama import Batch
from caravan.errors import ContextError, DecodeError, WorkerLost
from caravan.llm import orphans
from caravan.llm.advice import require_room
from caravan.llm.devices import check_all
from caravan.llm.dryrun import refuse_endless
from caravan.llm.history import Outputs
from caravan.llm.params import ContextParams, c_context_params
from caravan.llm.refusal import Refusals, reason
from caravan.trace import head

if TYPE_CHECKING:
    from caravan.llm.model import Model

_SEQUENCE = 0


class Rows(NamedTuple):
    """Tokens of several sequences for one call of the engine, one element each.

    Attributes:
        outputs: 1 for those whose logits are computed.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequences: NDArray[np.int32]
    outputs: NDArray[np.int8]


class RawContext:
    """See the module. Every method but `close` raises WorkerLost once a device is lost.

    Attributes:
        handle: address of the llama_context; 0 once closed.
        n_ctx: tokens it can hold.
        n_batch: most tokens the engine takes in one call.
        n_ubatch: most tokens it computes at once.
        step: how many of them are given to it, if nothing speaks for more.
        keeps: whether it keeps what it has read; some models do not.
        whole: whether all of a text has to be computed at once.
    """

    def __init__(self, model: Model, params: ContextParams) -> None:
        """Allocate it on all devices of the model; blocks.

        Raises DoesNotFit and other ContextErrors (most often a device has no room for it), and
        WorkerLost.
        """
        self.handle = 0
        self._lost: WorkerLost | None = None
        self._model = model
        self._llama = engine.load().llama
        # held in each call of the engine, so that nothing is freed meanwhile
        self._calling = threading.Lock()
        with model.changing:
            model.require_open()
            self._holds = model.holds
            try:
                with interrupt.deferred():
                    self.handle = self._make(params)
                check_all(self._holds)
            except BaseException:
                self.close()
                raise
            self._read_facts()
            model.serve(self, params)
        self._tokens = np.zeros(self.n_batch, np.int32)
        self._positions = np.zeros(self.n_batch, np.int32)
        self._outputs = np.zeros(self.n_batch, np.int8)
        self._batch = Batch(
            token=self._tokens.ctypes.data,
            pos=self._positions.ctypes.data,
            logits=self._outputs.ctypes.data,
        )
        # each token belongs to one sequence, whose number stands where the pointer shows
        self._counts = np.ones(self.n_batch, np.int32)
        self._sequences = np.zeros(self.n_batch, np.int32)
        steps = np.arange(self.n_batch, dtype=np.uint64) * np.uint64(self._sequences.itemsize)
        self._places = steps + np.uint64(self._sequences.ctypes.data)

    def _make(self, params: ContextParams) -> int:
        orphans.free_all()
        check_all(self._holds)
        self._require_room(params)
        refusals = Refusals(self._model.devices)
        handle: int = self._llama.init_from_model(self._model.handle, c_context_params(params)) or 0
        if not handle:
            check_all(self._holds)
            cause = refusals.cause()
            raise ContextError(
                f"no context of {params.n_ctx or self._model.n_ctx_train} tokens:"
                f" {cause or reason('the engine refuses it')}"
            ) from cause
        return handle

    def _require_room(self, params: ContextParams) -> None:
        """Where the model was planned for another context, or others were made meanwhile."""
        model = self._model
        if model.is_recurrent:
            return
        refuse_endless(params.n_ctx)
        if model.needs is not None:
            sized = replace(params, n_ctx=params.n_ctx or model.n_ctx_train)
            require_room(model.needs, model.devices, sized)

    def _read_facts(self) -> None:
        llama, handle = self._llama, self.handle
        self.n_ctx: int = llama.n_ctx_seq(handle)
        self.n_ubatch: int = llama.n_ubatch(handle)
        self._memory: int | None = llama.get_memory(handle)
        self.keeps = self._memory is not None
        # without causal attention the engine computes all of a call at once, or ends the process
        self.whole = not (self.keeps and llama.get_causal_attn(handle))
        n_ubatch = self.n_ubatch
        self.n_batch: int = n_ubatch if self.whole else llama.n_batch(handle)
        # The CPU computes inside the call and has no pipeline to fill, so it can be stopped sooner.
        self.step = self.n_batch if self._model.devices else min(n_ubatch, self.n_batch)

    def __repr__(self) -> str:
        state = f"{self.n_ctx} tokens" if self.handle else "closed"
        return f"<RawContext of {self._model.path.name}: {state}>"

    def __del__(self) -> None:
        if getattr(self, "handle", 0) and not sys.is_finalizing():
            orphans.leave(self._llama.free, self.handle)

    def close(self, lost: WorkerLost | None = None) -> None:
        """Free it, when the call that is running has returned. Idempotent.

        `lost`: what whoever uses it still is told.
        """
        with interrupt.deferred(), self._calling:
            handle, self.handle = self.handle, 0
            if handle:
                self._lost = lost
                self._model.contexts.discard(self)
                self._llama.free(handle)

    def require_open(self) -> int:
        """The handle; raises ContextError once it is closed."""
        if not self.handle:
            error = self._lost or ContextError("the context is closed")
            raise error.with_traceback(None)
        return self.handle

    def check(self) -> None:
        """Raises WorkerLost once a device is lost."""
        check_all(self._holds)

    def decode(self, tokens: Sequence[int], position: int, outputs: Outputs) -> None:
        """One call of the engine; it may return before the devices have computed.

        Raises DecodeError; `positions` then tells what was kept.
        """
        count = len(tokens)
        with self._calling:
            self._tokens[:count] = tokens
            self._positions[:count] = np.arange(position, position + count)
            self._outputs[:count] = outputs == "all"
            self._outputs[count - 1] = outputs != "none"
            self._batch.n_seq_id = self._batch.seq_id = None
            status = self._decode(count)
        if status:
            self._failed(status)

    def decode_rows(self, rows: Rows) -> None:
        """One call of the engine with tokens of several sequences; as `decode`."""
        count = len(rows.tokens)
        with self._calling:
            self._tokens[:count] = rows.tokens
            self._positions[:count] = rows.positions
            self._sequences[:count] = rows.sequences
            self._outputs[:count] = rows.outputs
            self._batch.n_seq_id = self._counts.ctypes.data
            self._batch.seq_id = self._places.ctypes.data
            status = self._decode(count)
        if status:
            self._failed(status)

    def _decode(self, count: int) -> int:
        self._batch.n_tokens = count
        handle = self.require_open()
        with head.call("decode", count):
            return int(self._llama.decode(handle, self._batch))

    def _failed(self, status: int) -> NoReturn:
        self.check()
        words = {
            1: "no room in the context's memory",
            2: "stopped",
            -1: "the engine refuses the batch",
        }
        raise DecodeError(f"decoding failed: {words.get(status) or reason(f'status {status}')}")

    def positions(self, sequence: int = _SEQUENCE) -> int:
        """How many tokens the engine says it holds; 0 for one that keeps none."""
        with self._calling:
            self.require_open()
            if self._memory is None:
                return 0
            return int(self._llama.memory_seq_pos_max(self._memory, sequence)) + 1

    def rewind(self, n_past: int, sequence: int = _SEQUENCE) -> bool:
        """Forget all but the first tokens; False where the model cannot."""
        with self._calling:
            self.require_open()
            return bool(self._llama.memory_seq_rm(self._memory, sequence, n_past, -1))

    def clear(self) -> None:
        """Forget everything."""
        with self._calling:
            self.require_open()
            if self._memory is not None:
                self._llama.memory_clear(self._memory, False)

    def synchronize(self) -> None:
        """Wait until everything is computed."""
        with interrupt.deferred(), head.call("synchronize"), self._calling:
            self._llama.synchronize(self.require_open())
        check_all(self._holds)

    def logits(self, i: int) -> NDArray[np.float32]:
        """A copy of the logits of output `i`, once they are there; raises DecodeError where there
        are none."""
        self.synchronize()
        with self._calling:
            values = (ctypes.c_float * self._model.n_vocab).from_address(self._find_logits(i))
            return np.array(values, np.float32)

    def embedding(self, sequence: int) -> NDArray[np.float32]:
        """A copy of the pooled embedding of what a sequence has read in the newest call, once it is
        there; raises DecodeError where there is none."""
        self.synchronize()
        with self._calling:
            address = self._llama.get_embeddings_seq(self.require_open(), sequence)
            if not address:
                raise DecodeError("no embedding: none was asked for")
            values = (ctypes.c_float * self._model.n_embd_out).from_address(address)
            return np.array(values, np.float32)

    def sample(self, chain: int, i: int) -> int:
        """The token that a sampler chain of the engine takes by the logits of output `i`."""
        self.synchronize()
        with self._calling:
            # the engine ends the process where it finds none
            self._find_logits(i)
            return int(self._llama.sampler_sample(chain, self.handle, i))

    def _find_logits(self, i: int) -> int:
        engine.forget_errors()
        address: int | None = self._llama.get_logits_ith(self.require_open(), i)
        if not address:
            raise DecodeError(f"no logits of token {i}: they were not asked for")
        return address

    def save_state(self) -> bytes:
        """See `Context.save_state`."""
        self.synchronize()
        with self._calling:
            handle = self.require_open()
            buffer = bytearray(self._llama.state_seq_get_size(handle, _SEQUENCE))
            place = (ctypes.c_char * len(buffer)).from_buffer(buffer)
            with interrupt.deferred():
                size = self._llama.state_seq_get_data(handle, place, len(buffer), _SEQUENCE)
        check_all(self._holds)
        if not size:
            raise DecodeError(f"cannot save the state: {reason('the engine refuses')}")
        return bytes(memoryview(buffer)[:size])

    def restore_state(self, state: bytes) -> bool:
        """See `Context.restore_state`; False leaves it in no known state."""
        engine.forget_errors()
        with self._calling:
            handle = self.require_open()
            with interrupt.deferred():
                size = self._llama.state_seq_set_data(handle, state, len(state), _SEQUENCE)
        check_all(self._holds)
        return bool(size)
